"""What the plugin does when verl opens its logs: keep the lines that a resumed run builds on, write down the run, and
group its keys in TensorBoard.

verl's file logger starts an empty file, so that a run that was killed at step 7 and resumed would show step 8 alone.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_clipx.common.files import parse_json, read_lines, read_whole_number, write_private_text
from verl_clipx.common.run_files import LOG_VARIABLE, checkpoint_step, log_path, record_path
from verl_clipx.common.secrets import redacted
from verl_clipx.loss.metric_listing import tensorboard_charts

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"

VERSIONED = ("verl", "verl-clipx", "torch", "transformers", "vllm")


def install(tracking: ModuleType) -> None:
    """Wraps verl.utils.tracking's `Tracking`, which opens the logs of a run, in the process of the trainer."""
    wrap_function_wrapper(tracking, "Tracking.__init__", _with_ours)


def _with_ours(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    project, experiment, backends, config = _arguments(*positional, **named)
    path, config = log_path(project, experiment), config or {}
    to_file = "file" in ([backends] if isinstance(backends, str) else backends)
    # A pipe or a device keeps no lines, and must not be replaced.
    if to_file and (path.is_file() or not path.exists()):
        open_log(path, kept_lines(path, resumed_step(config.get("trainer", {}))), tracking, wrapped, positional, named)
        write_record(path, config)
    else:
        wrapped(*positional, **named)
    if "tensorboard" in tracking.logger:
        tracking.logger["tensorboard"].writer.add_custom_scalars({"clipx": tensorboard_charts()})


def open_log(path: Path, kept: list[bytes], tracking: Any, wrapped: Any, positional: tuple, named: dict) -> None:
    """Has verl open its logs; its file log takes the place of the old one only when it has the kept lines.

    verl empties the file that it opens. So it opens one beside the log, whose name it gets from the variable that it
    reads, and goes on to write to it after the file has become the log. A kill before that leaves the old log; what it
    leaves beside it, the next start overwrites.

    Args:
        path: of the log; its folder is made if missing.
        kept: lines that it begins with.
        tracking: verl's `Tracking`, of which `wrapped` is the constructor, with `positional` and `named` arguments.

    Raises:
        OSError: the disk is full, for instance; names the log, which is as it was.
    """
    log = path.resolve()
    beside = log.with_name(f".{log.name}.partial")
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _environment_variable(LOG_VARIABLE, str(beside)):
            wrapped(*positional, **named)
        file_logger = tracking.logger["file"]
        try:
            _write_all(file_logger.fp, b"".join(kept))
            os.fsync(file_logger.fp.fileno())
        except OSError as error:
            file_logger.finish()
            message = f"{path}: the steps before could not be copied ({error.strerror}); nothing of it is lost"
            raise OSError(error.errno, f"{message}. Make room and start the run again") from error
        os.replace(beside, log)
        file_logger.filepath = str(path)
    finally:
        beside.unlink(missing_ok=True)
    print(f"clipx: the file log is {path}, with {len(kept)} lines of the run that goes on", flush=True)


def _write_all(file: Any, content: bytes) -> None:
    # verl's file has no buffer: a write may take a part.
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


@contextmanager
def _environment_variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _arguments(project_name, experiment_name, default_backend="console", config=None):
    return project_name, experiment_name, default_backend, config


def resumed_step(trainer: dict[str, Any]) -> int:
    """The step of the checkpoint that a run goes on from, 0 for none, as verl finds it.

    Args:
        trainer: verl's node of that name.
    """
    mode = trainer.get("resume_mode", "disable")
    if mode == "resume_path":
        return checkpoint_step(trainer.get("resume_from_path"))
    folder = Path(str(trainer.get("default_local_dir")))
    if mode != "auto" or not (folder / LATEST).exists():
        return 0
    step = read_whole_number(folder / LATEST)
    # Without the folder verl trains from scratch.
    return step if (folder / f"global_step_{step}").exists() else 0


def kept_lines(path: Path, step: int) -> list[bytes]:
    """The lines of a log up to a step, each with its end; what else stands in the file is left out.

    Args:
        path: of the log; need not exist.
        step: the last one to keep; 0: none, as there is no run to go on with.
    """
    kept = []
    for number, line in enumerate(read_lines(path) if step and path.exists() else [], 1):
        try:
            if parse_json(line, "")["step"] <= step:
                kept.append(line.removesuffix(b"\n") + b"\n")
        except (ValueError, TypeError, KeyError):
            logger.warning("%s, line %d: cut off, or not one of verl's; the resumed run leaves it out", path, number)
    return kept


def write_record(log: Path, config: dict[str, Any]) -> None:
    """Writes a run's configuration and versions beside its log, for its owner only.

    `ray_kwargs` is left out, whose runtime environment may hold any credential; others are redacted.

    Args:
        log: of verl's file logger.
        config: as verl resolved it.
    """
    record = {
        "versions": {name: version for name in VERSIONED if (version := _version(name))},
        "configuration": redacted({key: value for key, value in config.items() if key != "ray_kwargs"}),
    }
    write_private_text(record_path(log), json.dumps(record, indent=1, default=str) + "\n")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
