"""What the page compares: settings with their runs, what sets them apart, and the metrics of every step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas

from verl_clipx.analysis.report.palette import DrawnSetting
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting, find_differing_values, number_hashes
from verl_clipx.losses.base.parameters import NODE

# Stands for a value that a setting doesn't have.
NO_VALUE = "–"
# The row of the parameters that only some of the methods have.
METHOD_ROW = "the method’s own"


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
        name: the label with the number of its runs or, of a single run, with what `Setting.name_of` adds.
        colour: its colour in every figure.
        seeds: the number of its independent runs.
        runs: all of its runs, at least one.
    """

    label: str
    name: str
    colour: str
    seeds: int
    runs: Sequence[ComparedRun]


def list_settings(settings: Sequence[DrawnSetting]) -> list[ComparedSetting]:
    """Return the settings as the page lists them."""
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
    """Return a run as the page lists it."""
    seed = NO_VALUE if run.seed is None else str(run.seed)
    return ComparedRun(name=run.name, seed=seed, steps=say_steps(run))


def _name_of(setting: Setting) -> str:
    """Return a setting's label with the number of its runs or, of a single run, with what `Setting.name_of` adds."""
    if len(setting.runs) == 1:
        return setting.name_of(setting.runs[0])
    return f"{setting.label}, {len(setting.runs)} runs"


def say_steps(run: Run) -> str:
    """Say which steps a run's log has, without a validation before the first."""
    steps = [int(step) for step in run.log.index if step > 0]
    if not steps:
        return "no training step"
    text = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    missing = steps[-1] - steps[0] + 1 - len(steps)
    if missing:
        text += f", {missing} missing"
    return text


def list_versions(runs: Sequence[Run]) -> list[str]:
    """Return each package that the runs recorded with its versions, such as "verl 0.9.0 and 0.9.1"."""
    versions_by_package: dict[str, set[str]] = {}
    for run in runs:
        for package, version in run.versions.items():
            if version is not None:
                versions_by_package.setdefault(package, set()).add(version)
    return [f"{package} {' and '.join(sorted(versions))}" for package, versions in versions_by_package.items()]


def list_differences(settings: Sequence[Setting]) -> dict[str, list[str]]:
    """Return the keys in which the settings differ, each with the value of every setting, in their order.

    The plugin's keys come first. Its keys that a setting lacks are parameters of other methods: these share the last
    row, METHOD_ROW, in which each setting has the names and values of its own.
    """
    rows_of_keys: dict[str, list[str]] = {}
    method_parameters: dict[str, list[str | None]] = {}
    # All runs of a setting agree in what makes up the setting, so that the first one stands for them.
    first_runs = [setting.runs[0] for setting in settings]
    for key, values in find_differing_values(first_runs).items():
        texts = [None if value is None else _without_quotes(value) for value in number_hashes(values)]
        if _is_of_plugin(key) and None in texts:
            method_parameters[key.removeprefix(f"{NODE}.")] = texts
        else:
            rows_of_keys[key] = [NO_VALUE if text is None else text for text in texts]
    ordered_keys = sorted(rows_of_keys, key=lambda key: (not _is_of_plugin(key), key))
    rows = {key: rows_of_keys[key] for key in ordered_keys}
    if method_parameters:
        rows[METHOD_ROW] = [_list_parameters(method_parameters, index) for index in range(len(settings))]
    return rows


def _is_of_plugin(key: str) -> bool:
    """Return whether a dotted key is in the plugin's node."""
    return key.startswith(f"{NODE}.")


def _without_quotes(value: str) -> str:
    """Return a value that is in JSON without the quotes that a text has there."""
    return value.strip('"')


def _list_parameters(parameters: Mapping[str, Sequence[str | None]], setting_index: int) -> str:
    """Return the parameters that a setting has, with its values.

    Args:
        parameters: from a parameter's name to the value of each setting, None for a setting that lacks it.
        setting_index: the setting's place among these values.
    """
    texts = []
    for name, values in parameters.items():
        value = values[setting_index]
        if value is not None:
            texts.append(f"{name} {value}")
    return ", ".join(texts)


def tabulate_steps(settings: Sequence[Setting]) -> pandas.DataFrame:
    """Return the metrics that the figures show, with a row for each step of each run."""
    return pandas.concat([_steps_of(setting, run) for setting in settings for run in setting.runs])


def _steps_of(setting: Setting, run: Run) -> pandas.DataFrame:
    """Return the metrics of a run that the figures show, a row for each step, beside its name, setting and seed."""
    columns = [name for name in run.log if name in keys.DRAWN or name.startswith(keys.OWN)]
    table = run.log[columns].rename_axis("step").reset_index()
    table = table.assign(run=run.name, setting=setting.label, seed=run.seed)
    return table[["run", "setting", "seed", "step", *columns]]
