"""What the plugin does when verl opens its logs: keep the lines that a resumed run builds on and what it leaves out,
write down the run, append whole lines only, and group its keys in TensorBoard.

verl's file logger starts an empty file: without this, a run that was killed after step 7 and resumed would lack the
lines of these steps.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_clipx.common.checkpoints import resumed_step, step_of_line
from verl_clipx.common.files import file_names_in, read_lines, remove_partials, replacing, write_private_text
from verl_clipx.common.run_files import LOG_VARIABLE, left_out_path, log_path, own_log_path, record_path, traces_path
from verl_clipx.common.secrets import redacted
from verl_clipx.loss.metric_listing import tensorboard_charts

logger = logging.getLogger(__name__)

VALIDATION = re.compile(r"[0-9]{1,18}\.jsonl")

# The names of Ray's resources for the kind of a node's accelerators begin with this.
ACCELERATOR = "accelerator_type:"

VERSIONED = ("verl", "verl-clipx", "torch", "transformers", "vllm")


def install(tracking: ModuleType) -> None:
    """Wraps verl.utils.tracking's `Tracking`, which opens the logs of a run, in the process of the trainer."""
    wrap_function_wrapper(tracking, "Tracking.__init__", _with_ours)


def _with_ours(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    project, experiment, backends, config = _arguments(*positional, **named)
    backends, config = [backends] if isinstance(backends, str) else list(backends), config or {}
    path, to_file = log_path(project, experiment), "file" in backends
    if not to_file and (own := own_log_path(config)) is not None:
        path, to_file = own, True
        positional, named = (project, experiment, [*backends, "file"], config), {}
    # A pipe or a device keeps no lines, and must not be replaced.
    if to_file and (path.is_file() or not path.exists()):
        trainer = config.get("trainer", {})
        step = resumed_step(trainer)
        moved = leave_out_later_files(path, step, trainer.get("validation_data_dir"))
        kept, left_out = kept_lines(path, step)
        open_log(path, kept, tracking, wrapped, positional, named, keep_old=bool(left_out))
        write_record(path, config)
        print(f"clipx: {_told(path, step, len(kept), left_out, moved)}", flush=True)
    else:
        wrapped(*positional, **named)
    if "tensorboard" in tracking.logger:
        tracking.logger["tensorboard"].writer.add_custom_scalars({"clipx": tensorboard_charts()})


def _told(path: Path, step: int, kept: int, left_out: list[str], moved: int) -> str:
    told = f"the file log is {path}, with {kept} lines of the run that goes on"
    if left_out or moved:
        after = f"after step {step}, from which it goes on" if step else "of the run that was here"
        told += f"; left out and kept in {left_out_path(path)}: {', '.join(left_out) or 'no line'}"
        told += f", {moved} files of traces and validations {after}" if moved else f" {after}"
    return told


def open_log(
    path: Path, kept: list[bytes], tracking: Any, wrapped: Any, positional: tuple, named: dict, *, keep_old: bool
) -> None:
    """Lets verl open its logs; its file log replaces the old one only once it has the kept lines.

    verl empties the file that it opens. Here the environment variable makes it open a file beside the log, which it
    keeps writing to after that file has become the log. If the process is killed before, the old log is unchanged, and
    the next start overwrites the file beside it.

    Args:
        path: the log; its folder is made if missing.
        kept: the lines that the log begins with.
        tracking: verl's `Tracking`, whose constructor `wrapped` takes the arguments `positional` and `named`.
        keep_old: whether the old log is kept, in the folder of what is left out.

    Raises:
        OSError: for instance because the disk is full; the message names the log, which is unchanged.
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
            if keep_old:
                with replacing(left_out_path(path) / log.name) as old:
                    shutil.copyfile(log, old)
        except OSError as error:
            file_logger.finish()
            message = f"{path}: the steps before could not be copied ({error.strerror}); nothing of it is lost"
            raise OSError(error.errno, f"{message}. Make room and start the run again") from error
        os.replace(beside, log)
        file_logger.filepath = str(path)
        file_logger.fp = WholeLines(file_logger.fp, path)
    finally:
        beside.unlink(missing_ok=True)


class WholeLines:
    """The file of a log, to which lines are only appended whole; while the disk is full they wait in memory.

    Args:
        file: opened without a buffer, at its end.
        path: the log's, for messages.
    """

    def __init__(self, file: Any, path: Path):
        self._file, self._path = file, path
        self._waiting: list[bytes] = []
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)

    def write(self, line: bytes) -> int:
        """Appends a line, after those that are still waiting."""
        waited, error = bool(self._waiting), None
        self._waiting.append(line)
        end = os.fstat(self._file.fileno()).st_size
        try:
            while self._waiting:
                _write_all(self._file, self._waiting[0])
                end += len(self._waiting.pop(0))
        except OSError as caught:
            error = caught
            # A part of a line has no end: the next line would continue it.
            os.ftruncate(self._file.fileno(), end)
        if error is not None and not waited:
            logger.warning(NO_ROOM, self._path, error.strerror)
        elif waited and error is None:
            logger.warning("%s: has room again; every step is in it", self._path)
        return len(line)

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Closes the file and says what could not be written; verl calls this more than once."""
        if self._waiting:
            self.write(b"")
        if lost := list(filter(None, self._waiting)):
            logger.error("%s: lacks the last %d lines, for which there was no room", self._path, len(lost))
        self._waiting = []
        self._file.close()


NO_ROOM = (
    "%s: a step could not be logged (%s). The training goes on, and its lines wait in memory until there is room; "
    "those that wait when the run ends are lost."
)


def _write_all(file: Any, content: bytes) -> None:
    # verl opens its file without a buffer, so one call may write only a part.
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


def kept_lines(path: Path, step: int) -> tuple[list[bytes], list[str]]:
    """The lines of a log up to a step, each with its end, and in words what else is in the file.

    Args:
        path: the log, which need not exist.
        step: the last one to keep; 0: none, as there is no run to go on with.
    """
    kept, later, cut_off = [], [], 0
    for number, line in enumerate(read_lines(path) if path.exists() else [], 1):
        of_line = step_of_line(line)
        if of_line is None:
            cut_off += 1
            logger.warning("%s, line %d: cut off, or not one of verl's; this run leaves it out", path, number)
        elif step and of_line <= step:
            kept.append(line.removesuffix(b"\n") + b"\n")
        else:
            later.append(of_line)
    left_out = [f"{len(later)} lines of steps {min(later)} to {max(later)}"] if later else []
    return kept, left_out + [f"{cut_off} lines that are cut off"] * bool(cut_off)


def leave_out_later_files(log: Path, step: int, validations: str | None) -> int:
    """Moves traces and validations of later steps, which the run will make again, out of its way; returns how many.

    Also removes what killed processes left half-written of its record, traces and validations.

    Args:
        log: the run's log.
        step: the step that the run continues from; 0: it starts anew.
        validations: trainer.validation_data_dir, or None.
    """
    remove_partials(log.parent, f"{record_path(log).name}*")
    traces, moved = traces_path(log), 0
    remove_partials(traces)
    later = []
    if traces.is_dir():
        # Imports pyarrow.
        from verl_clipx.common.traces import shards_in

        later = [shard.path_in(traces) for shard in shards_in(traces) if shard.step > step]
    if validations:
        folder = Path(validations)
        remove_partials(folder)
        names = [name for name in file_names_in(folder) if VALIDATION.fullmatch(name)]
        # A resumed run may validate the step that it continues from once more, and then writes that file anew.
        later += [folder / name for name in names if int(name.removesuffix(".jsonl")) > step or not step]
    for path in later:
        target = left_out_path(log) / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
        moved += 1
    return moved


def write_record(log: Path, config: dict[str, Any]) -> None:
    """Writes a run's start, accelerators, configuration and versions beside its log, readable only by its owner.

    `ray_kwargs` is left out, since its runtime environment may hold any credential; other credentials are redacted.

    Args:
        log: the file of verl's file logger.
        config: the configuration as verl resolved it.
    """
    record = {
        "started": time.strftime("%Y-%m-%d %H:%M %Z"),
        "accelerators": _accelerators(),
        "versions": {name: version for name in VERSIONED if (version := _version(name))},
        "configuration": redacted({key: value for key, value in config.items() if key != "ray_kwargs"}),
    }
    write_private_text(record_path(log), json.dumps(record, indent=1, default=str) + "\n")


def _accelerators() -> list[str]:
    """The kinds of accelerators in the Ray cluster: this process need not see any itself."""
    import ray

    found = ray.cluster_resources() if ray.is_initialized() else {}
    return sorted(name.removeprefix(ACCELERATOR) for name in found if name.startswith(ACCELERATOR))


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
