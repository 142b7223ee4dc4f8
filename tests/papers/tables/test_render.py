"""The three formats of a small table, letter by letter, with and without results, and what the commands refuse."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from tests.papers.tables.tables import small_table
from verl_clipx.cli import app
from verl_clipx.papers.tables.collect import hash_of_definition
from verl_clipx.papers.tables.definition import Footnote, load_table, table_names
from verl_clipx.papers.tables.render import marks, render

TABLE = small_table(
    """
    title: A & B
    source: Paper, Table 1
    metric: accuracy
    unit: percent
    digits: 1
    benchmarks: {b: {file: b.parquet, questions: 5, samples: 8}}
    columns:
      - {name: one, measure: {benchmark: b, metric: avg@8}}
      - {name: two_2, measure: {benchmark: b, metric: avg@8}}
    rows:
      - {name: x, preset: cpu/countdown_grpo_near, expected: [40.0, 50.0]}
      - {name: "y|z", preset: cpu/countdown_dapo_near}
    footnotes: [{text: "See `clipx eval`.", columns: [two_2]}]
    """
)


def run(seed, commit):
    return {"preset": "p/x", "seed": seed, "commit": commit, "versions": {"verl": "0.9.1", "vllm": None}}


RESULTS = {
    "curves": [],
    "table": "small",
    "definition": hash_of_definition(TABLE),
    "collected_with": {"commit": "abc", "versions": {}},
    "runs": [run(1, "abc"), run(2, None)],
    "cells": [
        {
            **{"row": "x", "column": "one", "expected": 40.0, "mean": 38.76, "low": 37.0, "high": 40.52},
            **{"interval": "seeds", "seeds": [1, 2], "difference": -1.24},
        },
        {"row": "x", "column": "two_2", "expected": 50.0},
        {
            **{"row": "y|z", "column": "one", "expected": None, "mean": 7.0, "low": None, "high": None},
            **{"interval": None, "seeds": [1], "difference": None},
        },
        {"row": "y|z", "column": "two_2", "expected": None},
    ],
    "missing": [],
    "refused": [],
}

BELOW = [
    "Paper, Table 1. Accuracy (%).",
    "Each cell: the paper's number; below it the measured one with its 95 % interval and the difference.",
    "95 % intervals of 1 cell: Student's, over 2 seeds.",
    "Runs: 2, seeds 1, 2.",
    "Versions: verl 0.9.1.",
    "Commit of 1 run: abc.",
    "Commit of 1 run: not recorded.",
    "Collected at commit abc.",
]

MARKDOWN = """### A & B

| | one | two_2<sup>a</sup> |
|---|---|---|
| x | 40.0<br>**38.8 [37.0, 40.5] (\u22121.2)** | 50.0 |
| y\\|z | **7.0** |  |

{below}

<sup>a</sup> See `clipx eval`.
""".format(below="\n\n".join(BELOW))

HTML = """<table>
<caption>A &amp; B</caption>
<thead>
<tr><th></th><th>one</th><th>two_2<sup>a</sup></th></tr>
</thead>
<tbody>
<tr><th>x</th><td>40.0<br><strong>38.8 [37.0, 40.5] (\u22121.2)</strong></td><td>50.0</td></tr>
<tr><th>y|z</th><td><strong>7.0</strong></td><td></td></tr>
</tbody>
</table>
{below}
<p><sup>a</sup> See <code>clipx eval</code>.</p>
""".format(below="\n".join(f"<p>{line.replace(chr(39), '&#x27;')}</p>" for line in BELOW))

LATEX = r"""\begin{table}
\caption{A \& B}
\begin{tabular}{lcc}
\hline
 & one & two\_2\textsuperscript{a} \\
\hline
x & \shortstack{40.0 \\ \textbf{38.8 [37.0, 40.5] ($-$1.2)}} & 50.0 \\
y|z & \textbf{7.0} &  \\
\hline
\end{tabular}
BELOW
\par\footnotesize \textsuperscript{a} See \texttt{clipx eval}.
\end{table}
""".replace("BELOW", "\n".join(f"\\par\\footnotesize {line}" for line in BELOW).replace("%", r"\%"))


@pytest.mark.parametrize("markup, expected", [("markdown", MARKDOWN), ("html", HTML), ("latex", LATEX)])
def test_golden(markup, expected):
    assert render(TABLE, RESULTS, markup) == expected


def test_without_results_no_cell_has_a_measured_number():
    text = render(TABLE, None, "markdown")
    assert "| x | 40.0 | 50.0 |\n| y\\|z |  |  |\n" in text
    assert "The paper's numbers; nothing has been measured." in text
    assert "**" not in text


def test_each_mark_has_its_footnote_and_those_about_the_whole_table_have_none():
    notes = [Footnote(f"Note {number}.", rows=("x",)) for number in range(27)] + [Footnote("The whole.")]
    text = render(replace(TABLE, footnotes=tuple(notes)), None, "markdown")
    assert "| x<sup>a</sup>" in text and "<sup>z</sup> Note 25." in text and "<sup>aa</sup> Note 26." in text
    assert "\nThe whole.\n" in text


@pytest.mark.parametrize("name", table_names())
def test_every_footnote_of_every_table_is_marked_where_it_belongs(name):
    table = load_table(name)
    text = render(table, None, "markdown")
    marked = [note for note in table.footnotes if note.rows or note.columns]
    assert all(note.text in text for note in table.footnotes)
    for mark, note in zip(marks(), marked, strict=False):
        assert f"\n<sup>{mark}</sup> {note.text}" in text
        assert text.count(f"<sup>{mark}</sup>") - 1 == len(note.rows) + len(note.columns)


def test_different_numbers_of_seeds_are_said_in_the_cells():
    cells = [dict(cell) for cell in RESULTS["cells"]]
    cells[2] |= {"low": 6.0, "high": 8.0, "interval": "questions"}
    text = render(TABLE, RESULTS | {"cells": cells}, "markdown")
    assert "**38.8 [37.0, 40.5] (\u22121.2), 2 seeds**" in text
    assert "**7.0 [6.0, 8.0], 1 seed**" in text
    assert "95 % intervals of 1 cell: Student's, over questions." in text


def test_a_model_that_is_only_evaluated_has_no_seed():
    cells = [dict(cell) for cell in RESULTS["cells"]]
    cells[2] |= {"low": 6.0, "high": 8.0, "interval": "questions", "seeds": []}
    text = render(TABLE, RESULTS | {"cells": cells}, "markdown")
    assert "**7.0 [6.0, 8.0]**" in text
    assert text.count("over questions.") == 1
    assert "0 seeds" not in text


def test_what_rounds_to_zero_has_no_minus():
    cells = [dict(RESULTS["cells"][0], mean=39.99, difference=-0.01), *RESULTS["cells"][1:]]
    assert "(+0.0)" in render(TABLE, RESULTS | {"cells": cells}, "markdown")


def test_results_of_another_table_and_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="belong to table other, not to small"):
        render(TABLE, RESULTS | {"table": "other"}, "markdown")
    with pytest.raises(ValueError, match="--format pdf: must be one of markdown, html, latex"):
        render(TABLE, RESULTS, "pdf")


def test_the_command_renders_a_papers_table_and_writes_files(tmp_path):
    out = tmp_path / "table.tex"
    done = CliRunner().invoke(
        app, ["table", "render", "dgpo_table4", "--runs", str(tmp_path), "--format", "latex", "--out", str(out)]
    )
    assert done.exit_code == 0
    assert "DGPO & 52.7 & 73.0 & 62.0 & 77.9 & 56.7 & 70.4" in out.read_text()


def test_the_command_refuses_results_of_an_older_definition(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps(RESULTS | {"table": "dgpo_table4"}))
    done = CliRunner().invoke(app, ["table", "render", "dgpo_table4", "--results", str(path)])
    assert done.exit_code == 1
    assert "the table's definition has changed since" in " ".join(done.output.split())
    path.write_text(json.dumps(RESULTS | {"table": "dgpo_table4", "definition": current_hash()}))
    assert CliRunner().invoke(app, ["table", "render", "dgpo_table4", "--results", str(path)]).exit_code == 0


def current_hash():
    return hash_of_definition(load_table("dgpo_table4"))


def test_the_command_names_the_tables_there_are():
    done = CliRunner().invoke(app, ["table", "render", "nothing"])
    assert done.exit_code == 1
    assert "table 'nothing' is unknown. There are acpo_figure2" in " ".join(done.output.split())
