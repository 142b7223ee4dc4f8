"""What the comparison process adds to math-verify: a faster parse and a refutation by value must not change verdicts.

Not covered: the process itself (test_pool.py).
"""

import itertools

import pytest
import sympy
from math_verify import LatexExtractionConfig, parse, verify
from math_verify import parser as math_verify_parser

from verl_clipx.papers.tasks.math.worker import _differ_numerically, _parse_in_two_stages

BOXED = [LatexExtractionConfig(boxed_match_priority=0)]

ANSWERS = [
    "5",
    "-0.25",
    r"\frac{3}{4}",
    r"\frac{\sqrt{2}}{2}",
    r"\frac{1}{\sqrt 2}",
    r"2+\sqrt{3}",
    r"\sqrt{3}+2",
    r"3\pi",
    "3.14159265",
    r"\pi",
    "2^{10}",
    "1024",
    "x",
    "x^2-1",
    "(x-1)(x+1)",
    "x^2-y^2",
    r"\sin^2 x+\cos^2 x",
    "1",
    "n!",
    "6-5i",
    "e^{2}",
    r"\log_2 8",
    "3",
    r"\infty",
    r"\text{even}",
    "even",
    "x=5",
    "y=2x+1",
    "x<3",
    "1,2",
    "2,1",
    "(1,2)",
    "[1,2)",
    r"\{1,2\}",
    r"\begin{pmatrix}1\\2\end{pmatrix}",
    r"75^\circ",
    r"16\%",
    "16",
    r"f(x)+1",
    r"\binom{4}{2}",
    "6",
    r"1\frac{4}{5}",
    r"(-\infty,2]\cup[3,\infty)",
]


def parsed():
    math_verify_parser.parse_latex_cached.cache_clear()
    math_verify_parser.extract_latex.cache_clear()
    return {answer: parse(rf"\boxed{{{answer}}}", BOXED, parsing_timeout=None) for answer in ANSWERS}


def test_two_stages_find_the_same_expressions(monkeypatch):
    from latex2sympy2_extended.antlr_parser import PSParser

    def trees():
        return {
            answer: [sympy.srepr(part) if isinstance(part, sympy.Basic) else str(part) for part in parts]
            for answer, parts in parsed().items()
        }

    expected = trees()
    monkeypatch.setattr(PSParser, "math", PSParser.math)  # put back after the test
    _parse_in_two_stages()
    assert trees() == expected
    assert sum(map(len, expected.values())) > len(ANSWERS)  # most were parsed, none is empty by mistake


@pytest.mark.slow
def test_a_difference_in_value_never_contradicts_math_verify():
    expressions = parsed()
    refuted = 0
    for gold, answer in itertools.product(ANSWERS, repeat=2):
        if _differ_numerically(expressions[gold][0], expressions[answer][0]):
            refuted += 1
            assert not verify(expressions[gold], expressions[answer], timeout_seconds=None), (gold, answer)
    assert refuted > 300


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (r"\sqrt{2}", r"\sqrt{3}", True),
        ("x^2+1", "x^2-1", True),
        ("x+y", "x-y", True),
        ("a+b", "b+a", False),
        (r"\sqrt{2}", "1.414", False),  # too close to call here
        ("10^{-9}", "2 \\cdot 10^{-9}", True),  # math-verify rounds both to 0
        (r"\sqrt{2}^2-2", "0", False),  # what is left of 0 by rounding is no number
        ("x+1", "x=1", False),  # a relation has no value
        ("even", r"\text{even}", False),  # a word
        (r"16\%", "16", False),
        ("f(x)+1", "f(x)+2", False),  # unknown function
    ],
)
def test_differ_numerically(one, other, differ):
    first, second = (parse(rf"\boxed{{{text}}}", BOXED, parsing_timeout=None)[0] for text in (one, other))
    assert _differ_numerically(first, second) is differ
