"""Where a run's files are: the log of verl's file logger, the plugin's files beside it, and verl's checkpoints."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_clipx.common.files import read_whole_number
from verl_clipx.run.keys import (
    CHECKPOINT_FOLDER,
    EXPERIMENT_NAME,
    LOGGERS,
    NAMED_CHECKPOINT,
    PROJECT_NAME,
    RESUME_MODE,
    RESUME_PATH,
    value_at,
)

METRICS = "metrics.jsonl"
# In a run's folder, trainer.validation_data_dir as the recipes set it.
VALIDATION = "validation"
LOG_VARIABLE = "VERL_FILE_LOGGER_PATH"
STEP_FOLDER = re.compile(r"global_step_(\d+)")
# verl's file with the step of the last checkpoint; verl writes it once the rest of the checkpoint is there.
LATEST = "latest_checkpointed_iteration.txt"


def log_path(config: Mapping[str, Any]) -> Path:
    """Return where verl's file logger writes, by the environment variables and names that it reads."""
    if LOG_VARIABLE in os.environ:
        return Path(os.environ[LOG_VARIABLE])
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser()
    return root / str(value_at(config, PROJECT_NAME)) / f"{value_at(config, EXPERIMENT_NAME)}.jsonl"


def logs_to_file(config: Mapping[str, Any]) -> bool:
    """Return whether a run writes verl's file log."""
    loggers = value_at(config, LOGGERS) or ()
    return "file" in ([loggers] if isinstance(loggers, str) else loggers)


def own_log_path(config: Mapping[str, Any]) -> Path | None:
    """Return where the plugin keeps a run's log: verl's file log, or without one in trainer.default_local_dir.

    None if the run lacks the node clipx or says clipx.log=false, and where the log is a pipe or a device.
    """
    node = config.get("clipx")
    if not node or not node.get("log", True):
        return None
    folder = value_at(config, CHECKPOINT_FOLDER)
    if logs_to_file(config):
        log = log_path(config)
    elif folder:
        log = Path(folder) / METRICS
    else:
        return None
    return log if log.is_file() or not log.exists() else None


def record_path(log: Path) -> Path:
    """Return the record of a log's run, beside the log."""
    return log.with_suffix(".run.json")


def lock_path(log: Path) -> Path:
    """Return the lock of a log's run, beside the log."""
    return log.with_suffix(".lock")


def traces_path(log: Path) -> Path:
    """Return the folder of a run's traces: `traces` beside metrics.jsonl, `NAME.traces` beside NAME.jsonl."""
    return log.with_name("traces") if log.name == METRICS else log.with_suffix(".traces")


def checkpoint_step(path: str | Path | None) -> int:
    """Return a checkpoint's step by its path, verl's folder `global_step_<N>` or one in it; 0 if the path names none.

    Folders above it may have such a name too: like verl (trainer_base.py, `_load_checkpoint`), this goes by the last.
    """
    steps = STEP_FOLDER.findall(str(path))
    return int(steps[-1]) if steps else 0


def resumed_step(config: Mapping[str, Any]) -> int:
    """Return the step of the checkpoint that a run continues from, found as verl finds it; 0 if there is none."""
    mode = value_at(config, RESUME_MODE)
    if mode == NAMED_CHECKPOINT:
        return checkpoint_step(value_at(config, RESUME_PATH))
    folder = Path(str(value_at(config, CHECKPOINT_FOLDER)))
    if mode != "auto" or not (folder / LATEST).exists():
        return 0
    step = read_whole_number(folder / LATEST)
    # Without the folder verl trains from scratch.
    return step if (folder / f"global_step_{step}").exists() else 0
