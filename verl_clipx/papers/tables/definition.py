"""Defines a table of a paper: its rows, columns and numbers, which runs fill it, and how they are evaluated."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

import yaml

from verl_clipx.losses.base.refusal import did_you_mean

DEFINITIONS = files("verl_clipx.papers.tables").joinpath("definitions")

DATA_FOLDER = "{data}"
"""In a definition, this stands for the folder of the data sets."""

# The keys of a measure. Each is a way to get a number, and its value names what the number is of.
BENCHMARK = "benchmark"
VALIDATION = "validation"
TIMING = "timing"
MEAN_OF = "mean_of"
GAIN_OF = "gain_of"
COLLAPSE = "collapse"
"""Its value is a training metric. The number is 1 for a seed on which the metric collapsed, and 0 for the others; the
mean over seeds is the share that collapsed."""

LEVEL = "level"
"""Its value is a training metric. The number is the metric's mean over the last tenth of the steps."""

AVERAGE = "average"
"""Its value is a training metric. The number is the metric's mean over all steps."""

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
class TableRow:
    """A row. It names a preset or presets, or a model or models, or `minus`, or why it is only `quoted`.

    Args:
        preset: the preset that trains it.
        presets: for each `variant` of the columns, the preset that trains it. Other columns have no cell in this row.
        model: a model that is evaluated without training, as an id on the hub or a folder.
        models: for each `variant` of the columns, such a model.
        minus: two rows, of which this row is the first minus the second.
        quoted: why the row is only quoted from the paper and never measured.
        baseline: the name of the row with which this one is compared. Without it, the table of differences compares
            with the table's baseline, and there is no number for `gain_of`.
        measure: see `Column.measure`.
        measured_epsilon: if the preset leaves clip bounds open, which epsilon of another run they follow: highest or
            average.
        measured_on: for each `variant` of the columns, the preset of that other run, which has the same seed.
        evaluation_options: more options of `clipx papers eval run` for this row.
        expected: the paper's number for each column, or None; empty if the paper has none at all.
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
    measured_epsilon: str | None = None
    measured_on: Mapping[str, str] = field(default_factory=dict)
    evaluation_options: str = ""
    expected: tuple[float | None, ...] = ()

    @property
    def is_untrained(self) -> bool:
        """Whether the row shows models as they are, which are evaluated and never trained."""
        return bool(self.model or self.models)


@dataclass(frozen=True)
class Footnote:
    """A text and the names of the rows and columns that have its mark; without any, it is about the whole table."""

    text: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """What a cell's number is read from: a trained preset, or a model as it is. One of the two is None."""

    preset: str | None
    model: str | None


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Args:
        metric: what the numbers are, for display.
        unit: percent, fraction, seconds or number. For "percent", measured fractions are multiplied by 100.
        hardware: `+hardware` group of the training commands.
        data: folder of the data sets, unless `clipx papers table plan --data` names another.
        in_one_process: whether benchmarks/table_fill.py makes its runs, instead of the recipes.
        prepare: what to prepare: `makes`, a file below the data folder, and `command`, which makes it.
        benchmarks: the settings of each benchmark, by its name: its `file` below the data folder; its number of
            `questions`; options of `clipx papers eval run`; and the `origin` of the questions, unless the paper names
            them.
        origins: where the evaluation's settings come from: [paper], [script] or [choice], and why. They are for the
            readers of the file.
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
    rows: tuple[TableRow, ...]
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
        """Yield what does not fit. The labels and counts of the committed definitions are checked by the tests."""
        for note in self.footnotes:
            yield from self._unknown_rows("footnotes", note.rows)
        if self.baseline:
            yield from self._unknown_rows("baseline", [self.baseline])
        for row in self.rows:
            yield from self._faults_of_row(row)
            for column in self.columns:
                if self.source_of(row, column):
                    yield from self._faults_of_measure(row, column)

    def _faults_of_row(self, row: TableRow) -> Iterator[str]:
        """Yield what does not fit in a row."""
        columns_have_presets = any(column.preset for column in self.columns)
        ways = [row.preset, row.presets, row.model, row.models, row.minus, row.quoted, columns_have_presets]
        if sum(map(bool, ways)) != 1:
            names = "preset, presets, model, models, minus, quoted, or columns with preset"
            yield f"row {row.name}: needs exactly one of {names}"
        if row.expected and len(row.expected) != len(self.columns):
            yield f"row {row.name}: {len(row.expected)} expected numbers for {len(self.columns)} columns"
        if row.minus:
            yield from self._unknown_rows(f"row {row.name}", row.minus)
        if row.baseline:
            yield from self._unknown_rows(f"row {row.name}", [row.baseline])

    def _faults_of_measure(self, row: TableRow, column: Column) -> Iterator[str]:
        """Yield what does not fit in the measure of a cell that is read from a run."""
        measure = self.measure_of(row, column)
        ways = [key for key in READ_FROM_RUN if key in measure]
        if len(ways) != 1:
            yield f"{row.name}, {column.name}: needs exactly one of {', '.join(READ_FROM_RUN)}"
        benchmarks = self.benchmarks_of(row, column)
        if VALIDATION in measure:
            benchmarks.append(measure[VALIDATION])
        for benchmark in benchmarks:
            if benchmark not in self.benchmarks:
                yield f"{row.name}, {column.name}: no benchmark {benchmark}"

    def _unknown_rows(self, where: str, names: Iterable[str]) -> Iterator[str]:
        """Yield a fault for each name that no row has; `where` is the part of the definition with the names."""
        for name in names:
            if name not in self._rows_by_name:
                yield f"{where}: no row is called {name}"

    @cached_property
    def _rows_by_name(self) -> dict[str, TableRow]:
        return {row.name: row for row in self.rows}

    def row(self, name: str) -> TableRow:
        """Return the row of that name."""
        return self._rows_by_name[name]

    def chosen_rows(self, names: Sequence[str]) -> list[TableRow]:
        """Return the rows of these names, in the table's order; all of them if no name is given.

        Args:
            names: from `--row` on the command line.

        Raises:
            ValueError: there is no such row.
        """
        for name in names:
            if name not in self._rows_by_name:
                known = list(self._rows_by_name)
                hint = did_you_mean(name, known)
                raise ValueError(f"--row {name}: table {self.name} has no such row.{hint} It has {', '.join(known)}.")
        return [row for row in self.rows if not names or row.name in names]

    def column(self, name: str) -> Column:
        """Return the column of that name."""
        return next(column for column in self.columns if column.name == name)

    def baseline_of(self, row: TableRow) -> str | None:
        """Return the name of the row with which a row is compared; None if there is none or the row is the baseline."""
        name = row.baseline or self.baseline
        return None if name == row.name else name

    def digits_of(self, column: Column) -> int:
        """Return the digits after the decimal point of a column's numbers."""
        return self.digits if column.digits is None else column.digits

    def expected(self, row: TableRow, column: Column) -> float | None:
        """Return the paper's number for a cell, or None."""
        return row.expected[self.columns.index(column)] if row.expected else None

    def measure_of(self, row: TableRow, column: Column) -> dict[str, Any]:
        """Return how a cell's number is obtained."""
        return {**column.measure, **row.measure}

    def is_collapse(self, row: TableRow, column: Column) -> bool:
        """Return whether a cell is the share of trainings that collapsed."""
        return COLLAPSE in self.measure_of(row, column)

    @property
    def accuracy_factor(self) -> float:
        """The factor that turns an accuracy between 0 and 1 into the table's unit."""
        return 100.0 if self.unit == "percent" else 1.0

    def benchmarks_of(self, row: TableRow, column: Column) -> list[str]:
        """Return the benchmarks on which a cell needs an evaluation; for a model, a validation is an evaluation too."""
        measure = self.measure_of(row, column)
        if VALIDATION in measure:
            return [measure[VALIDATION]] if row.is_untrained else []
        benchmarks = measure.get(BENCHMARK, [])
        return [benchmarks] if isinstance(benchmarks, str) else list(benchmarks)

    def source_of(self, row: TableRow, column: Column) -> Source | None:
        """Return what a cell's number is read from; None for a quoted row, a difference or a mean."""
        if columns_used(self.measure_of(row, column)):
            return None
        preset = column.preset or row.preset or row.presets.get(column.variant)
        model = row.model or row.models.get(column.variant)
        if not preset and not model:
            return None
        return Source(preset=preset, model=model)

    def is_measurable(self, row: TableRow, column: Column) -> bool:
        """Return whether runs could fill the cell, directly or through the cells that it is computed from."""
        measure = self.measure_of(row, column)
        if row.quoted:
            return False
        if row.minus:
            return all(self.is_measurable(self.row(name), column) for name in row.minus)
        used_columns = [self.column(name) for name in columns_used(measure)]
        if not used_columns:
            return self.source_of(row, column) is not None
        used_rows = [row]
        if GAIN_OF in measure:
            if not row.baseline:
                return False
            used_rows.append(self.row(row.baseline))
        return all(self.is_measurable(used_row, used) for used_row in used_rows for used in used_columns)

    def count_measurable(self, rows: Iterable[TableRow]) -> int:
        """Return how many cells of some rows runs could fill; see `is_measurable`."""
        return sum(self.is_measurable(row, column) for row in rows for column in self.columns)

    def runs_path(self, source: Source) -> str:
        """Return where a source's runs are, as a path below the folder of all runs.

        For a model it is the folder of its evaluations, which each table has for itself. For a preset it is the common
        beginning of its runs' paths, up to `-seed<seed>`; all tables share these runs.
        """
        if source.preset:
            return source.preset
        model = source.model.removeprefix(f"{DATA_FOLDER}/")
        # A model's path or id on the hub becomes the name of one folder.
        folder = model.strip("/").replace("/", "--")
        return f"models/{self.name}/{folder}"

    def sources(self, rows: Sequence[str] = ()) -> list[tuple[Source, list[tuple[TableRow, Column]]]]:
        """Return each preset or model with the cells that are read from it, in the table's order.

        Args:
            rows: as for `chosen_rows`.

        Raises:
            ValueError: there is no such row.
        """
        cells_by_source: dict[Source, list[tuple[TableRow, Column]]] = {}
        for row in self.chosen_rows(rows):
            for column in self.columns:
                source = self.source_of(row, column)
                if source is not None:
                    cells_by_source.setdefault(source, []).append((row, column))
        return list(cells_by_source.items())


def columns_used(measure: Mapping[str, Any]) -> list[str]:
    """Return the columns of the same row that a measure combines."""
    columns = list(measure.get(MEAN_OF, []))
    if GAIN_OF in measure:
        columns.append(measure[GAIN_OF])
    return columns


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
        # The settings of `evaluation` are those of every benchmark that does not set them itself.
        common = _section(entries.pop("evaluation", {}), "evaluation", Mapping)
        benchmarks = {}
        for benchmark, content in _section(entries.get("benchmarks", {}), "benchmarks", Mapping).items():
            settings = _section(content, f"benchmarks, {benchmark}", Mapping)
            benchmarks[benchmark] = {**common, **settings}
        entries["benchmarks"] = benchmarks
        for key, kind in (("columns", Column), ("rows", TableRow), ("footnotes", Footnote)):
            parts = []
            for number, part in enumerate(_section(entries.get(key, []), key, list), 1):
                values = _section(part, f"{key}, entry {number}", Mapping)
                parts.append(kind(**_as_tuples(values)))
            entries[key] = parts
        return Table(name=name, **_as_tuples(entries))
    except (TypeError, AttributeError) as error:
        # A field is unknown, is missing, or has a value of another type.
        raise ValueError(f"table {name}: {error}") from error


def _section(content: Any, name: str, kind: type) -> Any:
    """Return a part of a definition after checking its type.

    Args:
        content: the part.
        name: of the part, for the message.
        kind: list, or Mapping for fields with values.

    Raises:
        TypeError: the part is of another type.
    """
    if not isinstance(content, kind):
        wanted = "a list" if kind is list else "fields with values"
        raise TypeError(f"{name} is {content!r:.60}, not {wanted}")
    return content


def _as_tuples(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with tuples in place of lists, as the fields of the classes are declared."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in entries.items()}
