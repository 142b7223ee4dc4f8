"""Which printed numbers can come out of the estimator, questions and samples that their table states, whether gains
follow from their cells, and that the definitions' footnotes say what was found. Which estimator a paper took follows
from that for DGPO's pass@k.

Not covered: means over benchmarks, which test_definition.py computes from the printed numbers.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import pytest

from verl_clipx.papers.tables.definition import BENCHMARK, GAIN_OF, MEAN_OF, VALIDATION, Table, load_table, table_names

OFF_BY_A_DIGIT = 0.1
"""Percentage points that a printed gain may differ from the recomputed one: one in its last digit."""


class Printed(NamedTuple):
    """A number that a paper prints for one benchmark, as printed and as a fraction of 1.

    `is_reachable`: some counts of right answers give it, rounded; `is_cut_off`: some give it without further digits.
    """

    column: str
    text: str
    share: Fraction
    metric: str
    questions: int
    is_reachable: bool
    is_cut_off: bool


def printed_numbers(table: Table) -> Iterator[Printed]:
    """Every printed number of one benchmark that this project could measure."""
    of_one = 100 if table.unit == "percent" else 1
    digit = Fraction(1, 10**table.digits * of_one)
    for row, column in ((row, column) for row in table.rows for column in table.columns):
        number, how = table.expected(row, column), table.measure_of(row, column)
        benchmark = how.get(BENCHMARK) or how.get(VALIDATION)
        if row.quoted or number is None or not isinstance(benchmark, str):
            continue
        settings = {"samples": how.get("samples"), **table.benchmarks[benchmark]}
        checkpoints = 3 if settings.get("protocol") == "mean-of-last-three" and not row.model else 1
        share, metric = Fraction(str(number)) / of_one, how.get("metric") or f"avg@{settings['samples']}"
        reach = reached(share, digit, metric, settings["samples"], settings["questions"], checkpoints)
        yield Printed(column.name, f"{number:.{table.digits}f}", share, metric, settings["questions"], *reach)


def reached(share: Fraction, digit: Fraction, metric: str, samples: int, questions: int, checkpoints: int):
    """Whether some counts of right answers give a share, rounded to a digit, and cut off after it."""
    name, draws = metric.split("@")
    if name == "best":
        return _best_reaches(int(draws), samples, questions, share, digit / 2), False
    # pass@k of k samples is 0 or 1 for every question.
    parts = questions * checkpoints * (1 if name == "pass" else samples)
    nearest, above = Fraction(round(share * parts), parts), Fraction(-(-share * parts // 1), parts)
    return abs(nearest - share) <= digit / 2, above - share < digit


def _best_reaches(draws: int, samples: int, questions: int, share: Fraction, tolerance: Fraction) -> bool:
    """Whether a choice of right samples a question gives the share: all right in as few questions as reach it, then
    the largest losses that still fit. Exact where it finds one."""
    total = share * questions
    solved = -(-total.numerator // total.denominator)
    if solved > questions:
        return False
    excess = solved - total
    for right in range(1, samples):
        loss = Fraction(samples - right, samples) ** draws
        times = min(solved, excess // loss)
        excess, solved = excess - times * loss, solved - times
    return excess <= tolerance * questions


# How many different numbers of a table cannot come out of what it states.
IN_DOUBT = {"acpo_table1a": 5, "acpo_table2": 1, "acpo_table3": 6, "ar_lopti_table1": 8}
PAPER_TABLES = {name: load_table(name) for name in table_names() if name not in ("cpu_small", "reversal")}


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_footnotes_say_which_numbers_are_in_doubt_and_which_are_cut_off(name):
    table = PAPER_TABLES[name]
    doubtful = [number for number in printed_numbers(table) if not number.is_reachable]
    said = {}
    for note in (note for note in table.footnotes if re.match(r"Of [\d,]+ questions", note.text)):
        listed = note.text.split(", ", 1)[1]
        cut = re.findall(r"\d+\.\d+", listed.split(" cut off")[0]) if "cut off" in listed else []
        said |= {(column, text): text in cut for column in note.columns for text in re.findall(r"\d+\.\d+", listed)}
    assert {(number.column, number.text) for number in doubtful} <= {*said}
    assert {number.text: number.is_cut_off for number in doubtful} == {text: cut for (_, text), cut in said.items()}
    # The analysis finds some: otherwise the footnotes would say nothing.
    assert len({number.text for number in doubtful}) == IN_DOUBT.get(name, 0)


def test_gains_that_do_not_follow_from_their_cells_are_these_five_and_have_their_footnotes():
    odd, noted = {}, {}
    for table in PAPER_TABLES.values():
        noted |= {note.rows: note.text for note in table.footnotes if note.text.startswith("The paper prints a gain")}
        for row in (row for row in table.rows if row.baseline):
            for column in (one for one in table.columns if GAIN_OF in one.measure and table.expected(row, one)):
                average, printed = table.column(column.measure[GAIN_OF]), table.expected(row, column)
                ours, base = row, table.row(row.baseline)
                of = [
                    sum(table.expected(one, table.column(name)) for name in average.measure[MEAN_OF])
                    for one in (ours, base)
                ]
                rounded = [table.expected(one, average) for one in (ours, base)]
                # The gain of the cells is the one that `collect` computes.
                if abs(100 * (of[0] / of[1] - 1) - printed) > OFF_BY_A_DIGIT:
                    gains = [100 * (one / other - 1) for one, other in (of, rounded)]
                    odd[(row.name,)] = [
                        printed,
                        *(round(gain, 3) for gain in gains if abs(gain - printed) > OFF_BY_A_DIGIT),
                    ]
    # By hand: 3B Reweight 2.63 / 1.95, Lopti 2.69 / 1.95; 7B Reweight 4.47 / 3.85, Lopti 4.29 / 3.85, both 4.54 / 3.85;
    # and Lopti's averages 0.86 / 0.77.
    assert odd == {
        ("3B + GRPO + Reweight",): [35.9, 34.872],
        ("3B + GRPO + Lopti",): [38.5, 37.949],
        ("7B + GRPO + Reweight",): [15.6, 16.104],
        ("7B + GRPO + Lopti",): [9.1, 11.429, 11.688],
        ("7B + GRPO + Reweight + Lopti",): [18.2, 17.922],
    }
    assert {rows: [*map(float, re.findall(r"(\d+\.\d+) %", text))] for rows, text in noted.items()} == odd
