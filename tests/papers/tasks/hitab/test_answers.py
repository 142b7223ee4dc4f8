"""Equality of answers: hand-made pairs that must match and pairs that must not, and properties.

Not covered: agreement with people's judgement on real completions.
"""

from decimal import Decimal

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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("11.1", "11.1"),
        ("11.10", "11.1"),
        ("11.1%", "11.1"),
        (r"11.1\%", "11.1"),
        ("11.1 percentage points", "11.1"),
        ("139337", "139337"),
        ("139,337", "139337"),
        (r"139{,}337", "139337"),
        (r"139\,337", "139337"),
        ("$139,337", "139337"),
        (r"\$139,337", "139337"),
        ("$139337$", "139337"),
        ("€5.20", "5.2"),
        ("us$5.2", "5.2"),
        ("-2143", "-2143"),
        ("−2,143", "-2143"),
        ("-$5", "-5"),
        (".5", "0.5"),
        ("5.", "5"),
        ("1.5e3", "1500"),
        ("0.000001", "1e-06"),
        ("42 ships", "42"),
        ("42 km²", "42"),
        ("14.02", "14.02 nr"),
        (r"14.02\text{ nr}", "14.02 nr"),
        ("Transgender", "transgender"),
        (r"\text{15 to 19}", "15 to 19"),
        ("15 to 19.", "15 to 19"),
        ("“São Paulo”", "sao paulo"),
        ("women  in\ntrades", "women in trades"),
        ("separated, divorced or widowed", "separated, divorced or widowed"),
        (r"R\&D", "r&d"),
        ("１２", "12"),
    ],
)
def test_equal(answer, expected):
    assert answers_match(answer, [expected])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("5²", "52"),
        ("5₂", "52"),
        ("⑤②", "52"),
        ("11", "11.1"),
        ("11.1", "11.14"),  # read off the table, not computed: no rounding
        ("2143", "-2143"),
        ("155 billion", "154983"),
        ("5 billion", "5"),
        ("5", "5 million"),
        (r"5\text{ thousand}", "5"),
        ("$5bn", "5"),
        ("139.337", "139337"),
        ("13,9337", "139337"),
        ("1 2", "12"),
        ("0.876", "87.6"),
        ("87.6", "0.876"),
        ("87.6%", "0.876"),
        ("5 ships", "5 boats"),
        ("5 or 6", "5"),
        ("5 or six", "5"),
        ("5% or more", "5"),
        ("5 ships, not boats", "5"),
        ("5 ships but not boats", "5"),
        ("15 to 19", "15 to 20"),
        ("15", "15 to 19"),
        ("women", "men"),
        ("men and women", "men"),
        ("", "0"),
        (".", "0"),
        ("%", "0"),
        ("-", "0"),
        ("nan", "0"),
        ("inf", "1e99"),
        ("9" * 70, "9" * 70 + ".0"),
        ("1" + "0" * MAX_ANSWER_LENGTH, "1" + "0" * MAX_ANSWER_LENGTH),
    ],
)
def test_not_equal(answer, expected):
    assert not answers_match(answer, [expected])


@pytest.mark.parametrize(
    ("answer", "ratio", "rounding", "equal"),
    [
        ("0.876264", False, False, True),
        ("0.8763", False, False, False),
        ("0.8763", False, True, True),
        ("0.876", False, True, True),
        ("0.88", False, True, False),  # two significant digits
        ("1", False, True, False),
        ("0.875", False, True, False),
        ("87.6264", False, False, False),
        ("87.6264", True, False, True),
        ("87.6264%", True, False, True),
        ("87.6", True, False, False),
        ("87.6%", True, True, True),
        ("87.63", True, True, True),
        ("88%", True, True, False),
        ("87.5%", True, True, False),
        ("8763", True, True, False),
    ],
)
def test_computed_shares(answer, ratio, rounding, equal):
    assert answers_match(answer, ["0.876264"], ratio=ratio, rounding=rounding) == equal


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("0.5%", "0.5", False),  # a half is 50 %
        ("0.5 percent", "0.5", False),
        ("50%", "0.5", True),
        ("50", "0.5", True),
        ("0.5", "0.5", True),
        ("0.5%", "0.005", True),
        ("0.5", "0.005", True),
        ("0.005", "0.005", True),
        ("0.005%", "0.005", False),
        ("-0.5%", "-0.5", False),
        ("1%", "1", False),
        ("17.3%", "17.3", True),  # stands in the table in percent: no share is above 1
        ("250%", "2.5", True),
    ],
)
def test_a_percent_sign_means_hundredths_of_a_share(answer, expected, equal):
    assert answers_match(answer, [expected], ratio=True) == equal


@pytest.mark.parametrize(
    ("answer", "expected", "equal"),
    [
        ("88 | 89", ["88", "89"], True),
        ("89 | 88", ["88", "89"], True),
        ("88.0; 89.0%", ["88", "89"], True),
        ("88, 89", ["88", "89"], True),
        ("88 and 89", ["88", "89"], True),
        ("57, 31.2, and 11.8", ["57", "31.2", "11.8"], True),
        ("386,200, 90,400", ["386200", "90400"], True),
        ("japanese\nenglish", ["english", "japanese"], True),
        (r"\text{men} | \text{women}", ["men", "women"], True),
        ("1,000 and above | between 1 and 4", ["between 1 and 4", "1,000 and above"], True),
        ("88 | 88", ["88", "89"], False),
        ("88", ["88", "89"], False),
        ("88 | 89 | 90", ["88", "89"], False),
        ("88 | 88", ["88", "88"], True),
        ("88 | 89", ["88"], False),
        ("a | b", ["a | b"], True),
    ],
)
def test_lists(answer, expected, equal):
    assert answers_match(answer, expected) == equal


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
