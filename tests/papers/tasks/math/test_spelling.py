r"""Plain numbers, the guards' bounds and what is added to math-verify, where no verdict shows them.

Not covered: equality of two answers (test_verdicts.py).
"""

import itertools
from fractions import Fraction
from pathlib import Path

import pytest
import sympy
import yaml
from hypothesis import given
from hypothesis import strategies as st
from latex2sympy2_extended.antlr_parser import PSParser
from math_verify import LatexExtractionConfig, parse, verify
from math_verify import parser as math_verify_parser

from verl_clipx.papers.tasks.math.comparison import _differ, _parse_fast_mode_first
from verl_clipx.papers.tasks.math.guards import MAX_DEPTH, MAX_DIGITS, MAX_EXPONENT, MAX_LENGTH, is_safe
from verl_clipx.papers.tasks.math.spelling import MAX_NUMBER_LENGTH, canonical, clean, parse_number

LISTS = yaml.safe_load(Path(__file__).with_name("spelling.yaml").read_text(encoding="utf-8"))


def test_numbers():
    assert {text: str(parse_number(text)[0]) for text in LISTS["numbers"]} == LISTS["numbers"]
    assert [text for text in [*LISTS["no_numbers"], "1" * (MAX_NUMBER_LENGTH + 1)] if parse_number(text)] == []
    assert parse_number(r"50\%") == (Fraction(1, 2), 50)


@given(st.text(alphabet=r"\left({[$.,1e5 −π^}fracd]~:;", max_size=30))
def test_cleaning_is_total(text):
    cleaned = clean(text)
    assert cleaned == cleaned.strip()
    assert isinstance(canonical(cleaned), str)
    parse_number(cleaned)
    is_safe(cleaned)


MORE_BOMBS = ["\u0430", "1\u200b2", "1\n2", "1\x002", "(" * 1000 + "1" + ")" * 1000]  # the first is Cyrillic


def test_ordinary_answers_may_be_compared_and_bombs_may_not():
    assert [text for text in LISTS["safe"] if not is_safe(text)] == []
    assert [text for text in LISTS["bombs"] + MORE_BOMBS if is_safe(text)] == []


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
ANSWERS = LISTS["answers"]


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
