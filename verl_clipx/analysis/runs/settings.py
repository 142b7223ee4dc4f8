"""Groups runs by setting, and finds what sets the settings apart."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.kept_values import is_hash

GRPO_METHOD = "grpo"

# A run without a configuration is labelled by its folder's name. If one of these names is longer than this, the labels
# keep only the parts in which the names differ.
LONGEST_NAME = 20


@dataclass(frozen=True)
class Setting:
    """The runs that differ only in seeds, names and places.

    Args:
        label: the name of the setting in reports: the method and, where methods repeat, what else sets it apart.
        runs: its runs, at least one.
    """

    label: str
    runs: list[Run] = field(default_factory=list)

    def table(self, key: str) -> pandas.DataFrame:
        """Return a metric's values: a row for each step at which every run has a finite value, a column for each run.

        The columns are numbered from 0, in the order of `runs`. If a run has no finite value of the metric, the table
        is empty and has no column.
        """
        values_of_runs = [run.values(key) for run in self.runs]
        if any(values.empty for values in values_of_runs):
            return pandas.DataFrame(dtype=float)
        return pandas.concat(values_of_runs, axis=1, join="inner", keys=range(len(values_of_runs)))

    def bins(self, name: str) -> list[str]:
        """Return the keys of a metric that is logged for each probability bin, in the order of the bins.

        It is empty unless, for each of these keys, the runs have a step at which all of them have a finite value.

        Args:
            name: the metric's name, without the bin.
        """
        logged_keys = {key for run in self.runs for key in run.log}
        bin_keys = keys.find_bin_keys(name, logged_keys)
        if any(self.mean(key).empty for key in bin_keys):
            return []
        return bin_keys

    def name_of(self, run: Run) -> str:
        """Name one of its runs: the label with the seed or, if that does not single it out, with the run's name.

        The only run of a setting is named by the label alone if its seed is unknown, or if the label is already its
        name.
        """
        if self.label != run.name and run.seed is not None and len(self.runs_by_seed[run.seed]) == 1:
            return f"{self.label}, seed {run.seed}"
        if len(self.runs) == 1:
            return self.label
        return f"{self.label}, {run.name}"

    @property
    def seeds(self) -> int:
        """The number of its independent runs. Runs of one seed count as one run; each run of unknown seed counts."""
        return len(self.runs_by_seed)

    def by_seed(self, table: pandas.DataFrame) -> pandas.DataFrame:
        """Return the means over the runs of each seed: one column for each seed.

        Args:
            table: one column for each run, in the order of `runs`; so not the empty table of a missing metric.
        """
        means = {seed: table.iloc[:, places].mean(axis=1) for seed, places in self.runs_by_seed.items()}
        return pandas.DataFrame(means)

    @property
    def runs_by_seed(self) -> dict[int | str, list[int]]:
        """The indices of its runs by seed. Each run of unknown seed is alone, under a key that no other setting has."""
        runs_by_seed: dict[int | str, list[int]] = {}
        for index, run in enumerate(self.runs):
            seed = f"{self.label}, run {index}" if run.seed is None else run.seed
            runs_by_seed.setdefault(seed, []).append(index)
        return runs_by_seed

    def mean(self, key: str) -> pandas.Series:
        """Return the mean of a metric over the runs, by step; empty unless all runs log a finite value."""
        return self.table(key).mean(axis=1)


def collect_setting_values(runs: list[Run]) -> list[dict[str, str]]:
    """Return the values that make up each run's setting, from a dotted key to the value in JSON.

    A method may leave some of verl's clip keys unread. The record of a run lists such a key only if the run sets it. If
    any run of a method lists a key, it is left out for all runs of that method, so that a run that sets it equals a run
    that keeps verl's default.
    """
    unused_by_method: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        unused_by_method[run.method].update(run.record.loss.unused)
    values_of_runs = []
    for run in runs:
        unused = unused_by_method[run.method]
        used_values = {key: value for key, value in run.significant.items() if key not in unused}
        values_of_runs.append(used_values)
    return values_of_runs


def find_differing_values(runs: list[Run]) -> dict[str, list[str | None]]:
    """Return the keys in which runs differ, each with every run's value in JSON; None where a run lacks the key.

    Runs without a configuration are not compared; they have None for each key.
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
    """Group runs by setting.

    A run without a configuration, or even a hash of it, is a setting of its own, since nothing says what it trained.

    Args:
        runs: at least one.

    Returns:
        The settings, in the order of their first runs.
    """
    groups: dict[str, list[Run]] = {}
    for index, (run, values) in enumerate(zip(runs, collect_setting_values(runs), strict=True)):
        if run.configuration:
            # A kept run has only a part of its configuration. The method may be missing there.
            identity = json.dumps([run.method, values])
        else:
            identity = run.record.configuration_hash or f"run {index}"
        groups.setdefault(identity, []).append(run)
    labels = _write_labels([members[0] for members in groups.values()])
    return [Setting(label=label, runs=members) for label, members in zip(labels, groups.values(), strict=True)]


def baseline_of(settings: list[Setting], name: str | None = None) -> Setting:
    """Choose the setting that others are compared with.

    Args:
        settings: at least one.
        name: the name of one of its runs, or its method or label; None for GRPO or, without it, the first setting.

    Raises:
        ValueError: no setting has that name, or more than one has it; the message lists the names.
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
    """Return the name of each setting in reports.

    A setting is named by its method. Settings of the same method are told apart by the run's name if nothing else
    describes the run, otherwise by the values in which they differ or, if there are none, by their number.

    Args:
        runs: the first run of each setting.
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
    """Return the values that set a run apart from others of its method, each with its name.

    They are the rules of its modifiers or, if these are the same, the first two values, the plugin's keys first.

    Args:
        run: the run.
        rivals: the first runs of all settings of its method, this one among them.
    """
    # False sorts before True.
    keys_apart = sorted(find_differing_values(rivals), key=lambda key: (not key.startswith("clipx."), key))
    rules = [key for key in keys_apart if key.endswith(".rule")]
    return [_describe_value(run, key, rivals) for key in rules or keys_apart[:2]]


def _describe_value(run: Run, key: str, rivals: list[Run]) -> str:
    """Return a key's name with the run's value of it; for the rule of a modifier, the modifier with its rule.

    Args:
        run: the run that has the value.
        key: the dotted key.
        rivals: the runs that the key sets apart.
    """
    value = run.significant.get(key)
    name = key.rpartition(".")[2]
    if value is not None and is_hash(json.loads(value)):
        value = number_hashes([rival.significant.get(key) for rival in rivals])[rivals.index(run)]
    if not key.startswith("clipx."):
        return f"{name} {value or 'unset'}"
    name = key.removeprefix("clipx.").replace(".", " ")
    if name.endswith(" rule"):
        modifier = name.removesuffix(" rule")
        return f"{modifier} {json.loads(value)}" if value else f"no {modifier}"
    return f"{name} {value or 'unset'}"


def number_hashes(values: list[str | None]) -> list[str | None]:
    """Replace values of which the record keeps only a hash by "differs (1)", "differs (2)", …

    Equal hashes get equal numbers. The other values stay as they are.

    Args:
        values: one key's value in JSON in each run; None where a run lacks the key.
    """
    hashes: list[str] = []
    for value in values:
        if value is not None and value not in hashes and is_hash(json.loads(value)):
            hashes.append(value)
    return [f"differs ({hashes.index(value) + 1})" if value in hashes else value for value in values]


def _shorten_names(names: list[str]) -> list[str]:
    """Return the names of folders without the parts with which all of them begin or end.

    They stay as they are if none is longer than LONGEST_NAME, if two are the same, or if one would be left empty.
    """
    are_short = all(len(name) <= LONGEST_NAME for name in names)
    are_distinct = len(set(names)) == len(names)
    if are_short or not are_distinct or len(names) < 2:
        return names
    names_in_parts = [re.split(r"([-_. ]+)", name) for name in names]
    short_names = ["".join(parts).strip("-_. ") for parts in remove_shared_parts(names_in_parts)]
    if not all(short_names):
        return names
    return [f"run {name}" if name.isdigit() else name for name in short_names]


def remove_shared_parts(names: list[list[str]]) -> list[list[str]]:
    """Return names, each a list of parts, without the parts with which all of them begin or end.

    Each name keeps at least one part.
    """
    while _share_part(names, 0):
        names = [parts[1:] for parts in names]
    while _share_part(names, -1):
        names = [parts[:-1] for parts in names]
    return names


def _share_part(names: list[list[str]], place: int) -> bool:
    """Return whether all names have the same part at a place, and every name has a further part."""
    return all(len(parts) > 1 for parts in names) and len({parts[place] for parts in names}) == 1
