"""Collects a table's footnotes, both derived from its fields and presets and written by hand in its definition."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from verl_clipx.papers.tables.definition import (
    BENCHMARK,
    CURVE,
    EVALUATED,
    VALIDATION,
    Column,
    Table,
    split_origin,
)
from verl_clipx.papers.tables.origins import Origin, read_origins
from verl_clipx.papers.tables.presets import PAPERS, lopti_passes, values_of
from verl_clipx.runs.sameness import is_left_out

LONGEST_VALUE = 24
"""Longest preset value, in characters, that a footnote repeats; for longer ones only the key is named."""


@dataclass(frozen=True)
class Footnote:
    """A text and the headings that have its mark. Without headings it is about the whole table."""

    text: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


def footnotes_of(table: Table) -> list[Footnote]:
    """Return all footnotes of a table; those about the whole table come last."""
    merged: dict[str, Footnote] = {}
    for footnote in (footnote for cause in CAUSES for footnote in cause(table)):
        same = merged.get(footnote.text, Footnote(footnote.text))
        merged[footnote.text] = replace(same, rows=same.rows + footnote.rows, columns=same.columns + footnote.columns)
    return sorted(merged.values(), key=lambda footnote: not (footnote.rows or footnote.columns))


def marks() -> Iterator[str]:
    """Yield a to z, then aa to zz."""
    yield from ascii_lowercase
    yield from (one + two for one in ascii_lowercase for two in ascii_lowercase)


def by_hand(table: Table) -> Iterator[Footnote]:
    """Yield the footnotes that the definition states."""
    for name, text in table.footnotes.items():
        rows, columns = ([part.name for part in parts if name in part.notes] for parts in (table.rows, table.columns))
        yield Footnote(text, tuple(rows), tuple(columns))


def never_measured(table: Table) -> Iterator[Footnote]:
    """Say why quoted rows are not measured."""
    for reason, rows in _grouped((row.quoted, row.name) for row in table.rows if row.quoted):
        yield Footnote(f"Not measured: {reason}.", rows=rows)


def before_training(table: Table) -> Iterator[Footnote]:
    """Mark untrained rows in which one model fills the columns of several regimes."""
    rows = []
    for row in table.rows:
        sources = [table.source_of(row, column) for column in table.columns if table.expected(row, column) is not None]
        regimes = {column.run for column in table.columns if table.expected(row, column) is not None and column.run}
        if (row.model or row.models) and len(regimes) > len({source.model for source in sources if source}):
            rows.append(row.name)
    if rows:
        yield Footnote("The model before training; the paper prints one number for all regimes.", rows=tuple(rows))


def other_options(table: Table) -> Iterator[Footnote]:
    """State the options with which a row is evaluated differently."""
    for options, rows in _grouped((row.evaluation_options, row.name) for row in table.rows if row.evaluation_options):
        yield Footnote(f"Evaluated with `{options}`, so that the prompt is the same as in the trained rows.", rows=rows)


def bounds_from_a_run(table: Table) -> Iterator[Footnote]:
    """Say on which run a row's clip bounds are measured."""
    for row in table.rows:
        runs = [f"`{preset}`" for key, preset in row.measured_bounds.items() if key != "group"]
        if runs:
            text = f"The paper prints no bounds: `clipx bounds` measures them on {_listed(runs)} of the same seed."
            yield Footnote(text, rows=(row.name,))


def best_validation(table: Table) -> Iterator[Footnote]:
    """Mark columns that show the best validation."""
    columns = [column.name for column in table.columns if VALIDATION in column.measure]
    if columns:
        text = (
            "The best of all validations of a run, on the problems that are reported. This is optimistic, and more so "
            "the more often a run is validated."
        )
        yield Footnote(text, columns=tuple(columns))


def questions(table: Table) -> Iterator[Footnote]:
    """Say where a benchmark's questions come from, if not from the paper."""
    for name, settings in table.benchmarks.items():
        if "origin" not in settings:
            continue
        kind, text = split_origin(settings["origin"])
        columns = [column.name for column in table.columns if _uses(table, column, name)]
        if kind != "paper":
            yield Footnote(f"Questions{_chosen(kind)}: {text}.", columns=tuple(columns))


def estimator(table: Table) -> Iterator[Footnote]:
    """Explain best@k."""
    columns = [column.name for column in table.columns if _draws_with_replacement(table, column)]
    if columns:
        kind, text = split_origin(table.origins["estimator"])
        text = f"verl's best@k, k draws with replacement{_chosen(kind)}: {text}."
        yield Footnote(text, columns=tuple(columns))


def twice_the_steps(table: Table) -> Iterator[Footnote]:
    """Mark presets with Lopti's two passes."""
    rows = [
        row.name
        for row in table.rows
        if any(_has_two_passes(preset) for preset in (row.preset, *row.presets.values()) if preset)
    ]
    columns = [column.name for column in table.columns if column.preset and _has_two_passes(column.preset)]
    if rows or columns:
        text = "Lopti goes over each rollout batch twice, so it makes twice the optimizer steps."
        yield Footnote(text, rows=tuple(rows), columns=tuple(columns))


def moving_average(table: Table) -> Iterator[Footnote]:
    """State the weight of a moving average."""
    smooth = ((column.measure["smooth"], column.name) for column in table.columns if "smooth" in column.measure)
    for weight, columns in _grouped(smooth):
        yield Footnote(
            f"Exponential moving average, weight of the past {weight}; faint lines are as logged.", columns=columns
        )


def last_numbers(table: Table) -> Iterator[Footnote]:
    """Say that a figure's table shows the last numbers of its curves."""
    if any(CURVE in column.measure for column in table.columns):
        yield Footnote(f"The curves' last numbers; `clipx table render {table.name} --format svg` draws the curves.")


def evaluation(table: Table) -> Iterator[Footnote]:
    """List the evaluation's settings that do not come from the paper."""
    for kind, whose in (("script", "The authors' release"), ("choice", "This project's choice")):
        origins = [(split_origin(table.origins[key]), key) for key in EVALUATED if key in table.origins]
        reasons = _grouped((text, _setting(table, key)) for (found, text), key in origins if found == kind)
        parts = [f"{_listed(keys)} ({text})" for text, keys in reasons]
        if parts:
            yield Footnote(f"Evaluation. {whose}: {_listed(parts)}.")


def choices_of_presets(table: Table) -> Iterator[Footnote]:
    """List the training values that neither paper nor release determines: `[choice]` in the presets."""
    values: dict[str, dict[str, None]] = defaultdict(dict)
    for source, _ in table.sources():
        for origin in _origins(source.preset):
            if origin.kind == "choice" and _is_the_papers_own(origin):
                value = "null" if origin.value is None else str(origin.value)
                values[origin.key] |= {value: None} if len(value) <= LONGEST_VALUE else {}
    parts = [f"`{key}`{' ' * bool(found)}{' or '.join(sorted(found))}" for key, found in values.items()]
    if parts:
        yield Footnote(f"Training. This project's choice: {_listed(parts)}; `clipx recipe show` says why.")


CAUSES = (
    by_hand,
    never_measured,
    before_training,
    other_options,
    bounds_from_a_run,
    best_validation,
    questions,
    estimator,
    twice_the_steps,
    moving_average,
    last_numbers,
    evaluation,
    choices_of_presets,
)
"""Functions that yield footnotes, in the order of their marks."""


def _chosen(kind: str) -> str:
    return ", this project's choice" if kind == "choice" else ""


def _origins(preset: str | None) -> Iterable[Origin]:
    if not preset or preset.partition("/")[0] not in PAPERS:
        return ()
    return read_origins(preset).values()


def _is_the_papers_own(origin: Origin) -> bool:
    # Values that all papers share are verl's defaults, and a method's group has keys that only this project knows.
    if origin.file == "recipe/common/base.yaml" or origin.file.startswith("clipx/"):
        return False
    return not is_left_out(origin.key) and origin.key != "reward.custom_reward_function.name"


def _setting(table: Table, key: str) -> str:
    """Return an evaluation setting's name, with its value if all benchmarks agree on it."""
    values = {settings[key] for settings in table.benchmarks.values() if key in settings}
    return key.replace("_", "-") + (f" {values.pop()}" if len(values) == 1 else "")


def _has_two_passes(preset: str) -> bool:
    return lopti_passes(values_of(preset)) == 2


def _uses(table: Table, column: Column, benchmark: str) -> bool:
    evaluated = any(benchmark in table.benchmarks_of(row, column) for row in table.rows)
    return evaluated or column.measure.get(VALIDATION) == benchmark


def _draws_with_replacement(table: Table, column: Column) -> bool:
    measures = [table.measure_of(row, column) for row in table.rows]
    return any(BENCHMARK in how and how["metric"].startswith("best@") for how in measures)


def _grouped(pairs: Iterable[tuple]) -> Iterator[tuple]:
    """Group pairs by their first element. Yields each of these, in order, with a tuple of its second elements."""
    groups = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    yield from ((key, tuple(values)) for key, values in groups.items())


def _listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
