"""Footnotes: every field of a definition that is worth one has it in `render`, with its mark on the right headings; and
no footnote is there without its cause, which a definition without the field shows.

The texts that definitions write by hand are the authors' of this project; whether they are true is not tested.
"""

from functools import cache

import pytest
import yaml
from typer.testing import CliRunner

from tests.papers.tables.tables import small_table
from verl_clipx.cli import app
from verl_clipx.papers.tables.definition import CURVE, VALIDATION, load_table, split_origin, table_names
from verl_clipx.papers.tables.footnotes import CAUSES, Footnote, footnotes_of, marks

TABLES = {name: load_table(name) for name in table_names()}

GRPO, LOPTI = "cpu/countdown_grpo_near", "cpu/countdown_lopti_near"

ORIGINS = {
    "checkpoint": "[choice] the last",
    "samples": "[paper] Table 1",
    "temperature": "[choice] as in training",
    "top_p": "[script] the validation's",
    "max_tokens": "[script] the validation's",
    "grader": "[paper] Section 1",
}

PLAIN = f"""
digits: 0
evaluation: {{protocol: sampled, samples: 2, temperature: 1.0, max_tokens: 16}}
benchmarks: {{b: {{file: b.parquet, questions: 5}}, c: {{file: c.parquet, questions: 5}}}}
columns:
  - {{name: B, run: b, measure: {{benchmark: b, metric: avg@2}}}}
  - {{name: C, run: c, measure: {{benchmark: c, metric: avg@2}}}}
rows:
  - {{name: base, model: hub/base, expected: [10, null]}}
  - {{name: GRPO, presets: {{b: {GRPO}, c: {GRPO}}}, expected: [20, 30]}}
"""
"""A table without a footnote; ten parts a column, so that printed numbers are multiples of 10."""


@cache
def rendered(name: str) -> str:
    """A committed table as the command prints it."""
    return CliRunner().invoke(app, ["table", "render", name, "--runs", "/nowhere"]).stdout


def changed(path: str, value) -> list[Footnote]:
    """The footnotes of the plain table with one field changed: `rows.1.quoted`."""
    entries = yaml.safe_load(PLAIN)
    *parents, last = path.split(".")
    node = entries
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
    node[last] = value
    return footnotes_of(small_table("{}", **entries))


def test_a_table_without_a_cause_has_no_footnote():
    assert footnotes_of(small_table(PLAIN)) == []


@pytest.mark.parametrize(
    "path, value, expected",
    [
        (
            "rows",
            [{"name": "x", "quoted": "because", "expected": [1, 2]}, {"name": "y", "quoted": "because"}],
            Footnote("Not measured: because.", rows=("x", "y")),
        ),
        (
            "rows.0.expected",
            [10, 10],
            Footnote("The model before training; the paper prints one number for all regimes.", rows=("base",)),
        ),
        (
            "rows.0.evaluation_options",
            "--template plain",
            Footnote(
                "Evaluated with `--template plain`, so that the prompt is the same as in the trained rows.",
                rows=("base",),
            ),
        ),
        (
            "rows.1.measured_bounds",
            {"group": "g", "b": "p/near", "c": "p/off"},
            Footnote(
                "The paper prints no bounds: `clipx bounds` measures them on `p/near` and `p/off` of the same seed.",
                rows=("GRPO",),
            ),
        ),
        (
            "columns.1.measure",
            {"validation": "c", "samples": 2},
            Footnote(
                "The best of all validations of a run, on the problems that are reported. This is optimistic, and more "
                "so the more often a run is validated.",
                columns=("C",),
            ),
        ),
        (
            "benchmarks.c.origin",
            "[choice] nobody names them",
            Footnote("Questions, this project's choice: nobody names them.", columns=("C",)),
        ),
        (
            "benchmarks.c.origin",
            "[script] the authors' file",
            Footnote("Questions: the authors' file.", columns=("C",)),
        ),
        (
            "rows.1.presets",
            {"b": GRPO, "c": LOPTI},
            Footnote(
                "Lopti goes over each rollout batch twice, so it makes twice the optimizer steps.", rows=("GRPO",)
            ),
        ),
    ],
)
def test_a_field_causes_its_footnote(path, value, expected):
    assert changed(path, value) == [expected]


def test_the_papers_own_questions_need_none():
    assert changed("benchmarks.c.origin", "[paper] Table 1") == []


def test_what_is_not_the_papers_in_an_evaluation_is_said_of_the_whole_table():
    assert changed("origins", ORIGINS) == [
        Footnote("Evaluation. The authors' release: top-p and max-tokens 16 (the validation's)."),
        Footnote("Evaluation. This project's choice: checkpoint (the last) and temperature 1.0 (as in training)."),
    ]
    assert changed("origins", dict.fromkeys(ORIGINS, "[paper] Section 2")) == []


def test_best_at_k_says_its_estimator():
    columns = [{"name": "B", "measure": {"benchmark": "b", "metric": "best@2"}}]
    rows = [{"name": "GRPO", "preset": GRPO}]
    origins = dict.fromkeys([*ORIGINS, "estimator"], "[paper] Section 2") | {"estimator": "[choice] not named"}
    table = small_table(PLAIN, columns=columns, rows=rows, origins=origins)
    text = "verl's best@k, k draws with replacement, this project's choice: not named."
    assert footnotes_of(table) == [Footnote(text, columns=("B",))]


def test_a_curve_says_what_its_number_is_and_how_it_is_smoothed():
    columns = [{"name": "Reward", "measure": {"curve": "r", "smooth": 0.9}}, {"name": "E", "measure": {"curve": "e"}}]
    table = small_table("{unit: logged}", columns=columns, rows=[{"name": "GRPO", "preset": GRPO}])
    assert footnotes_of(table) == [
        Footnote("Exponential moving average, weight of the past 0.9; faint lines are as logged.", columns=("Reward",)),
        Footnote("The curves' last numbers; `clipx table render small --format svg` draws the curves."),
    ]


def test_choices_of_the_papers_presets_are_said_and_those_of_names_and_machines_are_not():
    (text,) = [note.text for note in footnotes_of(TABLES["dgpo_table3"]) if note.text.startswith("Training.")]
    for part in ("`trainer.total_epochs` 10", "`actor_rollout_ref.rollout.n` 8", "`clipx.dual_clip` null"):
        assert part in text
    for key in ("experiment_name", "project_name", "data.train_batch_size", "clipx.scope", "data.shuffle"):
        assert key not in text
    (text,) = [note.text for note in footnotes_of(TABLES["bapo_figure11"]) if note.text.startswith("Training.")]
    assert "`actor_rollout_ref.actor.ppo_epochs` 1 or 2 or 4" in text


@pytest.mark.parametrize("name", TABLES)
def test_a_papers_evaluations_say_where_their_settings_come_from(name):
    table = TABLES[name]
    evaluated = any("benchmark" in table.measure_of(row, column) for row in table.rows for column in table.columns)
    assert bool(table.origins) == (evaluated and name != "cpu_small")


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_every_field_worth_a_footnote_has_one_in_render(name):
    table = TABLES[name]
    text = rendered(name)
    worth = [*table.footnotes.values(), *(f"Not measured: {row.quoted}." for row in table.rows if row.quoted)]
    worth += [f"Evaluated with `{row.evaluation_options}`" for row in table.rows if row.evaluation_options]
    worth += ["`clipx bounds` measures them" for row in table.rows if row.measured_bounds]
    worth += ["The best of all validations" for column in table.columns if VALIDATION in column.measure]
    worth += ["The curves' last numbers" for column in table.columns if CURVE in column.measure]
    origins = [*table.origins.values(), *(one["origin"] for one in table.benchmarks.values() if "origin" in one)]
    worth += [why for kind, why in map(split_origin, origins) if kind != "paper"]
    assert [part for part in worth if part not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_no_footnote_is_without_its_mark_and_no_mark_without_its_footnote(name):
    table = TABLES[name]
    parts = {part.name for part in (*table.rows, *table.columns)}
    notes = footnotes_of(table)
    assert all({*note.rows, *note.columns} <= parts for note in notes)
    marked = [note for note in notes if note.rows or note.columns]
    text = rendered(name)
    for mark, note in zip(marks(), marked, strict=False):
        assert f"\n<sup>{mark}</sup> {note.text}" in text
        heads = text.count(f"<sup>{mark}</sup>") - 1
        assert heads == len({*note.rows}) + len({*note.columns})


def test_every_cause_is_in_some_table():
    silent = [cause.__name__ for cause in CAUSES if not any(list(cause(table)) for table in TABLES.values())]
    assert silent == []


def test_marks_go_on_after_z():
    first = [mark for mark, _ in zip(marks(), range(28), strict=False)]
    assert first[:2] + first[25:] == ["a", "b", "z", "aa", "ab"]
