"""The first step of the page: the runs are read and grouped by setting. Nothing after it reads a run's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_clipx.analysis.replay.traced_numbers import TracedNumber, numbers_of_step
from verl_clipx.analysis.report.palette import DrawnSetting, with_colours
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting, baseline_of, settings_of
from verl_clipx.analysis.runs.traced import TracedUpdate, traced_updates


@dataclass(frozen=True)
class ReadRuns:
    """The runs of a page.

    Args:
        settings: the runs by setting, in the order in which each was first named.
        baseline: the setting that the others are compared with.
        updates: the traced update that the page shows of each setting; settings without traces have none.
        step_numbers: from the label of a setting with such an update to `numbers_of_run` of the update's whole step;
            without settings whose traced numbers are not finite.
    """

    settings: Sequence[DrawnSetting]
    baseline: Setting
    updates: Sequence[TracedUpdate] = ()
    step_numbers: Mapping[str, Mapping[str, TracedNumber]] = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        """The runs of all settings."""
        return [run for setting in self.settings for run in setting.runs]


def read_runs(paths: Sequence[Path], baseline: str | None = None) -> ReadRuns:
    """Read the runs of a page.

    Args:
        paths: of each run, its folder or the file of its log; at least one.
        baseline: the run or method that the others are compared with; by default GRPO, or else the first.

    Raises:
        FileNotFoundError: a run has no log.
        ValueError: a log or a trace cannot be read, a run is named twice, there are too many settings, or no run or
            method has the baseline's name.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError("a run is named twice: name each once.")
    settings = with_colours(settings_of([read_run(path) for path in paths]))
    updates = traced_updates(settings)
    step_numbers = {}
    for update in updates:
        numbers_and_whether_whole = numbers_of_step(update.run, update.step)
        if numbers_and_whether_whole is not None:
            step_numbers[update.setting.label] = numbers_and_whether_whole[0]
    return ReadRuns(
        settings=settings,
        baseline=baseline_of(settings, baseline),
        updates=updates,
        step_numbers=step_numbers,
    )
