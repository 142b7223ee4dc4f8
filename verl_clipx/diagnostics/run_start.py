"""What the plugin does when verl opens its logs: keep the lines that a resumed run builds on, write down the run, and
group its keys in TensorBoard.

verl's file logger starts an empty file, so that a run that was killed at step 7 and resumed would show step 8 alone.
"""

import json
import re
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_clipx.files import parse_json, read_lines, read_whole_number, write_text
from verl_clipx.metric_listing import tensorboard_charts
from verl_clipx.run_files import log_path, record_path

LATEST = "latest_checkpointed_iteration.txt"

VERSIONED = ("verl", "verl-clipx", "torch", "transformers", "vllm")


def install(tracking: ModuleType) -> None:
    """Wraps verl.utils.tracking's `Tracking`, which opens the logs of a run, in the process of the trainer."""
    wrap_function_wrapper(tracking, "Tracking.__init__", _with_ours)


def _with_ours(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    project, experiment, _, config = _arguments(*positional, **named)
    path, config = log_path(project, experiment), config or {}
    kept = kept_lines(path, resumed_step(config.get("trainer", {})))
    wrapped(*positional, **named)
    if "file" in tracking.logger:
        tracking.logger["file"].fp.write(kept)
        write_record(path, config)
    if "tensorboard" in tracking.logger:
        tracking.logger["tensorboard"].writer.add_custom_scalars({"clipx": tensorboard_charts()})


def _arguments(project_name, experiment_name, default_backend="console", config=None):
    return project_name, experiment_name, default_backend, config


def resumed_step(trainer: dict[str, Any]) -> int:
    """The step of the checkpoint that a run goes on from, 0 for none.

    Args:
        trainer: verl's node of that name.
    """
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path":
        found = re.search(r"global_step_(\d+)", str(trainer.get("resume_from_path")))
        return int(found[1]) if found else 0
    latest = Path(str(trainer.get("default_local_dir"))) / LATEST
    return read_whole_number(latest) if mode == "auto" and latest.exists() else 0


def kept_lines(path: Path, step: int) -> bytes:
    """The lines of a log up to a step; what else stands in the file is left out.

    Args:
        path: of the log; need not exist.
        step: the last one to keep; 0: none, as there is no run to go on with.
    """
    kept = b""
    for line in read_lines(path) if step and path.exists() else []:
        try:
            kept += line if parse_json(line, "")["step"] <= step else b""
        except (ValueError, TypeError, KeyError):
            continue
    return kept


def write_record(log: Path, config: dict[str, Any]) -> None:
    """Writes a run's configuration and versions beside its log. `ray_kwargs` is left out: it may hold credentials.

    Args:
        log: of verl's file logger.
        config: as verl resolved it.
    """
    record = {
        "versions": {name: version for name in VERSIONED if (version := _version(name))},
        "configuration": {key: value for key, value in config.items() if key != "ray_kwargs"},
    }
    write_text(record_path(log), json.dumps(record, indent=1, default=str) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
