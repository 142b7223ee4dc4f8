r"""Cleaning and plain numbers: expected values by hand, and that cleaning twice changes nothing.

Not covered: equality of two answers (test_equality.py).
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.papers.tasks.math.normalisation import MAX_NUMBER_LENGTH, canonical, clean, parse_number


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" $5$. ", "5"),
        (r"\$5", r"\$5"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"( 3, \frac{\pi}{2} )"),
        (r"\leftarrow", r"\leftarrow"),
        (r"\left\{1\right\}", r"\{1\}"),
        (r"(0,1\right", r"(0,1\right"),  # a size without a bracket stays
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{23}", r"\frac{1}{23}"),
        (r"\dfrac{a}2", r"\frac{a}{2}"),
        (r"\frac123", r"\frac123"),  # 1/23 or 3/2
        (r"0.\overline{3}", r"\frac{1}{3}"),
        (r"1.2\bar{45}", r"\frac{137}{110}"),
        (r"0.\dot{9}", r"\frac{1}{1}"),
        (r"\overline{AB}", r"\overline{AB}"),
        (r"\varnothing", r"\emptyset"),
        ("−3", "-3"),
        ("2×3", r"2\times 3"),
        ("4.5e33", r"4.5\times 10^{33}"),
        ("3E-05", r"3\times 10^{-5}"),
        ("2e", "2e"),
        ("x2e5", "x2e5"),
        ("５", "５"),  # a look-alike stays one
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("one", "other"),
    [("p - q", "p-q"), (r"\text{even}", "even"), (r"\mathrm{ cm }", "cm"), ("( 1 , 2 )", "(1,2)")],
)
def test_one_canonical_spelling(one, other):
    assert canonical(clean(one)) == canonical(clean(other))


@pytest.mark.parametrize(("one", "other"), [("1 2", "12"), (r"\pi r", r"\pir"), ("a b", "ab"), ("x", "X")])
def test_a_space_that_separates_is_kept(one, other):
    assert canonical(one) != canonical(other)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("073", 73),
        ("-5", -5),
        ("+5", 5),
        ("2.50", Fraction(5, 2)),
        (".5", Fraction(1, 2)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1{,}234", 1234),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"\frac {3} {4}", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)),
        (r"-\frac{-3}{4}", Fraction(3, 4)),
        (r"50\%", Fraction(1, 2)),
        ("12.5 %", Fraction(1, 8)),
        (r"7\times 10^{3}", 7000),
        (r"7 \times 10^3", 7000),
        (r"2.5\times10^{-2}", Fraction(1, 40)),
    ],
)
def test_numbers(text, value):
    assert parse_number(text).value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "1 2",
        "1,23",
        "1,2",
        "1/0",
        r"\frac{1}{0}",
        "1.2.3",
        "٣",
        "５",
        "²",
        "0x10",
        "1_000",
        "inf",
        "nan",
        "--1",
        "5 cm",
        r"7\times 10^{9999}",
        r"7\times 10^33",
        "1" * (MAX_NUMBER_LENGTH + 1),
    ],
)
def test_not_numbers(text):
    assert parse_number(text) is None


def test_only_a_literal_integer_has_one_reading():
    assert parse_number("-12").literal_integer
    assert not any(parse_number(text).literal_integer for text in ("1,234", "12.0", r"12\%", "12/1", r"1\times 10^2"))


@given(st.text(alphabet=r"\left({[$.,1e5 −π^}fracd]~:;", max_size=30))
def test_cleaning_is_total(text):
    cleaned = clean(text)
    assert cleaned == cleaned.strip()
    assert isinstance(canonical(cleaned), str)
    number = parse_number(cleaned)
    assert number is None or isinstance(number.value, Fraction)


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_reads_back(value):
    assert parse_number(str(value)).value == value
    sign, absolute = "-" if value < 0 else "", abs(value)
    assert parse_number(rf"{sign}\frac{{{absolute.numerator}}}{{{absolute.denominator}}}").value == value
