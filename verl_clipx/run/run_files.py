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
# The folder in a run's folder to which the recipes set trainer.validation_data_dir.
VALIDATION = "validation"
LOG_VARIABLE = "VERL_FILE_LOGGER_PATH"
STEP_FOLDER = re.compile(r"global_step_(\d+)")
# verl's file with the step of the last checkpoint. verl writes it when the rest of the checkpoint is complete.
LATEST = "latest_checkpointed_iteration.txt"


def log_path(config: Mapping[str, Any]) -> Path:
    """Return the file that verl's file logger writes, by the environment variables and the keys that it reads."""
    if LOG_VARIABLE in os.environ:
        return Path(os.environ[LOG_VARIABLE])
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser()
    return root / str(value_at(config, PROJECT_NAME)) / f"{value_at(config, EXPERIMENT_NAME)}.jsonl"


def logs_to_file(config: Mapping[str, Any]) -> bool:
    """Return whether a run writes verl's file log."""
    loggers = value_at(config, LOGGERS) or ()
    if isinstance(loggers, str):
        return loggers == "file"
    return "file" in loggers


def own_log_path(config: Mapping[str, Any]) -> Path | None:
    """Return the file in which the plugin keeps a run's log: verl's file log, or else one in trainer.default_local_dir.

    Returns:
        The file, which need not exist; None without a clipx node, with clipx.log=false, without a folder, and if the
        log is no regular file, such as a pipe or a device.
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
    """Return the path of the run's record, which is beside the log."""
    return log.with_suffix(".run.json")


def lock_path(log: Path) -> Path:
    """Return the path of the run's lock, which is beside the log."""
    return log.with_suffix(".lock")


def traces_path(log: Path) -> Path:
    """Return the folder of a run's traces: `traces` beside metrics.jsonl, `NAME.traces` beside NAME.jsonl."""
    return log.with_name("traces") if log.name == METRICS else log.with_suffix(".traces")


def checkpoint_step(path: str | Path | None) -> int:
    """Return the step of a checkpoint by its path; 0 if the path names no step.

    Args:
        path: verl's folder global_step_<N>, or a folder in it. If folders above it have such a name too, the last name
            counts, as in verl (trainer_base.py, `_load_checkpoint`).
    """
    steps = STEP_FOLDER.findall(str(path))
    return int(steps[-1]) if steps else 0


def resumed_step(config: Mapping[str, Any]) -> int:
    """Return the step of the checkpoint that a run continues from, as verl finds it; 0 if there is none."""
    mode = value_at(config, RESUME_MODE)
    if mode == NAMED_CHECKPOINT:
        return checkpoint_step(value_at(config, RESUME_PATH))
    folder = Path(str(value_at(config, CHECKPOINT_FOLDER)))
    if mode != "auto" or not (folder / LATEST).exists():
        return 0
    step = read_whole_number(folder / LATEST)
    # If the checkpoint's folder is missing, verl trains from scratch.
    return step if (folder / f"global_step_{step}").exists() else 0
