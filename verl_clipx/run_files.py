"""Where a run's files are: the log of verl's file logger, and what the plugin puts beside it."""

import os
from pathlib import Path

METRICS = "metrics.jsonl"


def log_path(project: str, experiment: str) -> Path:
    """Where verl's file logger writes, by the environment variables that it reads."""
    if "VERL_FILE_LOGGER_PATH" in os.environ:
        return Path(os.environ["VERL_FILE_LOGGER_PATH"])
    root = Path(os.environ.get("VERL_FILE_LOGGER_ROOT", ".")).expanduser()
    return root / project / f"{experiment}.jsonl"


def record_path(log: Path) -> Path:
    """Where the record of a log's run stands: beside it."""
    return log.with_suffix(".run.json")


def traces_path(log: Path) -> Path:
    """The folder of the traces of a log's run: `traces` beside metrics.jsonl, `NAME.traces` beside NAME.jsonl."""
    return log.with_name("traces") if log.name == METRICS else log.with_suffix(".traces")
