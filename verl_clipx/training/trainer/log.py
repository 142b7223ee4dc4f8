"""The log and the record of a run with a clipx node: verl's file log, but one that a resumed run goes on with.

verl's own file logger starts an empty file: a run that was killed after step 7 and resumed would lack the steps before.
"""

import json
import time
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_clipx.analysis.runs.run_log import Rows, entries_in, rows_of
from verl_clipx.common.commit import commit_here
from verl_clipx.common.files import remove_partials, replacing, write_text
from verl_clipx.common.secrets import redact
from verl_clipx.common.verl_version import installed_version
from verl_clipx.run.run_files import record_path, resumed_step, traces_path

# The names of Ray's resources for the kind of a node's accelerators begin with this.
ACCELERATOR = "accelerator_type:"

VERSIONED = ("verl", "verl-clipx", "torch", "transformers", "vllm")


def open_log(log: Path, config: dict[str, Any]) -> tuple[BinaryIO, Rows]:
    """Opens a run's file log, which begins with the lines of the run that goes on, and writes its record.

    The old file is replaced only by one that holds these lines. Returns also what they say, by step.
    """
    step = resumed_step(config.get("trainer") or {})
    # No other run is here; the one that was killed was writing them.
    remove_partials(log.parent, f"{log.stem}.*")
    kept = kept_lines(log, step)
    before = rows_of(b"".join(kept), log)
    with replacing(log.resolve()) as partial:
        partial.write_bytes(b"".join(kept))
    remove_later_traces(traces_path(log), step)
    write_record(log, config)
    print(f"clipx: the file log is {log}, with {len(kept)} lines of the run that goes on", flush=True)
    # Without a buffer, as verl opens it: a line is there once it is logged.
    return log.open("ab", buffering=0), before


def line_of(data: dict[str, Any], step: int, **more: Any) -> bytes:
    """Returns a step's line as verl's file logger writes it, and with it what else is not empty."""
    line = {"step": step, "data": data} | {key: value for key, value in more.items() if value}
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def kept_lines(path: Path, step: int) -> list[bytes]:
    """Returns a log's lines up to a step (0: none), with their ends; drops unreadable ones with a warning."""
    if not (step and path.exists()):
        return []
    return [entry.line for entry in entries_in(path.read_bytes(), path) if entry.step <= step]


def remove_later_traces(folder: Path, step: int) -> None:
    """Removes the traces of the steps after one: the run makes these steps again, or is another run."""
    if folder.is_dir():
        # Imports pyarrow.
        from verl_clipx.run.trace_format import remove_shards

        remove_partials(folder)
        remove_shards(folder, step + 1)


def write_record(log: Path, config: dict[str, Any]) -> None:
    """Writes a run's start, accelerators, configuration and versions beside its log, readable by its owner alone.

    Credentials are redacted, and `ray_kwargs` is left out, since its runtime environment may hold any.
    """
    record = {
        "started": time.strftime("%Y-%m-%d %H:%M %Z"),
        "accelerators": _accelerators(),
        "commit": commit_here(),
        "reward_hash": _reward_hash(config),
        "versions": {name: version for name in VERSIONED if (version := installed_version(name))},
        "configuration": redact({key: value for key, value in config.items() if key != "ray_kwargs"}),
    }
    write_text(record_path(log), json.dumps(record, indent=1, default=str) + "\n", private=True)


def _reward_hash(config: dict[str, Any]) -> str | None:
    """Returns the hash of the file of the user's reward function; None if the run has none, or it cannot be found."""
    for node in (config.get("reward") or {}, config):
        path = str((node.get("custom_reward_function") or {}).get("path") or "")
        if path.startswith("pkg://"):
            module = find_spec(path.removeprefix("pkg://").replace("/", "."))
            path = (module and module.origin) or ""
        if path and Path(path := path.removeprefix("file://")).is_file():
            return sha256(Path(path).read_bytes()).hexdigest()
    return None


def _accelerators() -> list[str]:
    """Returns the kinds of accelerators in the Ray cluster: this process need not see any itself."""
    import ray

    found = ray.cluster_resources() if ray.is_initialized() else {}
    return sorted(name.removeprefix(ACCELERATOR) for name in found if name.startswith(ACCELERATOR))
