"""Collects a table's measured numbers from run folders and refuses runs that do not match the table."""

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from verl_clipx.common.command_line import installed_version
from verl_clipx.common.commit import commit_here
from verl_clipx.common.files import hash_of_json, parse_json, read_bytes
from verl_clipx.common.statistics.estimate import MIN_SEEDS, estimate_over_seeds, share
from verl_clipx.papers.tables.against_preset import as_written, differences, filled_in
from verl_clipx.papers.tables.definition import GAIN_OF, MEAN_OF, Column, Row, Source, Table
from verl_clipx.papers.tables.measures import NotThere, Value, curve_of, mean_of, measure, read_evaluation
from verl_clipx.papers.tables.significance import CellKey, compare_rows
from verl_clipx.runs.folder import KEPT, RunFolder, find_runs
from verl_clipx.runs.sameness import is_left_out, significant_values

PACKAGES = ("verl-clipx", "verl", "torch", "transformers", "vllm", "ray")

# The parts of the results that rendering needs.
RESULTS = {
    "table": str,
    "definition": str,
    "collected_with": {"commit": str | None},
    "runs": [{"preset": str | None, "seed": int | None, "versions": dict, "commit": str | None}],
    "cells": [{"row": str, "column": str}],
    "curves": list,
    "refused": list,
}

CONFIGURATIONS = "configurations.json.gz"
"""Beside kept runs: by the hash in their records, the values that make up their setting."""

SHARE = "share of seeds"
"""What the interval of a share of collapses is computed over."""

PresetValues = Callable[[str], Mapping[str, Any]]
Cells = list[tuple[Row, Column]]


@dataclass
class Collected:
    """Everything that was found, run by run.

    Args:
        folder: folder of all runs.
        preset_values: maps a preset's name to its significant values.
        runs: the runs that count, each with its location, preset, seed and versions.
        refused: runs or evaluations that do not count, each with the reasons.
        missing: what the table still needs, one line each.
        by_seed: numbers in the table's unit, by cell and seed.
        curves: row, column, seed, and the curve's steps and numbers.
    """

    table: Table
    folder: Path
    preset_values: PresetValues
    runs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    by_seed: dict[CellKey, dict[int, Value]] = field(default_factory=dict)
    curves: list[dict[str, Any]] = field(default_factory=list)

    def add_source(self, source: Source, cells: Cells) -> None:
        """Adds all runs of a preset, or the evaluations of a model."""
        own = self.folder / self.table.folder_of(source)
        usable = 0
        for path in find_runs(self.folder, self.table.folder_of(source)) if source.preset else [own]:
            try:
                add = self.add_kept if path.name.endswith(KEPT) else self.add
                usable += add(RunFolder(path), source, cells)
            except (OSError, ValueError, OmegaConfBaseException) as error:
                # An unreadable file affects only its own run.
                self.refuse(self.name_of(path), source.preset, [str(error)])
        if source.preset and usable < len(self.table.seeds):
            self.missing.append(f"{source.preset}: {usable} of {len(self.table.seeds)} seeds")

    def add(self, run: RunFolder, source: Source, cells: Cells) -> bool:
        """Adds a run; returns whether it is a finished run of the preset."""
        name = self.name_of(run.path)
        entry: dict[str, Any] = {"folder": name, "preset": source.preset, "model": source.model, "seed": None}
        if source.preset:
            if not run.is_trained:
                self.missing.append(f"{name}: no .hydra/config.yaml")
                return False
            described = dict(self.preset_values(source.preset))
            given = filled_in(described, run.values)
            reasons = differences({**described, **given}, run.values)
            if any(run.seed == other["seed"] for other in self.runs if other["preset"] == source.preset):
                reasons.append(f"data.seed: {run.seed!r} like another run of {source.preset}")
            if reasons:
                return self.refuse(name, source.preset, reasons)
            if run.total_steps is not None and run.last_step < run.total_steps:
                self.missing.append(f"{name}: trained to step {run.last_step} of {run.total_steps}")
                return False
            entry |= {
                "seed": run.seed,
                "config_hash": hash_of_json(run.values, str),
                "filled_in": given,
                "steps": run.last_step,
                "started_from": as_written(run.config, "actor_rollout_ref.model.path"),
                "trained_on": as_written(run.config, "data.train_files"),
            }
        entry["commit"] = run.record.get("commit")
        entry["seconds"] = run.record.get("seconds")
        entry["versions"] = run.record.get("versions") or _versions_of_evaluation(self.table, cells, run)
        if self.read_cells(run, cells, entry["seed"]) or source.preset:
            self.runs.append(entry)
        return True

    def add_kept(self, run: RunFolder, source: Source, cells: Cells) -> bool:
        """Like `add`, for a kept run, whose configuration stands in a file beside it, by the hash in its record."""
        name, hashed = self.name_of(run.path), run.record["config_hash"]
        made = read_configurations(run.path.parent).get(hashed)
        if made is None:
            reason = f"config_hash: {hashed[:12]} is not in {CONFIGURATIONS} beside the run; make the run again"
            return self.refuse(name, source.preset, [reason])
        described = json.loads(json.dumps(self.preset_values(source.preset), default=str))
        reasons = differences(described, {key: value for key, value in made.items() if not is_left_out(key)})
        if reasons:
            return self.refuse(name, source.preset, reasons)
        self.runs.append({"folder": name, "preset": source.preset, "model": None, "filled_in": {}, **run.record})
        self.read_cells(run, cells, run.record["seed"])
        return True

    def read_cells(self, run: RunFolder, cells: Cells, seed: int | None) -> int:
        """Adds a run's numbers; returns how many were found."""
        name, number = self.name_of(run.path), 0
        lacking: dict[str, None] = {}
        wrong: dict[str, None] = {}
        for row, column in cells:
            try:
                value = measure(self.table, row, column, run)
            except NotThere as error:
                lacking[str(error)] = None
            except ValueError as error:
                wrong[str(error)] = None
            else:
                # A model that is only evaluated has no training seed; it counts as one.
                of_cell = self.by_seed.setdefault((row.name, column.name), {})
                of_cell[-1 if seed is None else seed] = value.scaled(self.table.of_one)
                number += 1
                if self.table.is_curve(column):
                    curve = curve_of(run, self.table.measure_of(row, column))
                    self.curves.append({"row": row.name, "column": column.name, "seed": seed, **asdict(curve)})
        self.missing.extend(f"{name}: {line}" for line in lacking)
        if wrong:
            self.refuse(name, None, list(wrong))
        return number

    def refuse(self, name: str, preset: str | None, reasons: list[str]) -> bool:
        """Records why a run does not count; always returns False."""
        self.refused.append({"folder": name, "preset": preset, "reasons": reasons})
        return False

    def name_of(self, path: Path) -> str:
        """Returns the name that results use for a run's folder or file."""
        return path.relative_to(self.folder).as_posix()


def collect(
    table: Table, runs: Path, preset_values: PresetValues | None = None, rows: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a table's numbers from its runs.

    Args:
        runs: folder that contains all runs as `<preset>-seed<seed>`.
        preset_values: for tests; by default the presets are composed.
        rows: names of the rows to read; empty for all.

    Returns:
        `table`, `definition` (hash), `collected_with` (commit and versions here), `runs`, `cells`, `comparisons` (see
        `compare_rows`), `curves`, `missing`, `refused`: JSON values. A curve has row, column, seed, steps, values and
        smooth (see `Curve`). A cell has row, column, expected and, if measured, mean, low, high, `interval`
        ("seeds", "share of seeds", "questions" or null), seeds, `by_seed` (each seed's number) and difference, in the
        table's unit.
    """
    found = Collected(table, runs, preset_values or _values_of_preset)
    for source, cells in table.sources(rows):
        found.add_source(source, cells)
    by_seed = _with_means(table, found.by_seed)
    measured = _combine(table, by_seed)
    return {
        "table": table.name,
        "definition": hash_of_definition(table),
        "collected_with": {"commit": commit_here(), "versions": versions_here()},
        "runs": found.runs,
        "cells": [_cell(table, row, column, measured) for row in table.rows for column in table.columns],
        "comparisons": compare_rows(table, by_seed),
        "curves": found.curves,
        "missing": found.missing,
        "refused": found.refused,
    }


def read_configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the configurations of the kept runs in a folder, by their hashes; empty if it has none."""
    path = folder / CONFIGURATIONS
    return parse_json(gzip.decompress(read_bytes(path)), str(path)) if path.exists() else {}


@cache
def _values_of_preset(name: str) -> dict[str, Any]:
    from verl_clipx.papers.tables.presets import compose_preset

    return significant_values(compose_preset(name))


@dataclass(frozen=True)
class Measured:
    """A cell's number."""

    value: Value
    interval: str | None
    by_seed: dict[int, float]


def _with_means(table: Table, by_seed: dict[CellKey, dict[int, Value]]) -> dict[CellKey, dict[int, Value]]:
    """Adds means over columns, seed by seed."""
    by_seed = dict(by_seed)
    for row in table.rows:
        for column in table.columns:
            means = table.measure_of(row, column).get(MEAN_OF)
            parts = [by_seed.get((row.name, name), {}) for name in means or []]
            seeds = set.intersection(*map(set, parts)) if parts else set()
            if seeds:
                of_parts = {seed: mean_of([part[seed] for part in parts]) for seed in sorted(seeds)}
                # One seed gets no interval, since the columns may share their questions.
                by_seed[row.name, column.name] = {
                    seed: replace(value, low=None, high=None) for seed, value in of_parts.items()
                }
    return by_seed


def _combine(table: Table, by_seed: dict[CellKey, dict[int, Value]]) -> dict[CellKey, Measured]:
    """Combine numbers over seeds, then compute gains and differences from the results."""
    measured = {
        (row, column): _over_seeds(values, table, table.is_collapse(table.row(row), table.column(column)))
        for (row, column), values in by_seed.items()
    }
    for row in table.rows:
        for column in table.columns:
            number = _derived(table, row, column, measured)
            if number is not None:
                measured[row.name, column.name] = Measured(Value(number), None, {})
    return measured


def _over_seeds(values: dict[int, Value], table: Table, collapses: bool) -> Measured:
    by_seed = {seed: values[seed].mean for seed in sorted(values) if seed != -1}
    means = [value.mean for value in values.values()]
    if collapses and len(means) >= MIN_SEEDS:
        found = share(sum(map(bool, means)), len(means))
        return Measured(Value(**asdict(found)).scaled(table.of_one), SHARE, by_seed)
    if len(means) > 1:
        found = estimate_over_seeds(means)
        return Measured(Value(**asdict(found)), None if found.low is None else "seeds", by_seed)
    (only,) = values.values()
    return Measured(only, None if only.low is None else "questions", by_seed)


def _derived(table: Table, row: Row, column: Column, measured: dict[CellKey, Measured]) -> float | None:
    gain_of = table.measure_of(row, column).get(GAIN_OF)
    if gain_of and row.baseline:
        ours, base = measured.get((row.name, gain_of)), measured.get((row.baseline, gain_of))
        return 100 * (ours.value.mean / base.value.mean - 1) if ours and base and base.value.mean else None
    if row.minus:
        first, second = (measured.get((name, column.name)) for name in row.minus)
        return first.value.mean - second.value.mean if first and second else None
    return None


def _cell(table: Table, row: Row, column: Column, measured: dict[CellKey, Measured]) -> dict[str, Any]:
    expected = table.expected(row, column)
    cell: dict[str, Any] = {"row": row.name, "column": column.name, "expected": expected}
    found = measured.get((row.name, column.name))
    if found is None:
        return cell
    return cell | {
        "mean": found.value.mean,
        "low": found.value.low,
        "high": found.value.high,
        "interval": found.interval,
        "seeds": list(found.by_seed),
        "by_seed": {str(seed): number for seed, number in found.by_seed.items()},
        "difference": None if expected is None else found.value.mean - expected,
    }


def _versions_of_evaluation(table: Table, cells: Cells, run: RunFolder) -> dict[str, str | None]:
    for row, column in cells:
        for benchmark in table.benchmarks_of(row, column):
            results = read_evaluation(run.path, benchmark)
            if results:
                return results["config"]["versions"]
    return {}


def versions_here() -> dict[str, str | None]:
    """Return the versions of the packages that a number depends on, None for those that are not installed."""
    return {package: installed_version(package) for package in PACKAGES}


def hash_of_definition(table: Table) -> str:
    """Return the SHA-256 of what determines a table's numbers, which ties results to one definition."""
    # If the table has no baseline, the hash equals that of a definition without this key.
    row_keys = ("name", "preset", "presets", "model", "models", "minus", "baseline", "measure", "expected")
    # By the names that the committed results were hashed with.
    column_keys = {"name": "name", "run": "variant", "preset": "preset", "measure": "measure"}
    parts = [
        table.unit,
        {name: {k: v for k, v in settings.items() if k != "origin"} for name, settings in table.benchmarks.items()},
        [{key: getattr(row, key) for key in row_keys} for row in table.rows],
        [{key: getattr(column, name) for key, name in column_keys.items()} for column in table.columns],
    ]
    if table.baseline:
        parts.append(table.baseline)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
