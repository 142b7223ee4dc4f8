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
from types import SimpleNamespace
from typing import Any

from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.symbols import sympy_singleton_map
from math_verify import LatexExtractionConfig, grader, verify
from mpmath import mpc
from sympy import (
    Abs,
    Add,
    And,
    Basic,
    E,
    Equality,
    Expr,
    Float,
    I,
    MatrixBase,
    Mul,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    solve,
)
from sympy.core.function import Application, AppliedUndef
from sympy.core.relational import Relational
from sympy.sets import FiniteSet, Intersection, Set, Union

from verl_clipx.papers.tasks.math.accounting import check_tree, check_words
from verl_clipx.papers.tasks.math.spelling import is_word

# Inequalities that are joined describe one set of numbers.
_OR = r"\lor "
_AND = r"\land "

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
# A variable or a number with primes, which math-verify drops; commands that take a text or a name; other commands;
# letters that the grammar reads as i, as half of a number, and as what transposes a matrix.
_LETTER = re.compile(
    r"(?P<primed>\\[A-Za-z]+|[A-Za-z]|\d)(?P<index>_(?:\w|\{[^{}]*\}))?(?P<primes>'+)"
    r"|\\(?:text\w*|mbox|operatorname|begin|end|math\w+|overline|widehat|widetilde|overrightarrow|vec|bar|hat|tilde)\s*"
    r"\{[^{}]*\}|\\[A-Za-z]+(?:\s*\()?|[EIT]"
)
# Fonts that make another variable of a letter.
_FONT = re.compile(r"\\math(bb|cal|frak|scr|sf|tt)\{([^{}]*)\}")
_DIFFERENTIAL = re.compile(r"\\(?:text\w*|mbox|math(?:rm|it|bf|sf))\s*\{\s*d\s*\}")
_CASED = ConversionConfig(lowercase_symbols=False)


class _Grammar(_Latex2Sympy):
    """math-verify's grammar; a degree is a number where it is the answer, and an angle in a trigonometric function."""

    def create_parser(self, text: str) -> Any:
        tree = super().create_parser(text).math()
        check_tree(tree, text)
        return SimpleNamespace(math=lambda: tree)

    def convert_func(self, func: Any) -> Any:
        outside = self.convert_degrees
        self.convert_degrees = self.convert_degrees or func.start.text in _TRIGONOMETRIC
        try:
            return super().convert_func(func)
        finally:
            self.convert_degrees = outside


def _spell(expression: Any) -> str:
    """Return the name of a symbol, or of several that are multiplied, with e and i for the numbers of these names."""
    if isinstance(expression, Mul) and all(isinstance(factor, Symbol) or factor == E for factor in expression.args):
        return "".join(map(_spell, expression.args))
    return {E: "e", I: "i"}.get(expression, str(expression))


def _have_the_same_name(gold: Any, answer: Any) -> bool:
    """Return whether two symbols, or products of symbols, have the same name in the same letters."""
    return _spell(gold) == _spell(answer)


# math-verify's own compares names in small letters.
grader.sympy_compare_symbols = _have_the_same_name
_solve_and_compare = grader.sympy_solve_and_compare


def _without_assumptions(equation: Equality) -> Equality:
    """Return an equation whose unknowns may be any complex numbers."""
    return equation.xreplace({unknown: Symbol(unknown.name) for unknown in equation.free_symbols})


def _solve_equations(gold: Relational, answer: Relational, *precision: int) -> bool:
    """Return whether two relations have the same solutions; equations also complex ones, and at least one."""
    if isinstance(gold, Equality) and isinstance(answer, Equality):
        gold = _without_assumptions(gold)
        answer = _without_assumptions(answer)
        if not solve(gold, gold.free_symbols):
            return False
    return bool(_solve_and_compare(gold, answer, *precision))


# math-verify's own solves for real numbers, and counts equations without a solution as equal.
grader.sympy_solve_and_compare = _solve_equations
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
    """Return whether an answer equals the right one; the arguments are as for `judge`.

    Raises:
        Exception: one of them cannot be read or compared.
    """
    right, unknown = _read(gold)
    given, unknown_of_given = _read(answer)
    if unknown and unknown_of_given and unknown != unknown_of_given:
        return False
    # An equation between numbers, as in x = 8 = 7. The grammar wraps what it has computed, such as a common divisor.
    for equation in given.atoms(Equality):
        if not equation.free_symbols and _differ(equation.lhs.doit(), equation.rhs.doit()):
            return False
    if right.has(Equality) != given.has(Equality) and not all(map(_name_values, (right, given))):
        return False
    right, given = _named_value(right, given), _named_value(given, right)
    if _differ(right, given):
        return False
    both_are_lists_or_tuples = isinstance(right, Set | Tuple) and isinstance(given, Set | Tuple)
    if strict and both_are_lists_or_tuples and isinstance(right, FiniteSet) != isinstance(given, FiniteSet):
        return False
    if _is_composed_rational(right) and _is_composed_rational(given):
        # math-verify rounds, also numbers of thousands of digits.
        first = right.doit()
        second = given.doit()
        if isinstance(first, Rational) and isinstance(second, Rational):
            return bool(first == second)
    # Its own time-out raises from a signal handler, which sympy may swallow. An inequality with an unknown equals the
    # set of its solutions; without one, it is true or false.
    return verify(
        right, given, allow_set_relation_comp=bool(given.free_symbols), timeout_seconds=None, raise_on_error=True
    )


def _is_composed_rational(expression: Any) -> bool:
    """Return whether an expression is a rational number that is still to be computed, such as 2 to the power of 9."""
    if not isinstance(expression, Expr) or expression.is_Atom:
        return False
    return bool(expression.is_number and expression.is_rational)


# The responses to one prompt share their right answer, and parsing costs more than comparing.
@lru_cache(maxsize=256)
def _read(text: str) -> tuple[Any, Symbol | None]:
    """Return what math-verify's grammar reads in the whole text, and the unknown if it is an inequality, or None.

    Raises:
        ValueError: it cannot be read, or must not be, or a part of it would be dropped.
    """
    if not is_safe_to_parse(text):
        raise ValueError("refused")
    text = _both_signs(text)
    joined = [[_parse(part) for part in alternative.split(_AND)] for alternative in text.split(_OR)]
    relations = [relation for alternative in joined for relation in alternative]
    unknowns = set().union(*(relation.free_symbols for relation in relations))
    unknown = unknowns.pop() if len(unknowns) == 1 and all(map(_is_relation, relations)) else None
    if len(relations) == 1:
        return relations[0], unknown
    if unknown is None:
        raise ValueError("not relations of one unknown")
    solutions = [Intersection(*[relation.as_set() for relation in parts]) for parts in joined]
    return Union(*solutions), unknown


def _is_relation(value: Any) -> bool:
    """Return whether a value is an equation or inequality, or several that hold together."""
    parts = value.args if isinstance(value, And) else [value]
    return all(isinstance(part, Relational) for part in parts)


def _both_signs(text: str) -> str:
    r"""Return both values of `1\pm\sqrt{2}` as a list; two such signs may mean two values or four, and stay."""
    if text.count(r"\pm") != 1:
        return text
    plus = re.sub(r"\\pm(?![a-z])\s*", "+", text)
    minus = re.sub(r"\\pm(?![a-z])\s*", "-", text)
    return f"{plus},{minus}".replace(r"\},\{", ",")


def is_safe_to_parse(text: str) -> bool:
    """Return whether a text may be parsed at all: one that is not may exhaust the parser's time or memory.

    A text is safe if it consists of printable ASCII, is at most MAX_LENGTH characters long, nests brackets at most
    MAX_DEPTH deep, and contains nothing that _REFUSED matches. Texts with other characters, which may look like ASCII,
    are compared as text instead.
    """
    if len(text) > MAX_LENGTH or not text.isascii() or not text.isprintable() or _REFUSED.search(text):
        return False
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    return max(depths, default=0) <= MAX_DEPTH


def _parse(text: str) -> Basic | MatrixBase:
    text = _LETTER.sub(_protect, text)
    if "'" in text or '"' in text:
        raise ValueError("primes or quotation marks, which would be dropped")
    text = normalize_latex(text, _NORMALISATION)
    check_words(text)
    # The grammar takes the imaginary unit for a variable, as it must stay in an interval's end, which is a pair here.
    for unit in (I, Symbol("i", real=True)):
        sympy_singleton_map["i"] = unit
        with suppress(ValueError):
            parsed = _Grammar(is_real=True, config=_CASED).parse(text)
            if isinstance(parsed, Basic | MatrixBase):
                _check_members(parsed)
                return parsed
    raise ValueError("not one expression")


def _check_members(parsed: Basic | MatrixBase) -> None:
    """Raise ValueError if a list has a member twice, of which a set keeps one."""
    for members in parsed.atoms(FiniteSet):
        if len(getattr(members, "_unsorted_args", members.args)) != len(members.args):
            raise ValueError("a member that comes twice")


def _protect(match: re.Match[str]) -> str:
    """Return a letter that the grammar misreads as a text, which it takes for a variable; a word in small letters."""
    text = match[0]
    if _DIFFERENTIAL.fullmatch(text):
        return "d "
    if match["primes"]:
        return _protect_primes(match["primed"], match["index"] or "", match["primes"])
    if font := _FONT.fullmatch(text):
        return text if font[1] == "bb" else rf"\bm{{{font[1]}{font[2]}}}"
    if text in ("E", "I", "T"):
        return rf"\text{{{text}}}"
    if text in (r"\gamma", r"\Gamma"):
        return rf"\bm{{{text[1:]}}}"
    command, _, word = text.removesuffix("}").partition("{")
    if not is_word(word.strip()):
        return text
    # The grammar drops blanks, so that "now here" would be "no where".
    return f"{command}{{{'-'.join(word.lower().split())}}}"


def _protect_primes(variable: str, index: str, primes: str) -> str:
    """Return another variable for one with primes, and a number with a variable as its factor."""
    name = "prime" * len(primes)
    if variable.isdigit():
        return rf"{variable}{index}\bm{{{name}}}"
    return rf"\bm{{{variable.strip(chr(92))}{name}}}{index}"


def _named_value(expression: Any, other: Any) -> Any:
    """Return the value that an equation names, as in f(2) = 5 or gcd(10, 15) = 5, if the other side is no equation."""
    if not isinstance(expression, Equality) or other.has(Equality):
        return expression
    name = expression.lhs
    is_calculation = isinstance(name, Application) and not name.free_symbols
    return expression.rhs if is_calculation or isinstance(name, AppliedUndef | UnevaluatedExpr) else expression


def _evaluate(expression: Expr, point: dict[Symbol, float]) -> mpc:
    """Return a value with an exponent of any size; raises TypeError if there is none."""
    return mpc(*map(Float, expression.evalf(17, subs=point).as_real_imag()))


def _name_values(expression: Any) -> bool:
    """Return whether each equation of an expression names a value: x, m + n or f(2), but not 3x or x^2.

    Without an unknown, it is a calculation.
    """
    return all(_is_name(equation.lhs) or not equation.lhs.free_symbols for equation in expression.atoms(Equality))


def _is_name(side: Any) -> bool:
    if isinstance(side, AppliedUndef | UnevaluatedExpr | Symbol):
        return True
    return isinstance(side, Add | Mul | Abs | Tuple) and all(map(_is_name, side.args))


def _differ(first_side: Any, other: Any) -> bool:
    """Return whether two expressions clearly differ in value at one point, which no simplification can change.

    This decides most wrong answers. math-verify would simplify their difference, which takes milliseconds to minutes.
    Words, which are symbols here, percentages and what has no value are left to it.
    """
    if not all(
        isinstance(e, Expr) and not isinstance(e, Symbol) and not e.has(UnevaluatedExpr) for e in (first_side, other)
    ):
        return False
    try:
        symbols = first_side.free_symbols | other.free_symbols
        names = sorted({symbol.name for symbol in symbols})
        # The coordinates are distinct, positive, and have no simple relation to each other.
        point = {symbol: 0.6180339887 + 0.4142135623 * names.index(symbol.name) for symbol in symbols}
        first, second = (_evaluate(expression, point) for expression in (first_side, other))
        difference = abs(first - second)
        sizes = (abs(first), abs(second))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    # math-verify counts numbers with six equal decimals as equal, and so all numbers near zero.
    near_zero_counts = not symbols and min(sizes) > 0
    return difference > 1e-3 * max(*sizes, 0.0 if near_zero_counts else 1.0)
