"""The log and the record of a run with a clipx node: verl's file log, but one that a resumed run goes on with.

verl's own file logger starts an empty file: a run that was killed after step 7 and resumed would lack the steps before.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_clipx.analysis.runs.run_log import Rows, entries_in, rows_of
from verl_clipx.common.commit import commit_here
from verl_clipx.common.files import remove_partials, replacing, write_text
from verl_clipx.common.secrets import redact
from verl_clipx.common.verl_version import version_here
from verl_clipx.run.content import hash_of_data, hash_of_model, hash_of_reward
from verl_clipx.run.keys import flat
from verl_clipx.run.record import Content, RunRecord, as_json, record_of
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
    """Writes a run's record beside its log, readable by its owner alone.

    Credentials are redacted, and `ray_kwargs` is left out, since its runtime environment may hold any.
    """
    configuration = flat(redact({key: value for key, value in config.items() if key != "ray_kwargs"}))
    record = record_of(configuration)
    record = dataclasses.replace(
        record,
        started=time.strftime("%Y-%m-%d %H:%M %Z"),
        commit=commit_here(),
        versions={name: version for name in VERSIONED if (version := version_here(name))},
        machines=dataclasses.replace(record.machines, accelerators=tuple(_accelerators())),
        **with_hashes(record),
    )
    save_record(log, record)


def with_hashes(record: RunRecord) -> dict[str, Content]:
    """Returns what a run reads, with the hash of each content that is on this machine."""
    hashes = {
        "model": hash_of_model(next(iter(record.model.paths), None)),
        "critic": hash_of_model(next(iter(record.critic.paths), None)),
        "data": hash_of_data(record.data.paths),
        "validation": hash_of_data(record.validation.paths),
        "reward": hash_of_reward(next(iter(record.reward.paths), None)),
    }
    return {name: dataclasses.replace(getattr(record, name), hash=digest) for name, digest in hashes.items()}


def save_record(log: Path, record: RunRecord) -> None:
    """Writes a record beside its log."""
    write_text(record_path(log), json.dumps(as_json(record), indent=1, default=str) + "\n", private=True)


def _accelerators() -> list[str]:
    """Returns the kinds of accelerators in the Ray cluster: this process need not see any itself."""
    import ray

    found = ray.cluster_resources() if ray.is_initialized() else {}
    return sorted(name.removeprefix(ACCELERATOR) for name in found if name.startswith(ACCELERATOR))
