r"""Plain numbers, the guards' bounds and what is added to math-verify, where no verdict shows them.

Not covered: equality of two answers (test_verdicts.py).
"""

import itertools
import re
from fractions import Fraction

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import LatexExtractionConfig, parse, verify
from math_verify import parser as math_verify_parser

from verl_clipx.papers.tasks.math.comparison import _differ, _parse_fast_mode_first
from verl_clipx.papers.tasks.math.guards import MAX_DEPTH, MAX_DIGITS, MAX_EXPONENT, MAX_LENGTH, is_safe
from verl_clipx.papers.tasks.math.spelling import MAX_NUMBER_LENGTH, canonical, clean, parse_number

NUMBERS = {
    "073": 73,
    "+5": 5,
    ".5": Fraction(1, 2),
    "1,234,567.5": Fraction(2469135, 2),
    "1{,}234": 1234,
    "-3 / 4": Fraction(-3, 4),
    r"\frac {3} {4}": Fraction(3, 4),
    r"-\frac{-3}{4}": Fraction(3, 4),
    r"\dfrac12": Fraction(1, 2),
    r"\frac1{23}": Fraction(1, 23),
    r"\tfrac{11}2": Fraction(11, 2),
    r"\frac{3}{-4}": Fraction(-3, 4),
    r"1\frac{1}{2}": Fraction(3, 2),
    "12.5 %": Fraction(1, 8),
    r"2.5\times10^{-2}": Fraction(1, 40),
    r"7 \times 10^3": 7000,
    r"-10^{2}": -100,
}
NO_NUMBERS = ["", "x", "1 2", "1,23", "1/0", r"\frac{1}{0}", r"1\frac{3}{2}", "1.2.3", "٣", "５", "²", "0x10", "1_000"]
NO_NUMBERS += [
    r"\frac123",
    "inf",
    "nan",
    "--1",
    "5 cm",
    r"7\times 10^{9999}",
    r"7\times 10^33",
    "1" * (MAX_NUMBER_LENGTH + 1),
]


def test_numbers():
    assert {text: parse_number(text)[0] for text in NUMBERS} == NUMBERS
    assert [text for text in NO_NUMBERS if parse_number(text)] == []
    assert parse_number(r"50\%") == (Fraction(1, 2), 50)


@given(st.text(alphabet=r"\left({[$.,1e5 −π^}fracd]~:;", max_size=30))
def test_cleaning_is_total(text):
    cleaned = clean(text)
    assert cleaned == cleaned.strip()
    assert isinstance(canonical(cleaned), str)
    parse_number(cleaned)
    is_safe(cleaned)


SAFE = r"""
\frac{\sqrt{3}}{2}+1 @ \frac{2^{2025}-1}{3^{2024}} @ (x+1)^{999}-(x+2)^{998} @ (-\infty,2] @ 10! @ 6:00 @ 90^{\circ}
\frac{(2n)!}{n!(n+1)!} @ \binom{100}{50} @ e^{2\pi i/3} @ 10^{-19} @ 2^{100}(1+x)^{200}
"""
BOMBS = r"""
9^9^9 @ 9^{9^{9}} @ 9^{(9^9)} @ 9**9**9 @ ((9^{99})^{99})^{99} @ {{9^{99}}^{99}}^{99} @ 9^{99}^{99}^{99} @ 9 ^ 99999
9^{-99999} @ 9^{x+99999} @ 9^{\frac{99999}{1}} @ 9!! @ (9!)! @ ((9!)!)! @ (10^9)! @ 99999! @ (123456)!
\binom{10000}{5000} @ \Gamma(100000) @ \sum_{n=1}^{10^9} n @ \prod_{k=1}^{99999}k
\int_0^1 x dx @ \iiint x @ \lim_{x\to 0}x
\input{/etc/passwd} @ \def\a{\a\a}\a @ { @ }{ @ \frac{1}{2 @ x^} @ ５ @ 是
"""
MORE_BOMBS = ["\u0430", "1\u200b2", "1\n2", "1\x002", "(" * 1000 + "1" + ")" * 1000]  # the first is Cyrillic


def test_ordinary_answers_may_be_compared_and_bombs_may_not():
    assert [text for text in re.split(" @ |\n", SAFE.strip()) if not is_safe(text)] == []
    assert [text for text in re.split(" @ |\n", BOMBS.strip()) + MORE_BOMBS if is_safe(text)] == []


@pytest.mark.parametrize(
    ("most", "too_much"),
    [
        ("x" * MAX_LENGTH, "x" * (MAX_LENGTH + 1)),
        ("1" * MAX_DIGITS, "1" * (MAX_DIGITS + 1)),
        (f"2^{{{MAX_EXPONENT}}}", f"2^{{{MAX_EXPONENT + 1}}}"),
        ("(2^{100})^{100}", "(2^{100})^{101}"),
        ("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH, "2^{" + "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH + "}"),
    ],
)
def test_bounds_are_sharp(most, too_much):
    assert is_safe(most) and not is_safe(too_much)


BOXED = [LatexExtractionConfig(boxed_match_priority=0)]
ANSWERS = re.split(
    " @ |\n",
    r"""5 @ -0.25 @ \frac{3}{4} @ \frac{\sqrt{2}}{2} @ \frac{1}{\sqrt 2} @ 2+\sqrt{3} @ \sqrt{3}+2 @ 3\pi @ 3.14159265
\pi @ 2^{10} @ 1024
x @ x^2-1 @ (x-1)(x+1) @ x^2-y^2 @ \sin^2 x+\cos^2 x @ 1 @ n! @ 6-5i @ e^{2} @ \log_2 8 @ 3 @ \infty
even @ \text{even} @ x=5 @ y=2x+1 @ x<3 @ 1,2 @ 2,1 @ (1,2) @ [1,2) @ \{1,2\} @ \begin{pmatrix}1\\2\end{pmatrix}
75^\circ
16\% @ 16 @ f(x)+1 @ \binom{4}{2} @ 6 @ 1\frac{4}{5} @ (-\infty,2]\cup[3,\infty)""",
)


def parsed():
    math_verify_parser.parse_latex_cached.cache_clear()
    math_verify_parser.extract_latex.cache_clear()
    return {answer: parse(rf"\boxed{{{answer}}}", BOXED, parsing_timeout=None) for answer in ANSWERS}


def test_the_fast_mode_finds_the_same_expressions(monkeypatch):
    def trees():
        return {
            answer: [str(part) if isinstance(part, str) else sympy.srepr(part) for part in parts]
            for answer, parts in parsed().items()
        }

    fast = trees()
    (slow,) = _parse_fast_mode_first.__defaults__
    assert PSParser.math is _parse_fast_mode_first is not slow
    monkeypatch.setattr(PSParser, "math", slow)
    assert trees() == fast
    assert sum(map(len, fast.values())) > len(ANSWERS)  # most were parsed, none is empty by mistake


@pytest.mark.slow
def test_a_difference_in_value_never_contradicts_math_verify():
    expressions = parsed()
    pairs = list(itertools.product(ANSWERS, repeat=2))[::5]
    refuted = [pair for pair in pairs if _differ(*(expressions[answer][0] for answer in pair))]
    assert [pair for pair in refuted if verify(*map(expressions.get, pair), timeout_seconds=None)] == []
    assert len(refuted) > 60


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        ("x^2+1", "x^2-1", True),
        ("a+b", "b+a", False),
        (r"\sqrt{2}", "1.414", False),  # too close to call here
        ("10^{-9}", "2 \\cdot 10^{-9}", True),  # math-verify rounds both to 0
        (r"\sqrt{2}^2-2", "0", False),  # what is left of 0 by rounding is no number
        ("x+1", "x=1", False),  # a relation has no value
        (r"16\%", "16", False),
        ("f(x)+1", "f(x)+2", False),  # unknown function
    ],
)
def test_values_that_differ(one, other, differ):
    assert _differ(*(parse(rf"\boxed{{{text}}}", BOXED, parsing_timeout=None)[0] for text in (one, other))) is differ
