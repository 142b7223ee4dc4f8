"""What the page compares: settings with their runs, what sets them apart, and the metrics of every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.report.palette import DrawnSetting
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting, differing_values, numbered
from verl_clipx.losses.base.parameters import NODE

# Stands for a value that a setting doesn't have.
NO_VALUE = "–"


@dataclass(frozen=True)
class ComparedRun:
    """A run as the page lists it.

    Args:
        name: of its folder or its log.
        seed: of its training; NO_VALUE if nothing says it.
        steps: which it trained, such as "1 to 8".
    """

    name: str
    seed: str
    steps: str


@dataclass(frozen=True)
class ComparedSetting:
    """A setting as the page lists it.

    Args:
        label: what the page calls it.
        name: the label with what sets its only run apart, or with the number of its runs.
        colour: in every figure.
        seeds: the number of its independent runs.
        runs: at least one.
    """

    label: str
    name: str
    colour: str
    seeds: int
    runs: Sequence[ComparedRun]


def list_settings(settings: Sequence[DrawnSetting]) -> list[ComparedSetting]:
    """Returns the settings as the page lists them."""
    return [
        ComparedSetting(
            label=setting.label,
            name=_name_of(setting),
            colour=setting.colour,
            seeds=setting.seeds,
            runs=[_compared_run(run) for run in setting.runs],
        )
        for setting in settings
    ]


def _compared_run(run: Run) -> ComparedRun:
    """Returns a run as the page lists it."""
    seed = NO_VALUE if run.seed is None else str(run.seed)
    return ComparedRun(name=run.name, seed=seed, steps=say_steps(run))


def _name_of(setting: Setting) -> str:
    """Returns a setting's label with what sets its only run apart, or with the number of its runs."""
    if len(setting.runs) == 1:
        return setting.name_of(setting.runs[0])
    return f"{setting.label}, {len(setting.runs)} runs"


def say_steps(run: Run) -> str:
    """Says which steps a run's log has, without a validation before the first."""
    steps = [int(step) for step in run.log.index if step > 0]
    if not steps:
        return "no training step"
    text = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    missing = steps[-1] - steps[0] + 1 - len(steps)
    if missing:
        text += f", {missing} missing"
    return text


def list_versions(runs: Sequence[Run]) -> list[str]:
    """Returns each package of the runs with its versions, such as "verl 0.9.0 and 0.9.1"."""
    versions: dict[str, list[str]] = {}
    for run in runs:
        for package, version in run.versions.items():
            if version is not None and version not in versions.setdefault(package, []):
                versions[package].append(version)
    return [f"{package} {' and '.join(sorted(of_runs))}" for package, of_runs in versions.items() if of_runs]


def list_differences(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Returns what sets the settings apart: key to the value of each setting, the plugin's keys first.

    The plugin's keys that some of the settings lack, the parameters of some methods, share a row.
    """
    shared: dict[str, list[str | None]] = {}
    of_some: dict[str, list[str | None]] = {}
    for key, values in differing_values([setting.runs[0] for setting in settings]).items():
        texts = []
        for value in numbered(values):
            # The values are in JSON, where a text is in quotes.
            texts.append(None if value is None else value.strip('"'))
        if key.startswith(f"{NODE}.") and None in texts:
            of_some[key.removeprefix(f"{NODE}.")] = texts
        else:
            shared[key] = texts
    ordered = sorted(shared, key=lambda key: (not key.startswith(f"{NODE}."), key))
    rows = {}
    for key in ordered:
        rows[key] = [NO_VALUE if text is None else text for text in shared[key]]
    if of_some:
        rows["the method’s own"] = [_parameters_of(index, of_some) for index in range(len(settings))]
    return rows


def _parameters_of(index: int, parameters: Mapping[str, Sequence[str | None]]) -> str:
    """Returns the parameters that the setting with an index has, with its values."""
    return ", ".join(f"{name} {values[index]}" for name, values in parameters.items() if values[index] is not None)


def tabulate_steps(settings: Sequence[Setting]) -> pandas.DataFrame:
    """Returns the metrics that the figures show, a row a step of each run."""
    return pandas.concat([_steps_of(setting, run) for setting in settings for run in setting.runs])


def _steps_of(setting: Setting, run: Run) -> pandas.DataFrame:
    """Returns the metrics of a run that the figures show, a row a step, with what names the run."""
    columns = [name for name in run.log if name in keys.DRAWN or name.startswith(keys.OWN)]
    table = run.log[columns].rename_axis("step").reset_index()
    table = table.assign(run=run.name, setting=setting.label, seed=run.seed)
    return table[["run", "setting", "seed", "step", *columns]]
