"""Which printed numbers can come out of the estimator, questions and samples that their table states, and which cannot.
Which estimator a paper took follows from that for DGPO's pass@k.

Not covered: means over benchmarks, which test_definition.py computes from the printed numbers.
"""

from fractions import Fraction

import pytest

from tests.papers.tables.reachability import Printed, other_gains, out_of_reach, printed_numbers
from tests.papers.tables.tables import small_table
from verl_clipx.papers.tables.definition import GAIN_OF, load_table, table_names
from verl_clipx.papers.tables.footnotes import Footnote, by_hand

PAPER_TABLES = {name: load_table(name) for name in table_names() if name not in ("cpu_small", "reversal")}


def test_numbers_that_are_in_doubt_are_these():
    doubtful = {
        name: {number.text for number in printed_numbers(table) if not number.is_reachable}
        for name, table in PAPER_TABLES.items()
    }
    olympiad = {"27.64", "36.50", "37.00", "36.60", "38.23", "40.81", "38.63"}
    assert {name: numbers for name, numbers in doubtful.items() if numbers} == {
        "acpo_table1a": {"6.90", "74.38", "55.12", "74.25", "75.74"},
        "acpo_table2": {"13.32"},
        "acpo_table3": {"74.38", "74.65", "72.55", "74.16", "75.86", "75.74"},
        "ar_lopti_table1": olympiad | {"27.69"},
    }


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_a_definition_says_in_its_footnotes_what_is_in_doubt_of_its_numbers(name):
    table = PAPER_TABLES[name]
    written = {table.footnotes[key] for key in table.footnotes if key.startswith(("reach", "gain"))}
    found = [*out_of_reach(table), *other_gains(table)]
    assert {(note.text, *map(frozenset, (note.rows, note.columns))) for note in found} == {
        (note.text, *map(frozenset, (note.rows, note.columns))) for note in by_hand(table) if note.text in written
    }


def test_hitab_has_300_questions_and_not_all_of_the_development_split():
    for number in printed_numbers(PAPER_TABLES["acpo_table1b"]):
        assert number.questions == 300
        assert abs(Fraction(round(number.share * 1200), 1200) - number.share) <= Fraction(1, 20_000)


def test_dgpo_draws_with_replacement():
    table = PAPER_TABLES["dgpo_table3"], PAPER_TABLES["dgpo_table13"]
    on_aime = [
        number.share
        for one in table
        for number in printed_numbers(one)
        if number.metric == "best@32" and number.column.name.startswith("AIME")
    ]
    multiples = [share for share in on_aime if abs(Fraction(round(share * 30), 30) - share) <= Fraction(1, 2000)]
    assert len(on_aime) == 28 and len(multiples) == 1
    assert not printed("71.8", Fraction(1, 1000), metric="pass@32", samples=32, questions=30).is_reachable


def printed(text: str, digit: Fraction, **how) -> Printed:
    """A number in percent."""
    return Printed(None, None, text, Fraction(text) / 100, digit, **{"checkpoints": 1, **how})


@pytest.mark.parametrize(
    "metric, text, reachable, cut_off",
    [
        # One question of two samples: two draws find a right one with probability 0, 3/4 or 1.
        ("best@2", "75", True, False),
        ("best@2", "100", True, False),
        ("best@2", "50", False, False),
        # Their mean is 0, 1/2 or 1, and any of both is right for none or for the one question.
        ("avg@2", "50", True, True),
        ("avg@2", "49", False, False),
        ("avg@2", "75", False, False),
        ("pass@2", "50", False, False),
    ],
)
def test_reach_by_hand(metric, text, reachable, cut_off):
    number = printed(text, Fraction(1, 100), metric=metric, samples=2, questions=1)
    assert (number.is_reachable, number.is_cut_off) == (reachable, cut_off)


def test_checkpoints_make_finer_parts_and_cutting_off_is_downwards():
    third = {"metric": "avg@1", "samples": 1, "questions": 1}
    assert printed("33.3", Fraction(1, 1000), **third, checkpoints=3).is_reachable
    assert not printed("33.3", Fraction(1, 1000), **third, checkpoints=2).is_reachable
    assert not printed("66.6", Fraction(1, 1000), **third, checkpoints=3).is_reachable
    assert printed("66.6", Fraction(1, 1000), **third, checkpoints=3).is_cut_off
    assert not printed("66.8", Fraction(1, 1000), **third, checkpoints=3).is_cut_off


def test_numbers_that_are_cut_off_are_told_from_those_out_of_reach():
    # Of three questions with one sample each, 66.6 and 33.3 % are 2/3 cut off and 1/3 rounded; 50 % is neither.
    rows = [
        {"name": str(number), "preset": "cpu/countdown_grpo_near", "expected": [number]}
        for number in (66.6, 33.3, 50.0)
    ]
    table = small_table(
        """
        digits: 1
        benchmarks: {b: {file: b.parquet, questions: 3, samples: 1}}
        columns: [{name: B, measure: {benchmark: b, metric: avg@1}}]
        """,
        rows=rows,
    )
    text = "Of 3 questions, 66.6 is cut off, not rounded; 50.0 cannot be reached."
    assert list(out_of_reach(table)) == [Footnote(text, columns=("B",))]


def test_gains_that_do_not_follow_from_their_cells_are_these_five_of_figure_4():
    odd = {(name, note.rows): note.text for name, table in PAPER_TABLES.items() for note in other_gains(table)}
    # By hand: 3B Reweight 2.63 / 1.95, Lopti 2.69 / 1.95; 7B Reweight 4.47 / 3.85, Lopti 4.29 / 3.85, both 4.54 / 3.85;
    # and Lopti's averages 0.86 / 0.77.
    assert odd == {
        ("ar_lopti_figure4", (row,)): f"The paper prints a gain of {printed} %. Recomputed: {recomputed}."
        for row, printed, recomputed in (
            ("3B + GRPO + Reweight", 35.9, "34.872 % from the cells"),
            ("3B + GRPO + Lopti", 38.5, "37.949 % from the cells"),
            ("7B + GRPO + Reweight", 15.6, "16.104 % from the cells"),
            ("7B + GRPO + Lopti", 9.1, "11.429 % from the cells and 11.688 % from the rounded averages"),
            ("7B + GRPO + Reweight + Lopti", 18.2, "17.922 % from the cells"),
        )
    }
    gains = [name for name, table in PAPER_TABLES.items() if any(GAIN_OF in column.measure for column in table.columns)]
    assert gains == ["ar_lopti_figure4", "ar_lopti_table7"]
