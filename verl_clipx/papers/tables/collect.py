"""Collects a table's measured numbers from run folders, and refuses runs that do not match the table."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf.errors import OmegaConfBaseException

from verl_clipx.analysis.runs.folder import KEPT, RunFolder, find_runs
from verl_clipx.analysis.runs.sameness import is_left_out, significant_values
from verl_clipx.common.commit import commit_here
from verl_clipx.common.files import check_shape, hash_of_json, parse_json, read_bytes
from verl_clipx.common.statistics.comparison import QUESTIONS, SEEDS
from verl_clipx.common.statistics.estimate import MIN_SEEDS, estimate_over_seeds, estimate_share
from verl_clipx.papers.tables.against_preset import as_written, differences, filled_in
from verl_clipx.papers.tables.definition import GAIN_OF, MEAN_OF, Column, Source, Table, TableRow
from verl_clipx.papers.tables.measures import MissingNumber, Value, evaluation_folder, mean_of, read_value
from verl_clipx.papers.tables.significance import NO_SEED, CellKey, compare_rows
from verl_clipx.papers.versions import versions_here
from verl_clipx.run.kept_values import kept_configuration, strip_credentials
from verl_clipx.run.keys import DATA_SEED, MODEL_PATH, TRAINING_FILES

# What `check_shape` demands of results before they are rendered.
RESULTS = {
    "table": str,
    "definition": str,
    "collected_with": {"commit": str | None},
    "runs": [{"preset": str | None, "seed": int | None, "versions": dict, "commit": str | None}],
    "cells": [{"row": str, "column": str}],
    "refused": list,
}

CONFIGURATIONS = "configurations.json.gz"
"""Name of a file beside kept runs. It maps the hash in a run's record to the values of the run's configuration."""

SHARE = "share of seeds"
"""What the interval of a share of collapsed trainings is over; see `Measured`."""

PresetValues = Callable[[str], Mapping[str, Any]]
"""Takes a preset's name, and returns the values that define its runs, as `significant_values` does."""

Cells = list[tuple[TableRow, Column]]
"""Cells of a table that are read from the same run."""

# What `check_shape` demands of a kept run's record.
KEPT_RECORD = {"config_hash": str, "seed": int}


@dataclass
class Collected:
    """Everything that was found, run by run.

    Args:
        folder: folder of all runs.
        preset_values: maps a preset's name to its significant values.
        runs: the runs that count, each with its location, preset, seed and versions.
        refused: runs or evaluations that do not count, each with the reasons.
        missing: what the table still needs, one line each.
        by_seed: for each cell its numbers by training seed, in the table's unit.
    """

    table: Table
    folder: Path
    preset_values: PresetValues
    runs: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    by_seed: dict[CellKey, dict[int, Value]] = field(default_factory=dict)

    def add_source(self, source: Source, cells: Cells) -> None:
        """Add all runs of a preset, or the evaluations of a model.

        Args:
            source: the preset or the model.
            cells: the cells that are read from this source.
        """
        if source.preset:
            paths = find_runs(self.folder, self.table.runs_path(source))
        else:
            paths = [self.folder / self.table.runs_path(source)]
        counted_runs = 0
        for path in paths:
            name = path.relative_to(self.folder).as_posix()
            try:
                run_counts = self.add_run(name, RunFolder(path), source, cells)
            except (OSError, ValueError, OmegaConfBaseException) as error:
                # A file that cannot be read leaves out its own run, and no other.
                self.refuse(name, source.preset, [str(error)])
                continue
            if run_counts:
                counted_runs += 1
        seeds = len(self.table.seeds)
        if source.preset and counted_runs < seeds:
            self.missing.append(f"{source.preset}: {counted_runs} of {seeds} seeds")

    def add_run(self, name: str, run: RunFolder, source: Source, cells: Cells) -> bool:
        """Add a run and its numbers if the run counts.

        A finished run of the source's preset counts. The evaluations of a model always count.

        Args:
            name: the run's path below the folder of all runs.
            run: the run, or the folder of the model's evaluations.
            source, cells: as for `add_source`.

        Returns:
            Whether the run counts.
        """
        if not source.preset:
            entry = {"seed": None, **_read_provenance(run)}
        elif name.endswith(KEPT):
            entry = self.check_kept(name, run, source.preset)
        else:
            entry = self.check_trained(name, run, source.preset)
        if entry is None:
            return False
        entry["versions"] = entry["versions"] or _versions_of_evaluation(self.table, cells, run)
        numbers = self.read_cells(name, run, cells, entry["seed"])
        # A model of which nothing has been evaluated yet is no run.
        if numbers or source.preset:
            self.runs.append({"folder": name, "preset": source.preset, "model": source.model, **entry})
        return True

    def check_trained(self, name: str, run: RunFolder, preset: str) -> dict[str, Any] | None:
        """Return the entry of a training in the results. If it does not count, record the reason and return None.

        It counts if it is finished, has the preset's values, and no other run of the preset has its seed.
        """
        if not run.is_trained:
            self.missing.append(f"{name}: no .hydra/config.yaml")
            return None
        wanted = kept_configuration(self.preset_values(preset))
        seed = run.run_record.seeds.data
        # Values that the preset leaves open, such as measured clip bounds, are right as the run has them.
        given = filled_in(wanted, run.values)
        reasons = differences({**wanted, **given}, run.values)
        if any(seed == other["seed"] for other in self.runs if other["preset"] == preset):
            reasons.append(f"{DATA_SEED}: {seed!r}, which another run of {preset} has too")
        if reasons:
            self.refuse(name, preset, reasons)
            return None
        total = run.run_record.length.steps or 0
        if run.last_step < total:
            self.missing.append(f"{name}: trained to step {run.last_step} of {total}")
            return None
        return {
            "seed": seed,
            "config_hash": hash_of_json(run.values, str),
            "filled_in": given,
            "steps": run.last_step,
            "started_from": strip_credentials(as_written(run.config, MODEL_PATH)),
            "trained_on": strip_credentials(as_written(run.config, TRAINING_FILES)),
            **_read_provenance(run),
        }

    def check_kept(self, name: str, run: RunFolder, preset: str) -> dict[str, Any] | None:
        """Do for a kept run what `check_trained` does for a training.

        Only finished runs are kept. A kept run's configuration is in the file CONFIGURATIONS beside it, under the hash
        in its record.
        """
        check_shape(run.path, run.record_content, KEPT_RECORD, "copy the kept run again")
        config_hash = run.record_content["config_hash"]
        configuration = read_configurations(run.path.parent).get(config_hash)
        if configuration is None:
            reasons = [f"config_hash: {config_hash[:12]} is not in {CONFIGURATIONS} beside the run; make the run again"]
        else:
            # JSON changes some values. Those in the file have been through it, so the preset's must go through it, too.
            wanted = json.loads(json.dumps(kept_configuration(self.preset_values(preset)), default=str))
            significant = {key: value for key, value in configuration.items() if not is_left_out(key)}
            reasons = differences(wanted, kept_configuration(significant))
        if reasons:
            self.refuse(name, preset, reasons)
            return None
        return {"filled_in": {}, **run.record_content}

    def read_cells(self, name: str, run: RunFolder, cells: Cells, seed: int | None) -> int:
        """Add a run's numbers, in the table's unit. Record which are missing, and which are refused.

        Args:
            name, run, cells: as for `add_run`.
            seed: the training seed; None for the evaluations of a model.

        Returns:
            How many numbers the run has.
        """
        numbers = 0
        # Several cells may lack the same evaluation. A dictionary keeps each message once, in the order of the cells.
        missing: dict[str, None] = {}
        wrong: dict[str, None] = {}
        for row, column in cells:
            try:
                value = read_value(self.table, row, column, run)
            except MissingNumber as error:
                missing[str(error)] = None
            except ValueError as error:
                wrong[str(error)] = None
            else:
                values = self.by_seed.setdefault((row.name, column.name), {})
                values[NO_SEED if seed is None else seed] = value.scaled(self.table.accuracy_factor)
                numbers += 1
        self.missing.extend(f"{name}: {message}" for message in missing)
        if wrong:
            self.refuse(name, None, list(wrong))
        return numbers

    def refuse(self, name: str, preset: str | None, reasons: list[str]) -> None:
        """Record why a run, or its evaluations, do not count."""
        self.refused.append({"folder": name, "preset": preset, "reasons": reasons})


def _read_provenance(run: RunFolder) -> dict[str, Any]:
    """Return the commit and the versions of a run, and its duration in seconds; None for what its record lacks."""
    return {key: run.record_content.get(key) for key in ("commit", "seconds", "versions")}


def collect(
    table: Table, runs: Path, preset_values: PresetValues | None = None, rows: Sequence[str] = ()
) -> dict[str, Any]:
    """Read a table's numbers from its runs.

    Args:
        table: the table.
        runs: folder that contains all runs as `<preset>-seed<seed>`.
        preset_values: for tests; if None, the presets are composed.
        rows: names of the rows to read; empty for all.

    Returns:
        JSON values by these keys:
        `table`, the name of the table;
        `definition`, the hash of its definition;
        `collected_with`, the commit and the versions of the packages that collect now;
        `runs`, `missing` and `refused`, as in `Collected`;
        `cells`, all cells of the table, each as `_describe_cell` returns it;
        `comparisons`, see `compare_rows`.
    """
    collected = Collected(table, runs, preset_values or _values_of_preset)
    for source, cells in table.sources(rows):
        collected.add_source(source, cells)
    by_seed = _add_means(table, collected.by_seed)
    measured = _combine_numbers(table, by_seed)
    cells = []
    for row in table.rows:
        for column in table.columns:
            cells.append(_describe_cell(table, row, column, measured, by_seed))
    return {
        "table": table.name,
        "definition": hash_of_definition(table),
        "collected_with": {"commit": commit_here(), "versions": versions_here()},
        "runs": collected.runs,
        "cells": cells,
        "comparisons": compare_rows(table, by_seed),
        "missing": collected.missing,
        "refused": collected.refused,
    }


def read_configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the file CONFIGURATIONS in a folder of kept runs.

    Returns:
        The values of each configuration, by its hash; empty if there is no such file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged.
    """
    path = folder / CONFIGURATIONS
    if not path.exists():
        return {}
    try:
        text = gzip.decompress(read_bytes(path))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: a gzip file that cannot be unpacked ({error}); copy it again") from None
    configurations = parse_json(text, str(path))
    check_shape(path, configurations, {str: {}}, "copy it again")
    return configurations


@cache
def _values_of_preset(name: str) -> dict[str, Any]:
    from verl_clipx.papers.tables.presets import compose_preset

    return significant_values(compose_preset(name))


def _add_means(table: Table, by_seed: dict[CellKey, dict[int, Value]]) -> dict[CellKey, dict[int, Value]]:
    """Return each cell's numbers by training seed, with those of the cells that are means of other columns.

    Args:
        by_seed: for each cell that is read from runs, its numbers by training seed.
    """
    by_seed = dict(by_seed)
    for row in table.rows:
        for column in table.columns:
            averaged = table.measure_of(row, column).get(MEAN_OF)
            if not averaged:
                continue
            parts = [by_seed.get((row.name, name), {}) for name in averaged]
            # Seeds that have a number in each of these columns.
            complete_seeds = set.intersection(*map(set, parts))
            means = {}
            for seed in sorted(complete_seeds):
                means[seed] = mean_of([part[seed] for part in parts])
            if means:
                by_seed[row.name, column.name] = means
    return by_seed


class Measured(NamedTuple):
    """The measured number of a cell.

    Args:
        value: the number, in the table's unit.
        interval_over: what its interval is over: SEEDS, SHARE or QUESTIONS; None for a number without an interval.
    """

    value: Value
    interval_over: str | None


def _combine_numbers(table: Table, by_seed: dict[CellKey, dict[int, Value]]) -> dict[CellKey, Measured]:
    """Return the number of each measured cell: numbers combined over seeds, then gains and differences of these.

    Args:
        by_seed: for each cell its numbers by training seed, with those of `_add_means`.
    """
    measured = {}
    for (row_name, column_name), values in by_seed.items():
        is_collapse = table.is_collapse(table.row(row_name), table.column(column_name))
        measured[row_name, column_name] = _combine_seeds(values, table, is_collapse)
    for row in table.rows:
        for column in table.columns:
            # Built again for each cell, because a difference may use a cell that was derived before.
            means = {cell: number.value.mean for cell, number in measured.items()}
            derived = _derive_number(table, row, column, means)
            if derived is not None:
                measured[row.name, column.name] = Measured(value=Value(derived), interval_over=None)
    return measured


def _combine_seeds(values: dict[int, Value], table: Table, is_collapse: bool) -> Measured:
    """Combine a cell's numbers over its training seeds.

    Args:
        values: the cell's number by training seed. A single number keeps its interval over questions.
        table: the table of the cell.
        is_collapse: whether the numbers say which trainings collapsed. They are positive for those that did, else 0.
    """
    means = [value.mean for value in values.values()]
    # With fewer seeds, the share is a mean without an interval.
    if is_collapse and len(means) >= MIN_SEEDS:
        collapsed = sum(map(bool, means))
        # A share is counted in parts of 1, whatever the table's unit is.
        share = estimate_share(collapsed, len(means))
        return Measured(value=Value(**asdict(share)).scaled(table.accuracy_factor), interval_over=SHARE)
    if len(means) > 1:
        number = Value(**asdict(estimate_over_seeds(means)))
        interval_over = SEEDS
    else:
        number = next(iter(values.values()))
        interval_over = QUESTIONS
    if number.low is None:
        return Measured(value=number, interval_over=None)
    return Measured(value=number, interval_over=interval_over)


def _derive_number(table: Table, row: TableRow, column: Column, means: dict[CellKey, float]) -> float | None:
    """Return the number of a cell that is a gain or a difference of other cells.

    Args:
        means: the numbers of the cells that have one so far.

    Returns:
        A gain in percent, or a difference in the table's unit; None if the cell is neither, or if a cell that it needs
        is missing.
    """
    gain_of = table.measure_of(row, column).get(GAIN_OF)
    if gain_of and row.baseline:
        ours = means.get((row.name, gain_of))
        baseline = means.get((row.baseline, gain_of))
        # The gain over a baseline of 0 is not defined.
        if ours is None or not baseline:
            return None
        return 100 * (ours / baseline - 1)
    if row.minus:
        first_row, second_row = row.minus
        first = means.get((first_row, column.name))
        second = means.get((second_row, column.name))
        if first is not None and second is not None:
            return first - second
    return None


def _describe_cell(
    table: Table,
    row: TableRow,
    column: Column,
    measured: Mapping[CellKey, Measured],
    by_seed: Mapping[CellKey, Mapping[int, Value]],
) -> dict[str, Any]:
    """Return a cell as JSON values, in the table's unit.

    Args:
        measured: the number of each measured cell.
        by_seed: for each cell its numbers by training seed. A gain or a difference has none.

    Returns:
        `row`, `column` and `expected`, the paper's number or None. A measured cell also has `mean`; `low` and `high`,
        the bounds of its 95 % interval, or None; `interval`, see `Measured.interval_over`; `seeds`, the training seeds;
        `by_seed`, the number of each seed; and `difference`, the mean minus the expected number, or None.
    """
    expected = table.expected(row, column)
    key = (row.name, column.name)
    cell: dict[str, Any] = {"row": row.name, "column": column.name, "expected": expected}
    if key not in measured:
        return cell
    number, interval_over = measured[key]
    number_by_seed = {}
    for seed, value in sorted(by_seed.get(key, {}).items()):
        # A model that nothing trains has a number but no seed.
        if seed != NO_SEED:
            number_by_seed[seed] = value.mean
    return {
        **cell,
        "mean": number.mean,
        "low": number.low,
        "high": number.high,
        "interval": interval_over,
        "seeds": list(number_by_seed),
        "by_seed": {str(seed): mean for seed, mean in number_by_seed.items()},
        "difference": None if expected is None else number.mean - expected,
    }


def _versions_of_evaluation(table: Table, cells: Cells, run: RunFolder) -> dict[str, str | None]:
    """Return the versions of the packages that made a run's evaluations; empty if the cells have no evaluation.

    They are those of the first evaluation that is there.
    """
    for row, column in cells:
        for benchmark in table.benchmarks_of(row, column):
            evaluation = evaluation_folder(run.path, benchmark)
            if evaluation.results_path.exists():
                return evaluation.read_results()["config"]["versions"]
    return {}


def hash_of_definition(table: Table) -> str:
    """Return the SHA-256 of the parts of a table that its results depend on.

    Results carry the hash, so that they are not shown for a definition that has changed. The options of evaluations are
    not among these parts.
    """
    row_keys = ("name", "preset", "presets", "model", "models", "minus", "baseline", "measure", "expected")
    # From a name in the hash to the field of Column that stands under it. `run` is an old name of `variant`. The new
    # name would change the hashes of all committed results.
    column_keys = {"name": "name", "run": "variant", "preset": "preset", "measure": "measure"}
    benchmarks = {}
    for name, settings in table.benchmarks.items():
        # `origin` only tells a reader where the questions come from.
        benchmarks[name] = {key: value for key, value in settings.items() if key != "origin"}
    rows = [{key: getattr(row, key) for key in row_keys} for row in table.rows]
    columns = []
    for column in table.columns:
        columns.append({hashed_name: getattr(column, field_name) for hashed_name, field_name in column_keys.items()})
    parts = [table.unit, benchmarks, rows, columns]
    # A table without a baseline keeps the hash that it had before tables could have one.
    if table.baseline:
        parts.append(table.baseline)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
