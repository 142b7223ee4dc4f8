"""A run's files, and verl's file log as a table."""

from dataclasses import dataclass
from pathlib import Path

import pandas

from verl_clipx.files import parse_json, read_bytes
from verl_clipx.run_files import METRICS


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes.

    Args:
        path: the run's folder.
    """

    path: Path

    @property
    def metrics(self) -> Path:
        """verl's file log: VERL_FILE_LOGGER_PATH."""
        return self.path / METRICS

    @property
    def validation(self) -> Path:
        """trainer.validation_data_dir."""
        return self.path / "validation"


def read_run_log(path: Path) -> pandas.DataFrame:
    """Reads the JSON lines of verl's file logger.

    Args:
        path: the file that VERL_FILE_LOGGER_PATH named.

    Returns:
        A row a training step (index `step`), a column a metric. A step that was logged twice, as the first one is by
        the validation before training, becomes one row.

    Raises:
        FileNotFoundError: there is no such file: the run has not logged yet, or `file` is not in trainer.logger.
        ValueError: the file is empty, too large, cut short or of something else; names the line.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such log. Run with trainer.logger=[file] and VERL_FILE_LOGGER_PATH={path}."
        )
    text = read_bytes(path)
    if not text.strip():
        raise ValueError(f"{path}: empty: the run has not logged its first step yet.")
    return _table(text, path)


def read_growing_log(path: Path) -> pandas.DataFrame:
    """Reads the log of a run that goes on or was killed: without the line that is not whole.

    Args:
        path: as for `read_run_log`.

    Returns:
        The same table; without rows while there is no whole line, or no file.

    Raises:
        ValueError: a whole line is of something else.
    """
    text = read_bytes(path) if path.exists() else b""
    return _table(text[: text.rfind(b"\n") + 1], path)


def _table(text: bytes, path: Path) -> pandas.DataFrame:
    rows: dict[int, dict[str, float]] = {}
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = parse_json(line, "")
            step, data = int(entry["step"]), dict(entry["data"])
        except (ValueError, TypeError, KeyError, OverflowError):
            if number == len(lines) > 1 and not text.endswith(b"\n"):
                message = f"cut short: the log is whole up to line {number - 1}. Remove the rest to read it"
            else:
                message = 'not a line {"step": …, "data": {…}} of verl\'s file logger'
            raise ValueError(f"{path}, line {number}: {message}: {line[:60].decode(errors='replace')!r}") from None
        numbers = {key: value for key, value in data.items() if isinstance(value, int | float)}
        rows.setdefault(step, {}).update(numbers)
    table = pandas.DataFrame.from_dict(rows, orient="index").sort_index()
    table.index.name = "step"
    return table
