r"""Plain numbers and the guards' bounds, where no verdict shows them.

Not covered: equality of two answers (test_verdicts.py).
"""

from fractions import Fraction
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st
from latex2sympy2_extended.antlr_parser import PSParser

from verl_clipx.papers.tasks.math.comparison import _parse_fast_mode_first
from verl_clipx.papers.tasks.math.guards import MAX_DEPTH, MAX_LENGTH, is_safe
from verl_clipx.papers.tasks.math.spelling import MAX_NUMBER_LENGTH, canonical, clean, parse_number

LISTS = yaml.safe_load(Path(__file__).with_name("spelling.yaml").read_text(encoding="utf-8"))
BOUNDS = [
    ("x" * MAX_LENGTH, "x" * (MAX_LENGTH + 1)),
    ("2^{9999}", "2^{10000}"),
    ("9999^2", "9999!"),
    *(("(" * (MAX_DEPTH - 1) + bracket, "(" * MAX_DEPTH + bracket) for bracket in "([{"),
]


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


def test_the_parser_tries_its_fast_mode_first():
    assert PSParser.math is _parse_fast_mode_first


def test_ordinary_answers_may_be_compared_and_bombs_may_not():
    # The first is Cyrillic.
    bombs = [*LISTS["bombs"], "\u0430", "1\u200b2", "1\n2", "1\x002", "(" * 1000 + "1" + ")" * 1000]
    assert [text for text in [*LISTS["safe"], *(most for most, _ in BOUNDS)] if not is_safe(text)] == []
    assert [text for text in [*bombs, *(too_much for _, too_much in BOUNDS)] if is_safe(text)] == []
