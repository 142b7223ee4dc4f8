"""A run's files, and verl's file logger as a table."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas


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
        return self.path / "metrics.jsonl"

    @property
    def validation(self) -> Path:
        """trainer.validation_data_dir."""
        return self.path / "validation"

    @property
    def checkpoints(self) -> Path:
        """trainer.default_local_dir."""
        return self.path / "checkpoints"

    @property
    def figure(self) -> Path:
        """The figure that `write_report` draws."""
        return self.path / "figure.png"

    @property
    def report(self) -> Path:
        """The text that `write_report` writes."""
        return self.path / "report.md"


def read_run_log(path: Path) -> pandas.DataFrame:
    """Reads the JSON lines of verl's file logger.

    Args:
        path: the file that VERL_FILE_LOGGER_PATH named.

    Returns:
        A row a training step (index `step`), a column a metric. A step that was logged twice, as the first one is by
        the validation before training, becomes one row. A last line that is still being written is left out.

    Raises:
        FileNotFoundError: there is no such file: the run has not logged yet, or `file` is not in trainer.logger.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such log. Run with trainer.logger=[file] and VERL_FILE_LOGGER_PATH={path}."
        )
    rows: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        numbers = {key: value for key, value in entry["data"].items() if isinstance(value, int | float)}
        rows.setdefault(entry["step"], {}).update(numbers)
    table = pandas.DataFrame.from_dict(rows, orient="index").sort_index()
    table.index.name = "step"
    return table


def last_step(path: Path) -> int:
    """The last step in a log; 0 if there is no log yet."""
    if not path.is_file():
        return 0
    table = read_run_log(path)
    return 0 if table.empty else int(table.index[-1])
