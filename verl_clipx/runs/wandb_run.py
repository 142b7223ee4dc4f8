"""Runs of W&B, read where they are: `wandb://entity/project/run`, by wandb's public API and its user's own login."""

import contextlib
from pathlib import Path
from typing import Any

from verl_clipx.runs.run_log import Rows

SCHEME = "wandb:"


def is_of_wandb(path: Path) -> bool:
    """Whether a path names a run of W&B; in a path, the two slashes behind `wandb:` are one."""
    return path.parts[:1] == (SCHEME,)


def read_wandb(path: Path) -> tuple[Rows, dict[str, Any]]:
    """The numbers of a run of W&B by step, all that it logged, and its name and configuration.

    Raises:
        ValueError: the path has not three parts, or W&B refuses: it has no such run, or nobody is logged in.
        ModuleNotFoundError: wandb, which comes with verl, is not installed.
    """
    name = "/".join(path.parts[1:])
    if len(path.parts) != 4:
        raise ValueError(f"wandb://{name}: not of the form wandb://entity/project/run, where run is the run's ID.")
    import wandb

    rows: Rows = {}
    try:
        run = wandb.Api().run(name)
        for entry in run.scan_history():
            row = rows.setdefault(int(entry["_step"]), {})
            # W&B adds keys that begin with _; a table or a picture is no number, and NaN is a word.
            for key in entry.keys() - {key for key in entry if key.startswith("_")}:
                with contextlib.suppress(TypeError, ValueError):
                    row[key] = float(entry[key])
        configuration = dict(run.config)
    except (wandb.Error, ValueError) as error:
        raise ValueError(f"wandb://{name}: {error}") from None
    if not rows:
        raise ValueError(f"wandb://{name}: it has logged no step yet.")
    return rows, {"display_name": run.name, "configuration": configuration}
