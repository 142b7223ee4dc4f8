r"""Plain numbers and the guards' bounds, where no verdict shows them.

Not covered: equality of two answers (test_verdicts.py).
"""

from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from latex2sympy2_extended.antlr_parser import PSParser

from verl_clipx.papers.tasks.math.comparison import _parse_fast_mode_first
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


def test_the_parser_tries_its_fast_mode_first():
    assert PSParser.math is _parse_fast_mode_first


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
