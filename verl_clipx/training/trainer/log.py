"""Writes the file log and the record of a run with a clipx node.

A resumed run continues its log. verl's own file logger would begin an empty one, so that the log of a run that was
killed after step 7 and resumed would lack the steps up to 7.
"""

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from verl_clipx.analysis.runs.run_log import Rows, entries_in, parse_rows
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
from verl_clipx.run.kept_values import strip_credentials
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

logger = logging.getLogger(__name__)

# The beginning of the names of those Ray resources that say which kind of accelerators a node has.
ACCELERATOR = "accelerator_type:"

# What a run without a checkpoint started from. It has no path.
FROM_MODEL = Content()

# The packages whose versions a run's record contains, as far as they are installed.
VERSIONED = ("verl", "verl-clipx", "torch", "transformers", "vllm", "sglang")


def open_log(log: Path, config: dict[str, Any]) -> tuple[BinaryIO, Rows]:
    """Open a run's file log, and write its record.

    The log is rewritten. A resumed run keeps the lines and traces of the steps up to its checkpoint; later and damaged
    lines and later traces are removed. If the process is killed while the file is written, the old file is still there,
    or the new one with the kept lines.

    Args:
        log: the path of the file log.
        config: verl's whole configuration.

    Returns:
        The file, to which lines are appended; and the metrics in the kept lines, by step.

    Raises:
        ValueError: as for `kept_lines`.
    """
    step = resumed_step(config)
    # A run that was killed may have left partial files. No other run writes here.
    remove_partials(log.parent, f"{log.stem}.*")
    lines = kept_lines(log, step)
    content = b"".join(lines)
    rows = parse_rows(content, log)
    with replacing(log.resolve()) as partial:
        partial.write_bytes(content)
    remove_later_traces(traces_path(log), step)
    write_record(log, config, start=find_start(log, config, has_steps=bool(lines)))
    if lines:
        print(f"clipx: the file log is {log}, with {len(lines)} lines of the run that goes on", flush=True)
    else:
        print(f"clipx: the file log is {log}", flush=True)
    # Without a buffer, as verl opens it, so that a line is in the file as soon as it is logged.
    return log.open("ab", buffering=0), rows


def format_line(data: dict[str, Any], step: int, *, fingerprints: dict[str, Any] | None, off: list[str]) -> bytes:
    """Return a step's line of a file log: the entries that verl's own file logger writes, then the plugin's.

    Args:
        data: the step's metrics, by key.
        step: the number of the step.
        fingerprints: those of the step's rollout batch, which become the entry `batch`. None: there is no such entry.
        off: what no longer observes the run, by the names in `Observers.off`. They become the entry `off`. Empty: there
            is no such entry.

    Returns:
        The line as JSON, with its newline.
    """
    line = {"step": step, "data": data}
    if fingerprints:
        line["batch"] = fingerprints
    if off:
        line["off"] = off
    return orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"


def kept_lines(path: Path, step: int) -> list[bytes]:
    """Return the lines of a log that a resumed run keeps, each with its newline.

    Unreadable lines are left out, with a warning.

    Args:
        path: the log. It need not exist.
        step: the step of the checkpoint from which the run is resumed. 0: the run starts from the beginning and keeps
            no line.

    Raises:
        ValueError: the log has lines, and none of them can be read.
    """
    if step == 0 or not path.exists():
        return []
    return [entry.line for entry in entries_in(path.read_bytes(), path) if entry.step <= step]


def remove_later_traces(folder: Path, step: int) -> None:
    """Remove the traces of the steps after the checkpoint, and all partial files, whatever their step.

    A run must not show traces of steps that it has not trained. It trains the later steps anew, or never reaches them.
    Nothing may be writing traces meanwhile.

    Args:
        folder: the run's folder of traces. It need not exist.
        step: the step of the checkpoint from which the run is resumed. 0: the run starts from the beginning, and all
            traces are removed.
    """
    if folder.is_dir():
        # Imported here, because this module imports pyarrow, which takes long.
        from verl_clipx.run.trace_format import remove_shards

        remove_partials(folder)
        remove_shards(folder, step + 1)


def find_start(log: Path, config: dict[str, Any], has_steps: bool) -> Content:
    """Return the checkpoint that a run began from, or `FROM_MODEL` if it began from the base model.

    Args:
        log: the run's file log.
        config: verl's whole configuration.
        has_steps: whether the log has steps of the run from before it was resumed. If so, the run began where its
            record says.
    """
    path = record_path(log)
    if has_steps:
        if path.exists():
            with contextlib.suppress(ValueError):
                return read_record(read_json_object(path), str(path)).start
        logger.warning(START_UNKNOWN, path)
        return FROM_MODEL
    step = resumed_step(config)
    if step == 0:
        return FROM_MODEL
    if value_at(config, RESUME_MODE) == NAMED_CHECKPOINT:
        folder = str(value_at(config, RESUME_PATH))
    else:
        folder = str(Path(str(value_at(config, CHECKPOINT_FOLDER))) / f"global_step_{step}")
    # Not through `Path`, which makes s3:/ of s3://, so that the text would no longer be known as an address.
    return Content(paths=(strip_credentials(folder),), hash=hash_of_checkpoint(Path(folder)))


def write_record(log: Path, config: dict[str, Any], start: Content = FROM_MODEL) -> None:
    """Write the record of a run that starts now beside the run's log. Only the file's owner can read the record.

    To what `record_of` derives from the configuration it adds the installed software, the accelerators, and hashes of
    the models, data and code that the run reads. Hashing large files takes a while.

    Args:
        log: the run's file log.
        config: verl's whole configuration, nested, with its interpolations resolved.
        start: the checkpoint that the run started from, or `FROM_MODEL`.
    """
    record = hash_contents(record_of(config))
    versions = {}
    for name in VERSIONED:
        version = version_here(name)
        if version:
            versions[name] = version
    record = dataclasses.replace(
        record,
        started=time.strftime("%Y-%m-%d %H:%M %Z"),
        commit=commit_here(),
        versions=versions,
        start=start,
        files={key: hash_of_named(path) for key, path in further_files(flat(config)).items()},
        machines=dataclasses.replace(record.machines, accelerators=tuple(_accelerators())),
    )
    save_record(log, record)


def hash_contents(record: RunRecord) -> RunRecord:
    """Return a record with the hashes of what its run reads, and with the size of the model.

    These are the fields model, critic, data, validation and reward. Something that is not on this machine has no hash.
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
    return dataclasses.replace(record, **contents)


def save_record(log: Path, record: RunRecord) -> None:
    """Write a record beside its log, readable by its owner alone."""
    write_text(record_path(log), json.dumps(as_json(record), indent=1, default=str) + "\n", private=True)


def record_receipt(log: Path, data: Mapping[str, Any]) -> None:
    """Write the worker's receipt into the run's record.

    Args:
        log: the run's file log.
        data: the metrics of a step that has the receipt, by key.
    """
    metrics = receipt_in(data)
    # The difference is NaN if no token could be compared, and infinite if a gradient is not finite. JSON has neither.
    difference: float | None = metrics[RECEIPT.key]
    if not math.isfinite(difference):
        difference = None
    failed_checks = None
    if RECEIPT_FAILED.key in metrics:
        # Rounded up: verl averages the metric over ranks, and the failure of one must not vanish.
        failed_checks = math.ceil(metrics[RECEIPT_FAILED.key])
    path = record_path(log)
    record = read_record(read_json_object(path), str(path))
    receipt = dataclasses.replace(record.receipt, difference=difference, failed=failed_checks)
    save_record(log, dataclasses.replace(record, receipt=receipt))


def receipt_in(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the receipt's metrics among those of a step, by their keys without verl's prefix; empty if it has none."""
    metrics = {}
    for key, value in data.items():
        for metric in (RECEIPT, RECEIPT_FAILED):
            if str(key).endswith(metric.key):
                metrics[metric.key] = float(value)
    return metrics


def _accelerators() -> list[str]:
    """Return the kinds of accelerators in the Ray cluster. This process need not see any of them itself."""
    import ray

    if not ray.is_initialized():
        return []
    resources = ray.cluster_resources()
    return sorted(name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR))


START_UNKNOWN = (
    "clipx: the log has steps from before this start, but %s is missing or cannot be read. The new record says that "
    "the run started from the model, although it may have started from a checkpoint."
)
