"""Each number that a paper prints for a benchmark can come out of the estimator, questions and samples that the table
states, or a footnote names it. Which estimator a paper took follows from that for DGPO's pass@k.

Not covered: means over benchmarks and gains, which test_table_definitions.py computes from the printed numbers.
"""

from fractions import Fraction

import pytest

from verl_clipx.reproduction.tables_definition import BENCHMARK, VALIDATION, load_table, table_names

PAPER_TABLES = {name: load_table(name) for name in table_names() if name != "cpu_small"}


def printed_cells(table):
    """Every printed number of one benchmark: row, column, metric, settings, number as a fraction of 1."""
    for row in table.rows:
        for column in table.columns:
            printed, how = table.expected(row, column), table.measure_of(row, column)
            benchmark = how.get(BENCHMARK) or how.get(VALIDATION)
            if row.quoted or printed is None or not isinstance(benchmark, str):
                continue
            settings = {"samples": how.get("samples"), **table.benchmarks[benchmark]}
            metric = how.get("metric") or f"avg@{settings['samples']}"
            share = Fraction(str(printed)) / (100 if table.unit == "percent" else 1)
            yield row, column, metric, settings, share


def half_a_digit(table) -> Fraction:
    """What rounding changes at most, as a fraction of 1."""
    return Fraction(1, 2 * 10**table.digits * (100 if table.unit == "percent" else 1))


def is_reachable(metric: str, settings: dict, checkpoints: int, share: Fraction, tolerance: Fraction) -> bool:
    name, draws = metric.split("@")
    samples, questions = settings["samples"], settings["questions"]
    if name == "best":
        return best_reaches(int(draws), samples, questions, share, tolerance)
    if name == "pass":
        assert int(draws) == samples, "only of all samples is every question's value 0 or 1"
        parts = questions * checkpoints
    else:
        parts = questions * checkpoints * samples
    return abs(Fraction(round(share * parts), parts) - share) <= tolerance


def best_reaches(draws: int, samples: int, questions: int, share: Fraction, tolerance: Fraction) -> bool:
    """Whether a choice of right samples a question gives the share: all right in as few questions as reach it, then
    the largest losses that still fit. Exact where it finds one."""
    total = share * questions
    solved = -(-total.numerator // total.denominator)
    if solved > questions:
        return False
    excess = solved - total
    losses = [Fraction(samples - right, samples) ** draws for right in range(1, samples)]
    for _ in range(solved):
        excess -= max((loss for loss in losses if loss <= excess), default=0)
    return excess <= tolerance * questions


def doubtful_cells(table):
    """Row, column and text of each printed number that cannot be reached."""
    for row, column, metric, settings, share in printed_cells(table):
        checkpoints = 3 if settings.get("protocol") == "mean-of-last-three" and not row.model else 1
        if not is_reachable(metric, settings, checkpoints, share, half_a_digit(table)):
            yield row, column, f"{table.expected(row, column):.{table.digits}f}"


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_printed_numbers_can_be_reached_or_a_footnote_names_them(name):
    table = PAPER_TABLES[name]
    for row, column, text in doubtful_cells(table):
        notes = " ".join(table.footnotes[mark] for mark in (*row.notes, *column.notes))
        assert text in notes, (row.name, column.name, text)


def test_numbers_that_are_in_doubt_are_these():
    doubtful = {name: {text for *_, text in doubtful_cells(table)} for name, table in PAPER_TABLES.items()}
    olympiad = {"27.64", "36.50", "37.00", "36.60", "38.23", "40.81", "38.63"}
    assert {name: numbers for name, numbers in doubtful.items() if numbers} == {
        "acpo_table1a": {"6.90", "74.38", "55.12", "74.25", "75.74"},
        "acpo_table2": {"13.32"},
        "acpo_table3": {"74.38", "74.65", "72.55", "74.16", "75.86", "75.74"},
        "ar_lopti_table1": olympiad | {"27.69"},
    }


def test_hitab_has_300_questions_and_not_all_of_the_development_split():
    for _, _, _, settings, share in printed_cells(PAPER_TABLES["acpo_table1b"]):
        assert settings["questions"] == 300
        assert abs(Fraction(round(share * 1200), 1200) - share) <= Fraction(1, 20_000)


def test_dgpo_draws_with_replacement():
    table = PAPER_TABLES["dgpo_table3"], PAPER_TABLES["dgpo_table13"]
    on_aime = [
        share
        for one in table
        for _, column, metric, _, share in printed_cells(one)
        if metric == "best@32" and column.name.startswith("AIME")
    ]
    multiples = [share for share in on_aime if abs(Fraction(round(share * 30), 30) - share) <= Fraction(1, 2000)]
    assert len(on_aime) == 28 and len(multiples) == 1
    unbiased = {"samples": 32, "questions": 30}
    assert not is_reachable("pass@32", unbiased, 1, Fraction("0.718"), Fraction(1, 2000))


def test_best_reaches_by_hand():
    # One question of two samples: two draws find a right one with probability 0, 3/4 or 1.
    near = Fraction(1, 1000)
    assert best_reaches(2, 2, 1, Fraction(3, 4), near) and best_reaches(2, 2, 1, Fraction(1), near)
    assert not best_reaches(2, 2, 1, Fraction(1, 2), near)
