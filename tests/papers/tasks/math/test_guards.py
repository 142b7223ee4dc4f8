r"""Which texts may start a symbolic comparison: ordinary answers may, bombs may not.

Not covered: what a comparison does with a text that passes (test_pool.py has the deadline).
"""

import pytest

from verl_clipx.papers.tasks.math.guards import MAX_DEPTH, MAX_DIGITS, MAX_EXPONENT, MAX_LENGTH, is_safe

ORDINARY = [
    "5",
    r"\frac{\sqrt{3}}{2}+1",
    r"2^{2024}-1",
    r"\frac{2^{2025}-1}{3^{2024}}",
    r"x^2+y^{10}",
    r"(x+1)^{3}(x-1)^{4}",
    r"\{1,2,3\}",
    r"(-\infty,2]\cup[3,\infty)",
    r"\begin{pmatrix} -5 & -2 \\ 8 & 0 \end{pmatrix}",
    r"\frac{(2n)!}{n!(n+1)!}",
    r"\binom{2n}{n}",
    r"\binom{100}{50}",
    r"90^\circ",
    r"90^{\circ}",
    "10!",
    r"\sqrt[3]{5}",
    r"e^{2\pi i/3}",
    r"f(x)=\frac{1}{x}",
    "10^{-19}",
    "6:00",
]

BOMBS = [
    "9^9^9",
    "9^{9^{9}}",
    "9^{(9^9)}",
    "9**9**9",
    "((9^{99})^{99})^{99}",
    "{{9^{99}}^{99}}^{99}",
    "9^{99}^{99}^{99}",
    "9 ^ 99999",
    "9^{99999}",
    "9^{-99999}",
    "9^{x+99999}",
    "9^-99999",
    "99999!",
    "9!!",
    "(9!)!",
    "((9!)!)!",
    "(10^9)!",
    "(123456)!",
    r"\binom{10000}{5000}",
    r"\Gamma(100000)",
    r"\sum_{n=1}^{10^9} n",
    r"\prod_{k=1}^{99999}k",
    r"\int_0^1 x dx",
    r"\iiint x",
    r"\lim_{x\to 0}x",
    r"\input{/etc/passwd}",
    r"\def\a{\a\a}\a",
    "1" * (MAX_DIGITS + 1),
    "(" * 1000 + "1" + ")" * 1000,
    "x" * (MAX_LENGTH + 1),
    "{",
    "}{",
    r"\frac{1}{2",
    "５",
    "а",  # Cyrillic
    "1\u200b2",
    "1\n2",
    "1\x002",
    "是",
]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_answers_pass(text):
    assert is_safe(text)


@pytest.mark.parametrize("text", BOMBS)
def test_bombs_do_not(text):
    assert not is_safe(text)


def test_bounds_are_sharp():
    assert is_safe("x" * MAX_LENGTH)
    assert is_safe("1" * MAX_DIGITS)
    assert is_safe(f"2^{{{MAX_EXPONENT}}}")
    assert not is_safe(f"2^{{{MAX_EXPONENT + 1}}}")
    assert is_safe("(2^{100})^{100}")
    assert not is_safe("(2^{100})^{101}")
    assert is_safe("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH)
    assert not is_safe("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))
    assert not is_safe("2^{" + "(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH + "}")
