"""Equality of answers: the hand-made pairs of answers.txt, and properties.

A block of answers.txt begins with `# equal` or `# unequal`, and with what the expected answers are: a share, computed,
a list. A line is `expected answer @ given answer @ given answer …`; list items stand between ` ; `, line ends are \\n.

Not covered: agreement with people's judgement on real completions.
"""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.papers.tasks.hitab.answers import (
    MAX_ANSWER_LENGTH,
    Number,
    answers_match,
    clean_latex,
    normalise_text,
    parse_number,
)


def pairs():
    for line in Path(__file__).with_name("answers.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            verdict, *kinds = line[2:].split()
            continue
        expected, *given = line.split(" @ ")
        for answer in given:
            yield answer.replace(r"\n", "\n"), tuple(expected.split(" ; ")), tuple(kinds), verdict == "equal"


@pytest.mark.parametrize(("answer", "expected", "kinds", "equal"), list(pairs()))
def test_pairs_by_hand(answer, expected, kinds, equal):
    assert len(expected) == 1 or "list" in kinds
    assert answers_match(answer, expected, ratio="share" in kinds, rounding="computed" in kinds) == equal


@pytest.mark.parametrize(("answer", "expected"), [("9" * 70, "9" * 70 + ".0"), ("1" + "0" * MAX_ANSWER_LENGTH,) * 2])
def test_what_is_too_long_is_not_equal(answer, expected):
    assert not answers_match(answer, [expected])


def test_a_rounded_number_keeps_a_decimal():
    assert answers_match("1234.6", ["1234.56"], rounding=True)
    assert not answers_match("1235", ["1234.56"], rounding=True)


def test_lists_are_paired_even_where_greed_would_fail():
    # 1.25 is within rounding of both 1.249 and 1.2504, 1.250 only of 1.2504.
    assert answers_match("1.25 | 1.250", ["1.2504", "1.249"], rounding=True)
    assert not answers_match("1.250 | 1.250", ["1.2504", "1.249"], rounding=True)


def test_no_expected_answer_matches_nothing():
    assert not answers_match("", [])


def test_parse_number_by_hand():
    assert parse_number("-$1,234.50 dollars") == Number(Decimal("-1234.50"), 2, 6, "dollars")
    assert parse_number("0.050%") == Number(Decimal("0.050"), 3, 2, "", percent=True)
    assert parse_number("1,2") is None
    assert parse_number("1e999") is None


def test_clean_latex_by_hand():
    assert clean_latex(r" $\textbf{1{,}234}\,\%$ ") == "1,234%"
    assert clean_latex("$5") == "$5"
    assert clean_latex(r"\(5\)") == "5"


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=3))
def test_a_number_equals_itself_in_other_clothes(value):
    for text in (f"{value}", f"{value:,}", f"{value}%", rf"\text{{{value}}}", f"{value} units"):
        assert answers_match(text, [str(value)])
    assert not answers_match(str(value + Decimal("0.001")), [str(value)])


@given(st.lists(st.text(alphabet="abcé", min_size=1), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_order_does_not_matter(expected, random):
    shuffled = random.sample(expected, len(expected))
    assert answers_match(" | ".join(shuffled), expected)
    assert not answers_match(" | ".join([*shuffled[1:], "x"]), expected)


@given(st.text(max_size=80), st.text(max_size=80), st.booleans(), st.booleans())
def test_total_and_symmetric_without_the_lenient_switches(first, second, ratio, rounding):
    assert answers_match(first, [second], ratio=ratio, rounding=rounding) in (True, False)
    assert answers_match(first, [second]) == answers_match(second, [first])


@given(st.text(max_size=40))
def test_normalising_twice_changes_nothing_but_nested_quotes_and_dots(text):
    once = normalise_text(text)
    assert len(normalise_text(once)) <= len(once)
