r"""Compares two answers by math-verify's grammar and comparison. Only the processes of `processes.py` load this.

math-verify's `parse` is not called: it searches a text for an answer, and if it cannot read the whole box, it takes the
last equation or plain fraction in it. Its grammar reads all of a box or nothing. What this module decides before
`verify` is what math-verify misjudges, or simplifies for minutes.
"""

import re
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.symbols import sympy_singleton_map
from math_verify import LatexExtractionConfig, grader, verify
from sympy import Basic, E, Equality, Expr, I, MatrixBase, Mul, Rational, Symbol, Tuple, UnevaluatedExpr
from sympy.core.function import Application
from sympy.sets import FiniteSet, Intersection, Set, Union

from verl_clipx.papers.tasks.math.spelling import is_word

# Inequalities that are joined describe one set of numbers.
_OR, _AND = r"\lor ", r"\land "

MAX_LENGTH = 400  # characters; the longest answer among the papers' evaluation sets has 224
MAX_DEPTH = 12

# Exponents from 10000 on and towers of them; factorials of numbers from 1000 on, of factorials, and of groups with a
# power or a number from 100 on, and functions that grow as fast; operators that iterate; macros; Python's powers. Also
# dots, which math-verify would drop, to read 1,2,\ldots as 1,2.
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)"
_REFUSED = re.compile(
    rf"\^\s*(?:(?:{_GROUP}|-?\d+|\\?[A-Za-z]+|\S)\s*\^|(?:\{{[^{{}}]*(?:\{{[^{{}}]*)?|\([^()]*)(?:\^|\d{{5}})|\d{{5}})|\*\*"
    r"|\d{4}\s*!|![\s)\]}]*!|(?:\^|\d{3})[^()\[\]]*[)\]}]\s*!"
    r"|\\(?:[dt]?binom|Gamma|zeta)(?![a-zA-Z])[^\n]{0,12}?\d{4}"
    r"|\\(?:sum|prod|i+nt|lim|bigcup|bigcap|ldots|input|include|def|newcommand|let|csname)(?![a-zA-Z])"
)
# A letter at the end is a variable, not a unit.
_NORMALISATION = replace(LatexExtractionConfig().normalization_config, boxed="none", units=False)
_TRIGONOMETRIC = {rf"\{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
# Commands that take a text or a name; other commands; primes, which math-verify drops; letters that the grammar reads
# as i, as half of a number, and as what transposes a matrix.
_LETTER = re.compile(
    r"\\(?:text\w*|mbox|operatorname|begin|end|math\w+|overline|widehat|widetilde|overrightarrow|vec|bar|hat|tilde)\s*"
    r"\{[^{}]*\}|\\[A-Za-z]+(?:\s*\()?|'+|[EIT]"
)
_CASED = ConversionConfig(lowercase_symbols=False)


class _Grammar(_Latex2Sympy):
    """math-verify's grammar; a degree is a number where it is the answer, and an angle in a trigonometric function."""

    def convert_func(self, func: Any) -> Any:
        outside, self.convert_degrees = self.convert_degrees, self.convert_degrees or func.start.text in _TRIGONOMETRIC
        try:
            return super().convert_func(func)
        finally:
            self.convert_degrees = outside


def _spell(expression: Any) -> str:
    if isinstance(expression, Mul) and all(isinstance(factor, Symbol) or factor == E for factor in expression.args):
        return "".join(map(_spell, expression.args))
    return {E: "e", I: "i"}.get(expression, str(expression))


# math-verify's own compares names in small letters.
grader.sympy_compare_symbols = lambda one, other: _spell(one) == _spell(other)
# It takes these letters for Euler's constant.
for _letter in ("gamma", "Gamma"):
    sympy_singleton_map.pop(_letter, None)


def judge(pairs: tuple[tuple[str, str], ...], strict: bool) -> bool | None:
    """Return whether any of some pairs of a right and a given answer is equal; None if one cannot be compared.

    If `strict`, they must be equal also with the roles exchanged, since math-verify is not symmetric, and a pair or
    tuple, whose order counts, equals no list.
    """
    undecided = False
    for gold, answer in pairs:
        try:
            if _equal(gold, answer, strict) and (not strict or _equal(answer, gold, strict)):
                return True
        except Exception:  # the grammar's, and sympy's, which knows no limits
            undecided = True
    return None if undecided else False


def _equal(gold: str, answer: str, strict: bool) -> bool:
    right, given = _read(gold), _read(answer)
    # An equation between numbers, as in x = 8 = 7. The grammar wraps what it has computed, such as a common divisor.
    if any(_differ(one.lhs.doit(), one.rhs.doit()) for one in given.atoms(Equality) if not one.free_symbols):
        return False
    right, given = _named_value(right, given), _named_value(given, right)
    if _differ(right, given):
        return False
    if strict and len({isinstance(e, FiniteSet) for e in (right, given) if isinstance(e, Set | Tuple)}) == 2:
        return False
    if all(isinstance(e, Expr) and e.is_number and e.is_rational and not e.is_Atom for e in (right, given)):
        # math-verify rounds, also numbers of thousands of digits.
        first, second = right.doit(), given.doit()
        if isinstance(first, Rational) and isinstance(second, Rational):
            return bool(first == second)
    # Its own time-out raises from a signal handler, which sympy may swallow. An inequality with an unknown equals the
    # set of its solutions; without one, it is true or false.
    return verify(
        right, given, allow_set_relation_comp=bool(given.free_symbols), timeout_seconds=None, raise_on_error=True
    )


# The responses to one prompt share their right answer, and parsing costs more than comparing.
@lru_cache(maxsize=256)
def _read(text: str) -> Any:
    """Return what math-verify's grammar reads in the whole text; raises if it cannot, or must not."""
    if not is_safe(text):
        raise ValueError("refused")
    text = _both_signs(text)
    joined = [part.split(_AND) for part in text.split(_OR)]
    if len(joined) == len(joined[0]) == 1:
        return _parse(text)
    return Union(*(Intersection(*(_parse(part).as_set() for part in parts)) for parts in joined))


def _both_signs(text: str) -> str:
    r"""Return both values of `1\pm\sqrt{2}` as a list; two such signs may mean two values or four, and stay."""
    plus, minus = (re.sub(r"\\pm(?![a-z])\s*", sign, text) for sign in "+-")
    return text if text.count(r"\pm") != 1 else f"{plus},{minus}".replace(r"\},\{", ",")


def is_safe(text: str) -> bool:
    """Return whether a text may be parsed at all, without obviously reaching the limits of time and memory.

    It must be printable ASCII (look-alikes are compared as text), and neither long, nor deep, nor contain _REFUSED.
    """
    if len(text) > MAX_LENGTH or not text.isascii() or not text.isprintable() or _REFUSED.search(text):
        return False
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    return max(depths, default=0) <= MAX_DEPTH


def _parse(text: str) -> Basic | MatrixBase:
    text = normalize_latex(_LETTER.sub(_protect, text), _NORMALISATION)
    # The grammar takes the imaginary unit for a variable, as it must stay in an interval's end, which is a pair here.
    for unit in (I, Symbol("i", real=True)):
        sympy_singleton_map["i"] = unit
        with suppress(ValueError):
            parsed = _Grammar(is_real=True, config=_CASED).parse(text)
            if isinstance(parsed, Basic | MatrixBase):
                return parsed
    raise ValueError("not one expression")


def _protect(match: re.Match[str]) -> str:
    """Return a letter that the grammar misreads as a text, which it takes for a variable; a word in small letters."""
    text = match[0]
    if text[0] == "'":
        return rf"^{{\{'prime' * len(text)}}}"
    if text in ("E", "I", "T", r"\gamma", r"\Gamma"):
        return rf"\text{{{text.strip(chr(92))}}}"
    command, brace, word = text.partition("{")
    return command + brace + word.lower() if is_word(word.strip("} ")) else text


def _named_value(expression: Any, other: Any) -> Any:
    """Return the value that an equation names, as in f(2) = 5 or gcd(10, 15) = 5, if the other side is no equation."""
    is_named = isinstance(expression, Equality) and isinstance(expression.lhs, Application | UnevaluatedExpr)
    return expression.rhs if is_named and not other.has(Equality) else expression


def _differ(one: Any, other: Any) -> bool:
    """Return whether two expressions clearly differ in value at one point, which no simplification can change.

    This decides most wrong answers. math-verify would simplify their difference, which takes milliseconds to minutes.
    Words, which are symbols here, percentages and what has no value are left to it.
    """
    if not all(isinstance(e, Expr) and not isinstance(e, Symbol) and not e.has(UnevaluatedExpr) for e in (one, other)):
        return False
    try:
        symbols = one.free_symbols | other.free_symbols
        names = sorted({symbol.name for symbol in symbols})
        # The coordinates are distinct, positive, and have no simple relation to each other.
        point = {symbol: 0.6180339887 + 0.4142135623 * names.index(symbol.name) for symbol in symbols}
        first, second = (complex(expression.evalf(17, subs=point)) for expression in (one, other))
        difference, sizes = abs(first - second), (abs(first), abs(second))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    # math-verify counts numbers with six equal decimals as equal, and so all numbers near zero.
    near_zero_counts = not symbols and min(sizes) > 0
    return difference > 1e-3 * max(*sizes, 0.0 if near_zero_counts else 1.0)
