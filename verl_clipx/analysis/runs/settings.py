"""Runs grouped by setting, and what sets the settings apart."""

import json
import re
from dataclasses import dataclass, field

import pandas

from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.kept_values import is_hash

GRPO_METHOD = "grpo"

# Of a run that nothing but its folder's name describes, a longer name is cut to what sets it apart.
LONGEST_NAME = 20

_NONE = pandas.DataFrame(dtype=float)


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
        """Returns a metric: a row a step that all its runs have, a column a run; no column where no run logs it."""
        found = [run.values(key) for run in self.runs]
        return pandas.concat(found, axis=1, join="inner", keys=range(len(found))) if all(map(len, found)) else _NONE

    def bins(self, name: str) -> list[str]:
        """Returns the keys of a metric of probability bins; none unless all its runs log a finite value of each."""
        of_bins = keys.of_bins(name, {column for run in self.runs for column in run.log})
        return of_bins if all(len(self.mean(key)) for key in of_bins) else []

    def name_of(self, run: Run) -> str:
        """Names one of its runs: the label and, where there is one, what sets the run apart: its seed."""
        if self.label != run.name and run.seed is not None and len(self.runs_by_seed[run.seed]) == 1:
            return f"{self.label}, seed {run.seed}"
        return self.label if len(self.runs) == 1 else f"{self.label}, {run.name}"

    @property
    def seeds(self) -> int:
        """Counts its independent runs: runs of one seed count as one, and each run of unknown seed counts."""
        return len(self.runs_by_seed)

    def by_seed(self, table: pandas.DataFrame) -> pandas.DataFrame:
        """Turns a table of a column a run, in their order, into one of a column a seed: the mean over its runs."""
        return pandas.DataFrame({seed: table.iloc[:, runs].mean(axis=1) for seed, runs in self.runs_by_seed.items()})

    @property
    def runs_by_seed(self) -> dict[int | str, list[int]]:
        """The indices of its runs by seed; one of unknown seed is by itself, under a name that no other setting has."""
        found: dict[int | str, list[int]] = {}
        for index, run in enumerate(self.runs):
            found.setdefault(f"{self.label}, run {index}" if run.seed is None else run.seed, []).append(index)
        return found

    def mean(self, key: str) -> pandas.Series:
        """Returns a metric by step, its mean over runs; empty where no run logs it."""
        return self.table(key).mean(axis=1)


def collect_setting_values(runs: list[Run]) -> list[dict[str, str]]:
    """Returns the values that make up each run's setting: dotted key to value in JSON.

    A key that the record of any run lists as unread is left out for all runs of that method. Only a run that sets the
    key lists it, and a run with verl's default must compare equal to it.
    """
    unread: dict[str, set[str]] = {}
    for run in runs:
        unread.setdefault(run.method, set()).update(run.record.loss.unused)
    return [{key: value for key, value in run.significant.items() if key not in unread[run.method]} for run in runs]


def differing_values(runs: list[Run]) -> dict[str, list[str | None]]:
    """Returns what sets runs apart: dotted key to each run's value as JSON, None where a run lacks the key.

    A run without a configuration decides nothing, and has None for each key.
    """
    values = collect_setting_values(runs)
    known = [of_run for run, of_run in zip(runs, values, strict=True) if run.configuration]
    keys = sorted({key for of_run in known for key in of_run})
    return {
        key: [of_run.get(key) for of_run in values] for key in keys if len({of_run.get(key) for of_run in known}) > 1
    }


def settings_of(runs: list[Run]) -> list[Setting]:
    """Groups runs, at least one, by setting, in the order in which each setting was first named.

    A run without a configuration or its hash is a setting of its own: nothing says what it trained.
    """
    groups: dict[str, list[Run]] = {}
    for index, (run, values) in enumerate(zip(runs, collect_setting_values(runs), strict=True)):
        # The configuration of a kept run is only a part of it, without the method.
        known = json.dumps([run.method, values]) if run.configuration else run.record.configuration_hash
        groups.setdefault(known or f"run {index}", []).append(run)
    firsts = [members[0] for members in groups.values()]
    return [Setting(*parts) for parts in zip(_labels(firsts), groups.values(), strict=True)]


def baseline_of(settings: list[Setting], name: str | None = None) -> Setting:
    """Chooses the setting that others are compared with: by the name of a run, method or label, or GRPO, or the first.

    Raises:
        ValueError: nothing or more than one setting has that name; says which names there are.
    """
    if name is None:
        return next((one for one in settings if one.runs[0].method == GRPO_METHOD), settings[0])
    of_run = [one for one in settings if any(run.name == name for run in one.runs)]
    method = name.lower().replace(" ", "_")
    named = of_run or [one for one in settings if name == one.label or one.runs[0].method.lower() == method]
    if len(named) == 1:
        return named[0]
    runs = ", ".join(run.name for one in settings for run in one.runs)
    if named:
        raise ValueError(f"--baseline {name}: {len(named)} settings have that name. Name a run of one of them: {runs}.")
    methods = ", ".join(dict.fromkeys(one.runs[0].method for one in settings))
    raise ValueError(f"--baseline {name}: no such run or method. The runs: {runs}. The methods: {methods}.")


def _labels(runs: list[Run]) -> list[str]:
    """Names each by its method; where methods repeat, with a value that sets it apart, the run's name, or a number."""
    names = _apart([run.name for run in runs])
    methods = [name if run.loss == run.name else run.loss for run, name in zip(runs, names, strict=True)]
    labels = []
    for index, (run, method) in enumerate(zip(runs, methods, strict=True)):
        rivals = [other for other, same in zip(runs, methods, strict=True) if same == method]
        if len(rivals) > 1 and not run.configuration and names.count(names[index]) == 1:
            labels.append(names[index])
            continue
        apart = {} if len(rivals) == 1 else differing_values(rivals)
        keys = sorted(apart, key=lambda key: (not key.startswith("clipx."), key))
        rules = [key for key in keys if key.endswith(".rule")]
        values = [_value_of(run, key, rivals) for key in rules or keys[:2]]
        labels.append(", ".join([method, *values]) if values else method if len(rivals) == 1 else f"{method} {index}")
    return labels


def _value_of(run: Run, key: str, rivals: list[Run]) -> str:
    """Returns a key's name with its value; a modifier of the plugin's is named by its rule, and with its parameters.

    Args:
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
    """Returns values in JSON, with numbers in place of those of which the record keeps a hash.

    Args:
        values: of one key, a run each; None where a run lacks it.
    """
    hashes = [*dict.fromkeys(value for value in values if value is not None and is_hash(json.loads(value)))]
    return [f"differs ({hashes.index(value) + 1})" if value in hashes else value for value in values]


def _apart(names: list[str]) -> list[str]:
    """Returns names of folders without the parts with which all of them begin or end; short ones stay as they are."""
    if max(map(len, names)) <= LONGEST_NAME or len(set(names)) < len(names) or len(names) < 2:
        return names
    cut = ["".join(parts).strip("-_. ") for parts in differing_parts([re.split(r"([-_. ]+)", name) for name in names])]
    return [f"run {name}" if name.isdigit() else name for name in cut] if all(cut) else names


def differing_parts(names: list[list[str]]) -> list[list[str]]:
    """Returns names in parts without those with which all of them begin or end; each keeps at least one."""
    for end in (0, -1):
        while all(len(parts) > 1 for parts in names) and len({parts[end] for parts in names}) == 1:
            names = [parts[1:] if end == 0 else parts[:-1] for parts in names]
    return names
