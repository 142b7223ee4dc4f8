r"""Compares two answers by math-verify's grammar and comparison. Only the processes of `processes.py` load this.

math-verify's `parse` is not called: it searches a text for an answer, and if it cannot read the whole box, it takes the
last equation or plain fraction in it. Its grammar reads all of a box or nothing. What this module decides before
`verify` is what math-verify misjudges, or simplifies for minutes.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import latex2sympy
from latex2sympy2_extended.antlr_parser import PSParser
from latex2sympy2_extended.math_normalization import normalize_latex
from math_verify import LatexExtractionConfig, verify
from sympy import Basic, Equality, Expr, I, MatrixBase, Rational, Symbol, Tuple, UnevaluatedExpr
from sympy.core.function import Application
from sympy.core.relational import Relational
from sympy.sets import FiniteSet, Intersection, Set, Union

# Inequalities that are joined describe one set of numbers.
_OR, _AND = r"\lor ", r"\land "

# A letter at the end is a variable, not a unit.
_NORMALISATION = replace(LatexExtractionConfig().normalization_config, boxed="none", units=False)
_LETTER_I = Symbol("i", real=True)


def judge(pairs: tuple[tuple[str, str], ...], strict: bool) -> bool | None:
    """Return whether any of some pairs of a right and a given answer is equal; None if one cannot be compared.

    Args:
        strict: whether they must be equal also with the roles exchanged, since math-verify is not symmetric, and a
            pair or tuple, whose order counts, equals no list.
    """
    undecided = False
    for gold, answer in pairs:
        try:
            equal = _compare(gold, answer, strict)
            if equal and strict:
                equal = _compare(answer, gold, strict)
        except Exception:  # of sympy, which knows no limits, and MemoryError
            equal = None
        if equal:
            return True
        undecided = undecided or equal is None
    return None if undecided else False


def _compare(gold: str, answer: str, strict: bool) -> bool | None:
    right, given = _expression(gold), _expression(answer)
    if right is None or given is None:
        return None
    # An equation between numbers, as in x = 8 = 7. The grammar wraps what it has computed, such as a common divisor.
    equations = given.atoms(Equality) if isinstance(given, Basic) else ()
    if any(_differ(one.lhs.doit(), one.rhs.doit()) for one in equations if not one.free_symbols):
        return False
    right, given = _named_value(right, given), _named_value(given, right)
    if _differ(right, given):
        return False
    are_lists = {isinstance(e, FiniteSet) for e in (right, given) if isinstance(e, Set | Tuple)}
    if strict and len(are_lists) == 2:
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
def _expression(text: str) -> Any:
    """Return what math-verify's grammar reads in the whole text, or None."""
    # math-verify would drop the dots and read 1,2,\ldots as 1,2.
    if re.search(r"\\ldots(?![a-zA-Z])", text):
        return None
    try:
        if _OR in text or _AND in text:
            parts = ([_read(part).as_set() for part in joined.split(_AND)] for joined in text.split(_OR))
            parsed = Union(*(Intersection(*sets) for sets in parts))
        else:
            parsed = _read(text)
    except Exception:
        return None
    return parsed if isinstance(parsed, Basic | MatrixBase) else None


def _read(text: str) -> Any:
    text = normalize_latex(text, _NORMALISATION)
    parsed = latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    if _LETTER_I not in getattr(parsed, "free_symbols", ()):
        return parsed
    # The grammar reads the imaginary unit as a variable.
    if isinstance(parsed, Relational):
        # A real unknown equals no complex number, so that sympy would evaluate the relation.
        return type(parsed)(*(side.xreplace({_LETTER_I: I}) for side in parsed.args), evaluate=False)
    try:
        return parsed.xreplace({_LETTER_I: I})
    except ValueError:  # the end of an interval, which is a pair here
        return parsed


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


def _parse_fast_mode_first(parser: PSParser, parse_fully=PSParser.math) -> Any:
    """Let ANTLR try its fast prediction mode first, which finds the same tree or none and is four times as fast.

    Source: Terence Parr et al., "Adaptive LL(*) Parsing", OOPSLA 2014, section 3.2.
    """
    # All tokens are read first, so that an unknown one raises here. If the first mode met it, the second would miss it.
    parser.getTokenStream().fill()
    parser._interp.predictionMode = PredictionMode.SLL
    try:
        return parse_fully(parser)
    except Exception:
        parser.reset()
        parser._interp.predictionMode = PredictionMode.LL
        return parse_fully(parser)


PSParser.math = _parse_fast_mode_first
