"""Runs grouped by setting, and what sets the settings apart."""

import json
import re
from dataclasses import dataclass, field

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.kept_values import is_hash

GRPO_METHOD = "grpo"

# A run that nothing but its folder's name describes is labelled by it. A longer name is cut to what sets it apart.
LONGEST_NAME = 20

_NO_TABLE = pandas.DataFrame(dtype=float)


@dataclass(frozen=True)
class Setting:
    """The runs that differ only in seeds, names and places.

    Args:
        label: what the page calls it: the method and, where methods repeat, what else sets it apart.
        runs: at least one.
    """

    label: str
    runs: list[Run] = field(default_factory=list)

    def table(self, key: str) -> pandas.DataFrame:
        """Returns a metric's values: a row for each step that all its runs have, a column for each run.

        The table is empty, without a column, where a run does not log the metric.
        """
        values_of_runs = [run.values(key) for run in self.runs]
        if not all(map(len, values_of_runs)):
            return _NO_TABLE
        return pandas.concat(values_of_runs, axis=1, join="inner", keys=range(len(values_of_runs)))

    def bins(self, name: str) -> list[str]:
        """Returns the keys of a metric of probability bins; none unless all its runs log a finite value of each."""
        logged_keys = {key for run in self.runs for key in run.log}
        bin_keys = keys.of_bins(name, logged_keys)
        if not all(len(self.mean(key)) for key in bin_keys):
            return []
        return bin_keys

    def name_of(self, run: Run) -> str:
        """Names one of its runs: the label with the seed or, if that does not single it out, with the run's name.

        A single run of unknown seed is named by the label, and so is one whose label is its name.
        """
        if self.label != run.name and run.seed is not None and len(self.runs_by_seed[run.seed]) == 1:
            return f"{self.label}, seed {run.seed}"
        if len(self.runs) == 1:
            return self.label
        return f"{self.label}, {run.name}"

    @property
    def seeds(self) -> int:
        """The number of its independent runs: runs of one seed count as one, and each run of unknown seed counts."""
        return len(self.runs_by_seed)

    def by_seed(self, table: pandas.DataFrame) -> pandas.DataFrame:
        """Returns the means over the runs of each seed, a column a seed.

        Args:
            table: a column a run, in their order.
        """
        return pandas.DataFrame({seed: table.iloc[:, runs].mean(axis=1) for seed, runs in self.runs_by_seed.items()})

    @property
    def runs_by_seed(self) -> dict[int | str, list[int]]:
        """The indices of its runs by seed; one of unknown seed is by itself, under a name that no other setting has."""
        runs_by_seed: dict[int | str, list[int]] = {}
        for index, run in enumerate(self.runs):
            seed = f"{self.label}, run {index}" if run.seed is None else run.seed
            runs_by_seed.setdefault(seed, []).append(index)
        return runs_by_seed

    def mean(self, key: str) -> pandas.Series:
        """Returns a metric by step, its mean over runs; empty where no run logs it."""
        return self.table(key).mean(axis=1)


def collect_setting_values(runs: list[Run]) -> list[dict[str, str]]:
    """Returns the values that make up each run's setting, from a dotted key to the value in JSON.

    A key that the record of any run lists as unread is left out for all runs of that method. Only a run that sets the
    key lists it, and a run with verl's default must compare equal to it.
    """
    unread: dict[str, set[str]] = {}
    for run in runs:
        unread.setdefault(run.method, set()).update(run.record.loss.unused)
    values_of_runs = []
    for run in runs:
        read = {key: value for key, value in run.significant.items() if key not in unread[run.method]}
        values_of_runs.append(read)
    return values_of_runs


def differing_values(runs: list[Run]) -> dict[str, list[str | None]]:
    """Returns the keys in which runs differ, each with every run's value in JSON, None where a run lacks the key.

    A run without a configuration makes no difference, and has None for each key.
    """
    values_of_runs = collect_setting_values(runs)
    known_values = [values for run, values in zip(runs, values_of_runs, strict=True) if run.configuration]
    differing: dict[str, list[str | None]] = {}
    for key in sorted({key for values in known_values for key in values}):
        differs = len({values.get(key) for values in known_values}) > 1
        if differs:
            differing[key] = [values.get(key) for values in values_of_runs]
    return differing


def settings_of(runs: list[Run]) -> list[Setting]:
    """Groups runs, at least one, by setting, in the order in which each setting was first named.

    A run without a configuration or its hash is a setting of its own: nothing says what it trained.
    """
    groups: dict[str, list[Run]] = {}
    for index, (run, values) in enumerate(zip(runs, collect_setting_values(runs), strict=True)):
        if run.configuration:
            # The configuration of a kept run is only a part of it, without the method.
            identity = json.dumps([run.method, values])
        else:
            identity = run.record.configuration_hash or f"run {index}"
        groups.setdefault(identity, []).append(run)
    labels = _write_labels([members[0] for members in groups.values()])
    return [Setting(label=label, runs=members) for label, members in zip(labels, groups.values(), strict=True)]


def baseline_of(settings: list[Setting], name: str | None = None) -> Setting:
    """Chooses the setting that others are compared with.

    Args:
        settings: at least one.
        name: the name of one of its runs, or its method or label; None for GRPO or, without it, the first setting.

    Raises:
        ValueError: nothing or more than one setting has that name; says which names there are.
    """
    if name is None:
        return next((setting for setting in settings if setting.runs[0].method == GRPO_METHOD), settings[0])
    named = [setting for setting in settings if any(run.name == name for run in setting.runs)]
    if not named:
        method = name.lower().replace(" ", "_")
        named = [setting for setting in settings if name == setting.label or setting.runs[0].method.lower() == method]
    if len(named) == 1:
        return named[0]
    runs = ", ".join(run.name for setting in settings for run in setting.runs)
    if named:
        raise ValueError(f"--baseline {name}: {len(named)} settings have that name. Name a run of one of them: {runs}.")
    methods = ", ".join(dict.fromkeys(setting.runs[0].method for setting in settings))
    raise ValueError(f"--baseline {name}: no such run or method. The runs: {runs}. The methods: {methods}.")


def _write_labels(runs: list[Run]) -> list[str]:
    """Returns what the page calls each setting, from the first run of each.

    A setting is named by its method. Settings of the same method are told apart: by the run's name if nothing else
    describes the run, else by the values in which they differ, else by their number.
    """
    names = _shorten_names([run.name for run in runs])
    methods = [name if run.loss == run.name else run.loss for run, name in zip(runs, names, strict=True)]
    labels: list[str] = []
    for index, (run, method) in enumerate(zip(runs, methods, strict=True)):
        rivals = [other for other, other_method in zip(runs, methods, strict=True) if other_method == method]
        if len(rivals) == 1:
            labels.append(method)
        elif not run.configuration and names.count(names[index]) == 1:
            labels.append(names[index])
        else:
            values = _describe_differences(run, rivals)
            labels.append(", ".join([method, *values]) if values else f"{method} {index}")
    return labels


def _describe_differences(run: Run, rivals: list[Run]) -> list[str]:
    """Returns the values that set a run apart from others of its method, each with its name.

    They are the rules of its modifiers or, if these are the same, the first two values, the plugin's keys first.

    Args:
        run: the run.
        rivals: the runs of its method, among them this one.
    """
    keys_apart = sorted(differing_values(rivals), key=lambda key: (not key.startswith("clipx."), key))
    rules = [key for key in keys_apart if key.endswith(".rule")]
    return [_describe_value(run, key, rivals) for key in rules or keys_apart[:2]]


def _describe_value(run: Run, key: str, rivals: list[Run]) -> str:
    """Returns a key's name with its value; a modifier of the plugin's is named by its rule, and with its parameters.

    Args:
        run: the run that has the value.
        key: the dotted key.
        rivals: the runs that the key sets apart.
    """
    value = run.significant.get(key)
    name = key.rpartition(".")[2]
    if value is not None and is_hash(json.loads(value)):
        value = numbered([rival.significant.get(key) for rival in rivals])[rivals.index(run)]
    if not key.startswith("clipx."):
        return f"{name} {value or 'unset'}"
    name = key.removeprefix("clipx.").replace(".", " ")
    if name.endswith(" rule"):
        modifier = name.removesuffix(" rule")
        return f"{modifier} {json.loads(value)}" if value else f"no {modifier}"
    return f"{name} {value or 'unset'}"


def numbered(values: list[str | None]) -> list[str | None]:
    """Returns values in JSON, with "differs (1)", "differs (2)", … for those of which the record keeps only a hash.

    Equal hashes have equal numbers.

    Args:
        values: the value of one key in each run; None where a run lacks it.
    """
    hashes: list[str] = []
    for value in values:
        if value is not None and value not in hashes and is_hash(json.loads(value)):
            hashes.append(value)
    return [f"differs ({hashes.index(value) + 1})" if value in hashes else value for value in values]


def _shorten_names(names: list[str]) -> list[str]:
    """Returns names of folders without the parts with which all of them begin or end.

    They stay as they are if none is longer than LONGEST_NAME, if two are the same, or if one would be left empty.
    """
    if max(map(len, names)) <= LONGEST_NAME or len(set(names)) < len(names) or len(names) < 2:
        return names
    names_in_parts = [re.split(r"([-_. ]+)", name) for name in names]
    short_names = ["".join(parts).strip("-_. ") for parts in differing_parts(names_in_parts)]
    if not all(short_names):
        return names
    return [f"run {name}" if name.isdigit() else name for name in short_names]


def differing_parts(names: list[list[str]]) -> list[list[str]]:
    """Returns names, each a list of parts, without the parts with which all of them begin or end.

    Each name keeps at least one part.
    """
    while _share_part(names, 0):
        names = [parts[1:] for parts in names]
    while _share_part(names, -1):
        names = [parts[:-1] for parts in names]
    return names


def _share_part(names: list[list[str]], place: int) -> bool:
    """Returns whether all names have the same part at a place, and each has another one besides."""
    return all(len(parts) > 1 for parts in names) and len({parts[place] for parts in names}) == 1
