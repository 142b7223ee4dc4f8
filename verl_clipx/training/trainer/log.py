"""The log and the record of a run with a clipx node: verl's file log, but one that a resumed run goes on with.

verl's own file logger starts an empty file: a run that was killed after step 7 and resumed would lack the steps before.
"""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_clipx.analysis.runs.run_log import Rows, entries_in, rows_of
from verl_clipx.common.commit import commit_here
from verl_clipx.common.files import read_json_object, remove_partials, replacing, write_text
from verl_clipx.common.verl_version import version_here
from verl_clipx.losses.base.shared_metrics import RECEIPT, RECEIPT_FAILED
from verl_clipx.run.content import (
    count_parameters,
    hash_of_checkpoint,
    hash_of_data,
    hash_of_model,
    hash_of_named,
    hash_of_reward,
)
from verl_clipx.run.kept_values import bare_address
from verl_clipx.run.keys import (
    CHECKPOINT_FOLDER,
    NAMED_CHECKPOINT,
    RESUME_MODE,
    RESUME_PATH,
    flat,
    further_files,
    value_at,
)
from verl_clipx.run.record import Content, RunRecord, as_json, read_record, record_of
from verl_clipx.run.run_files import record_path, resumed_step, traces_path

# The names of Ray's resources for the kind of a node's accelerators begin with this.
ACCELERATOR = "accelerator_type:"

# What a run without a checkpoint started from.
FROM_MODEL = Content()

VERSIONED = ("verl", "verl-clipx", "torch", "transformers", "vllm", "sglang")


def open_log(log: Path, config: dict[str, Any]) -> tuple[BinaryIO, Rows]:
    """Opens a run's file log, which begins with the lines of the run that goes on, and writes its record.

    The old file is replaced only by one that holds these lines. Returns also what they say, by step.
    """
    step = resumed_step(config)
    # No other run is here; the one that was killed was writing them.
    remove_partials(log.parent, f"{log.stem}.*")
    kept = kept_lines(log, step)
    before = rows_of(b"".join(kept), log)
    with replacing(log.resolve()) as partial:
        partial.write_bytes(b"".join(kept))
    remove_later_traces(traces_path(log), step)
    write_record(log, config, start=started_from(log, config, goes_on=bool(kept)))
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


def started_from(log: Path, config: dict[str, Any], goes_on: bool) -> Content:
    """Returns the checkpoint that a run began from, without a path where it began from the model.

    Args:
        goes_on: whether the log has steps of the run before it was resumed. It then began where its record says.
    """
    path = record_path(log)
    if goes_on and path.exists():
        with contextlib.suppress(ValueError):
            return read_record(read_json_object(path), str(path)).start
    step = resumed_step(config)
    if goes_on or step == 0:
        return FROM_MODEL
    folder = Path(str(value_at(config, CHECKPOINT_FOLDER))) / f"global_step_{step}"
    if value_at(config, RESUME_MODE) == NAMED_CHECKPOINT:
        folder = Path(str(value_at(config, RESUME_PATH)))
    return Content(paths=(bare_address(str(folder)),), hash=hash_of_checkpoint(folder))


def write_record(log: Path, config: dict[str, Any], start: Content = FROM_MODEL) -> None:
    """Writes a run's record beside its log, readable by its owner alone.

    Args:
        log: the run's file log.
        config: verl's whole configuration, nested, with its interpolations resolved.
        start: the checkpoint that the run started from; `FROM_MODEL`, which has no path, if it began from the base
            model.
    """
    record = record_of(config)
    record = dataclasses.replace(
        record,
        started=time.strftime("%Y-%m-%d %H:%M %Z"),
        commit=commit_here(),
        versions={name: version_here(name) for name in VERSIONED if version_here(name)},
        start=start,
        files={key: hash_of_named(path) for key, path in further_files(flat(config)).items()},
        machines=dataclasses.replace(record.machines, accelerators=tuple(_accelerators())),
        **hashed_contents(record),
    )
    save_record(log, record)


def hashed_contents(record: RunRecord) -> dict[str, Content]:
    """Returns the fields of a record that say what its run reads: the hash of each, and the model's size.

    What is not on this machine has no hash.
    """
    hashes = {
        "model": hash_of_model(record.model.paths),
        "critic": hash_of_model(record.critic.paths),
        "data": hash_of_data(record.data.paths),
        "validation": hash_of_data(record.validation.paths),
        "reward": hash_of_reward(next(iter(record.reward.paths), None)),
    }
    contents = {name: dataclasses.replace(getattr(record, name), hash=digest) for name, digest in hashes.items()}
    contents["model"] = dataclasses.replace(contents["model"], parameters=count_parameters(record.model.paths))
    return contents


def save_record(log: Path, record: RunRecord) -> None:
    """Writes a record beside its log."""
    write_text(record_path(log), json.dumps(as_json(record), indent=1, default=str) + "\n", private=True)


def record_receipt(log: Path, data: Mapping[str, Any]) -> None:
    """Writes what a step's metrics say of the worker's receipt into the run's record."""
    metrics = receipt_in(data)
    # Not a number where no token could be compared, and infinite where a gradient is not finite.
    difference = metrics[RECEIPT.key] if math.isfinite(metrics[RECEIPT.key]) else None
    failed = metrics.get(RECEIPT_FAILED.key)
    path = record_path(log)
    record = read_record(read_json_object(path), str(path))
    result = dataclasses.replace(
        record.receipt,
        difference=difference,
        failed=None if failed is None else math.ceil(failed),
    )
    save_record(log, dataclasses.replace(record, receipt=result))


def receipt_in(data: Mapping[str, Any]) -> dict[str, float]:
    """Returns the receipt's metrics in those of a step, by their keys without the prefix of verl's; empty without."""
    metrics = {}
    for key, value in data.items():
        for metric in (RECEIPT, RECEIPT_FAILED):
            if str(key).endswith(metric.key):
                metrics[metric.key] = float(value)
    return metrics


def _accelerators() -> list[str]:
    """Returns the kinds of accelerators in the Ray cluster: this process need not see any itself."""
    import ray

    if not ray.is_initialized():
        return []
    resources = ray.cluster_resources()
    return sorted(name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR))
