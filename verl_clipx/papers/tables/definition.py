"""Defines a table of a paper: its rows, columns and numbers, which runs fill it, and how they are evaluated."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

import yaml

from verl_clipx.losses.base.refusal import did_you_mean

DEFINITIONS = files("verl_clipx.papers.tables").joinpath("definitions")

# Ways to get a number, by the key of a measure that selects each.
BENCHMARK = "benchmark"
VALIDATION = "validation"
TIMING = "timing"
MEAN_OF = "mean_of"
GAIN_OF = "gain_of"
COLLAPSE = "collapse"
"""Whether the training metric that it names collapsed: 1 or 0 for each seed, whose mean is the share that did."""

LEVEL = "level"
AVERAGE = "average"
"""The mean of the training metric that they name, over the last tenth of the steps and over all of them."""

READ_FROM_RUN = (BENCHMARK, VALIDATION, TIMING, COLLAPSE, LEVEL, AVERAGE)


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        measure: how its numbers are obtained. A cell's measure has the keys of its column and of its row.
        variant: which of a row's presets or models the column shows; None if rows have only one.
        preset: the preset that trains every row of the column, if the rows are not runs.
        digits: digits after the decimal point; None for the table's.
    """

    name: str
    measure: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    preset: str | None = None
    digits: int | None = None


@dataclass(frozen=True)
class Row:
    """A row. It names a preset or presets, or a model or models, or `minus`, or why it is only `quoted`.

    Args:
        preset: the preset that trains it.
        presets: presets by the columns' `variant`; other columns have no cell in this row.
        model: a model that is evaluated without training, as an id on the hub or a folder.
        models: such models by the columns' `variant`.
        minus: two rows, of which this row is the first minus the second.
        quoted: why the row is only quoted from the paper and never measured.
        baseline: the row with which `gain_of` and the table of differences compare; None for the table's in the latter.
        measure: see `Column.measure`.
        measured_bounds: if the preset leaves clip bounds open, `of`, which epsilon they follow (highest or average),
            and by the columns' `variant` the preset on whose run of the same seed they are measured.
        evaluation_options: more options of `clipx papers eval run` for this row.
        expected: the paper's numbers by column, None where it has none; empty if it has none at all.
    """

    name: str
    preset: str | None = None
    presets: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    models: Mapping[str, str] = field(default_factory=dict)
    minus: tuple[str, str] | None = None
    quoted: str | None = None
    baseline: str | None = None
    measure: Mapping[str, Any] = field(default_factory=dict)
    measured_bounds: Mapping[str, str] = field(default_factory=dict)
    evaluation_options: str = ""
    expected: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Footnote:
    """A text and the names of the rows and columns that have its mark; without any, it is about the whole table."""

    text: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a cell's number is read from: a trained preset, or a model as it is."""

    preset: str | None
    model: str | None


@dataclass(frozen=True)
class Table:
    """A table.

    Args:
        unit: percent, fraction, seconds or number. For "percent", measured fractions are multiplied by 100.
        hardware: `+hardware` group of the training commands.
        data: folder of the data sets, unless `clipx papers table plan --data` names another.
        in_one_process: whether benchmarks/table_fill.py makes its runs, instead of the recipes.
        prepare: what to prepare: `makes`, a file below the data folder, and `command`, which makes it.
        benchmarks: by name, the `file` below the data folder; its number of `questions`; the options of `clipx papers
            eval run`; and their `origin`, unless the paper names the questions.
        origins: where the evaluation's settings come from: [paper], [script] or [choice], and why; for who reads the
            file.
        evaluation_options: more options of every `clipx papers eval run`.
        baseline: the row with which the table of differences compares all rows that do not name another.
        footnotes: in the order of their marks; those about the whole table come last.

    Raises:
        ValueError: a part does not fit the others; the message names the table and the part.
    """

    name: str
    title: str
    source: str
    metric: str
    unit: str
    digits: int
    hardware: str
    nodes: int
    seeds: tuple[int, ...]
    data: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    in_one_process: bool = False
    prepare: tuple[Mapping[str, Any], ...] = ()
    benchmarks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    evaluation_options: str = ""
    baseline: str | None = None
    footnotes: tuple[Footnote, ...] = ()

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault:
            raise ValueError(f"table {self.name}: {fault}")

    def _faults(self) -> Iterator[str]:
        """Yield what does not fit. Labels and counts of the committed definitions are the tests' to check."""
        yield from self._unknown("footnotes", *(name for note in self.footnotes for name in note.rows))
        yield from self._unknown("baseline", *filter(None, [self.baseline]))
        for row in self.rows:
            origins = [row.preset, row.presets, row.model, row.models, row.minus, row.quoted]
            if sum(map(bool, origins)) + any(column.preset for column in self.columns) != 1:
                ways = "preset, presets, model, models, minus, quoted, or columns with preset"
                yield f"row {row.name}: needs exactly one of {ways}"
            if row.expected and len(row.expected) != len(self.columns):
                yield f"row {row.name}: {len(row.expected)} expected numbers for {len(self.columns)} columns"
            yield from self._unknown(f"row {row.name}", *(row.minus or ()), *filter(None, [row.baseline]))
            for column in (column for column in self.columns if self.source_of(row, column)):
                measure = self.measure_of(row, column)
                if sum(kind in measure for kind in READ_FROM_RUN) != 1:
                    yield f"{row.name}, {column.name}: needs exactly one of {', '.join(READ_FROM_RUN)}"
                asked = {*self.benchmarks_of(row, column), *filter(None, [measure.get(VALIDATION)])}
                yield from (f"{row.name}, {column.name}: no benchmark {name}" for name in asked - {*self.benchmarks})

    def _unknown(self, where: str, *rows: str) -> Iterator[str]:
        return (f"{where}: no row is called {name}" for name in rows if name not in self._row_names)

    @cached_property
    def _row_names(self) -> dict[str, Row]:
        return {row.name: row for row in self.rows}

    def row(self, name: str) -> Row:
        """Return the row of that name."""
        return self._row_names[name]

    def column(self, name: str) -> Column:
        """Return the column of that name."""
        return next(column for column in self.columns if column.name == name)

    def baseline_of(self, row: Row) -> str | None:
        """Return the name of the row with which a row is compared; None if there is none or the row is the baseline."""
        name = row.baseline or self.baseline
        return None if name == row.name else name

    def digits_of(self, column: Column) -> int:
        """Return the digits after the decimal point of a column's numbers."""
        return self.digits if column.digits is None else column.digits

    def expected(self, row: Row, column: Column) -> float | None:
        """Return the paper's number for a cell, or None."""
        return row.expected[self.columns.index(column)] if row.expected else None

    def measure_of(self, row: Row, column: Column) -> dict[str, Any]:
        """Return how a cell's number is obtained."""
        return {**column.measure, **row.measure}

    def is_collapse(self, row: Row, column: Column) -> bool:
        """Return whether a cell is the share of trainings that collapsed."""
        return COLLAPSE in self.measure_of(row, column)

    @property
    def of_one(self) -> float:
        """An accuracy of 1 in the table's unit."""
        return 100.0 if self.unit == "percent" else 1.0

    def benchmarks_of(self, row: Row, column: Column) -> list[str]:
        """Return the benchmarks on which a cell needs an evaluation; for a model, a validation is an evaluation too."""
        measure = self.measure_of(row, column)
        if VALIDATION in measure:
            return [measure[VALIDATION]] if row.model or row.models else []
        named = measure.get(BENCHMARK, [])
        return [named] if isinstance(named, str) else list(named)

    def source_of(self, row: Row, column: Column) -> Source | None:
        """Return what a cell's number is read from; None for a quoted row, a difference or a mean."""
        if columns_used(self.measure_of(row, column)):
            return None
        preset = column.preset or row.preset or row.presets.get(column.variant)
        model = row.model or row.models.get(column.variant)
        return Source(preset, model) if preset or model else None

    def is_measurable(self, row: Row, column: Column) -> bool:
        """Return whether some run could fill the cell."""
        measure = self.measure_of(row, column)
        if row.quoted:
            return False
        if row.minus:
            return all(self.is_measurable(self.row(name), column) for name in row.minus)
        used = [self.column(name) for name in columns_used(measure)]
        if used and GAIN_OF in measure:
            if not row.baseline:
                return False
            baseline = self.row(row.baseline)
            return all(self.is_measurable(row, other) and self.is_measurable(baseline, other) for other in used)
        if used:
            return all(self.is_measurable(row, other) for other in used)
        return self.source_of(row, column) is not None

    def count_measurable(self, rows: Iterable[Row]) -> int:
        """Return how many cells of some rows a run could fill."""
        return sum(self.is_measurable(row, column) for row in rows for column in self.columns)

    def folder_of(self, source: Source) -> str:
        """Return the path of a source's runs below the folder of all runs. All tables share a preset's runs."""
        if source.preset:
            return source.preset
        slug = source.model.removeprefix("{data}/").strip("/").replace("/", "--")
        return f"models/{self.name}/{slug}"

    def sources(self, rows: Sequence[str] = ()) -> Iterator[tuple[Source, list[tuple[Row, Column]]]]:
        """Yield each preset or model with the cells that are read from it, in the table's order.

        Args:
            rows: names of the wanted rows, from --row; empty for all.

        Raises:
            ValueError: there is no such row.
        """
        known = [row.name for row in self.rows]
        for name in (name for name in rows if name not in known):
            hint = did_you_mean(name, known)
            raise ValueError(f"--row {name}: table {self.name} has no such row.{hint} It has {', '.join(known)}.")
        cells: dict[Source, list[tuple[Row, Column]]] = {}
        for row in (row for row in self.rows if not rows or row.name in rows):
            for column in self.columns:
                source = self.source_of(row, column)
                if source is not None:
                    cells.setdefault(source, []).append((row, column))
        yield from cells.items()


def columns_used(measure: Mapping[str, Any]) -> list[str]:
    """Return the columns of the same row that a measure combines."""
    return [*measure.get(MEAN_OF, []), *filter(None, [measure.get(GAIN_OF)])]


def table_names() -> list[str]:
    """Return the names of all tables."""
    return sorted(path.name.removesuffix(".yaml") for path in DEFINITIONS.iterdir() if path.name.endswith(".yaml"))


def load_table(name: str) -> Table:
    """Read a table's definition.

    Raises:
        ValueError: there is no such table, or its definition is wrong.
    """
    if name not in table_names():
        hint = did_you_mean(name, table_names())
        raise ValueError(f"table {name!r} is unknown.{hint} There are {', '.join(table_names())}.")
    return build_table(name, yaml.safe_load(DEFINITIONS.joinpath(f"{name}.yaml").read_text(encoding="utf-8")))


def build_table(name: str, entries: Mapping[str, Any]) -> Table:
    """Build a table from the content of its file.

    Raises:
        ValueError: the definition is wrong; the message names the table.
    """
    try:
        entries = dict(_section(entries, "the file", Mapping))
        common = _section(entries.pop("evaluation", {}), "evaluation", Mapping)
        benchmarks = _section(entries.get("benchmarks", {}), "benchmarks", Mapping)
        entries["benchmarks"] = {
            key: {**common, **_section(settings, f"benchmarks, {key}", Mapping)} for key, settings in benchmarks.items()
        }
        for key, kind in (("columns", Column), ("rows", Row), ("footnotes", Footnote)):
            parts = _section(entries.get(key, []), key, list)
            entries[key] = [
                kind(**_as_tuples(_section(part, f"{key}, entry {number}", Mapping)))
                for number, part in enumerate(parts, 1)
            ]
        return Table(name=name, **_as_tuples(entries))
    except (TypeError, AttributeError) as error:
        # A field that there is not, that is missing, or that has another type.
        raise ValueError(f"table {name}: {error}") from error


def _section(content: Any, name: str, kind: type) -> Any:
    """Return a part of a definition that has the type which its name asks for."""
    if not isinstance(content, kind):
        what = "a list" if kind is list else "fields with values"
        raise TypeError(f"{name} is {content!r:.60}, not {what}")
    return content


def _as_tuples(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()}
