r"""A comparison process: it reads questions as JSON lines and answers each with `1`, `0`, or `-` for no verdict.

`pool.py` starts this file as a script, so that a comparison process imports math-verify but nothing of the training. It
ends itself at the end of its input, that is, when its parent dies. It also ends when one question has used up its
processor time, through a kernel timer that no exception handler or C extension can delay.
"""

import contextlib
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

# Time limit of one question. It is processor time, so that a reward does not depend on what else the machine does.
CPU_SECONDS = 3.0

# Limit of the whole process; an idle one has mapped about 150 MB.
MEMORY_BYTES = 1 << 30

READY = b"ready\n"

# Returns whether two answers are equal; None if one of them cannot be read.
Comparison = Callable[[str, str], bool | None]

# math-verify drops these before it parses, so that it would read 1,2,\ldots as 1,2.
_DROPPED_SILENTLY = re.compile(r"\\ldots(?![a-zA-Z])")

# Inequalities that are joined describe one set of numbers.
_OR, _AND = r"\lor ", r"\land "


def main() -> None:
    """Answer questions until the input ends. Each asks whether any of some pairs of right and given answer is equal."""
    # Python puts a script's own folder first in the module path, where its modules would hide others of their names.
    del sys.path[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGTERM})
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    compare = _load_comparison()
    with contextlib.suppress(ValueError, OSError):  # not every platform bounds the address space
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies.write(READY)
    for line in sys.stdin.buffer:
        pairs, both_ways = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            reply = _answer(compare, pairs, both_ways)
        except MemoryError:
            os._exit(1)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(reply)


def _answer(compare: Comparison, pairs: list[tuple[str, str]], both_ways: bool) -> bytes:
    undecided = False
    for gold, answer in pairs:
        try:
            equal = compare(gold, answer)
            if equal and both_ways:
                equal = compare(answer, gold)
        except MemoryError:
            raise
        except Exception:
            equal = None
        if equal:
            return b"1\n"
        undecided = undecided or equal is None
    return b"-\n" if undecided else b"0\n"


def _load_comparison() -> Comparison:
    import logging

    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.math_normalization import normalize_latex
    from math_verify import LatexExtractionConfig, verify
    from sympy import Basic, Intersection, MatrixBase, Symbol, Union

    logging.disable(logging.CRITICAL)
    _parse_in_two_stages()
    # A letter at the end is a variable, not a unit.
    normalisation = replace(LatexExtractionConfig().normalization_config, boxed="none", units=False)
    letter_i = Symbol("i", real=True)

    def read(text: str) -> Any:
        parsed = latex2sympy(
            normalize_latex(text, normalisation), is_real=True, convert_degrees=False, normalization_config=None
        )
        return _with_imaginary_unit(parsed, letter_i) if letter_i in getattr(parsed, "free_symbols", ()) else parsed

    def set_of(text: str) -> Any:
        return Union(*(Intersection(*(read(both).as_set() for both in one.split(_AND))) for one in text.split(_OR)))

    # The responses to one prompt share their right answer, and parsing costs more than comparing.
    @lru_cache(maxsize=256)
    def expression(text: str) -> Any:
        """Return what math-verify's grammar reads in the whole text, or None.

        This does not call math-verify's `parse`, which searches a text for an answer: if it cannot read the whole box,
        it takes the last equation or plain fraction in it.
        """
        if _DROPPED_SILENTLY.search(text):
            return None
        try:
            parsed = set_of(text) if _OR in text or _AND in text else read(text)
        except MemoryError:
            raise
        except Exception:
            return None
        return parsed if isinstance(parsed, Basic | MatrixBase) else None

    def compare(gold: str, answer: str) -> bool | None:
        right, given = expression(gold), expression(answer)
        if right is None or given is None:
            return None
        if _is_false(given):
            return False
        right, given = _result(right, given), _result(given, right)
        if _differ_numerically(right, given):
            return False
        exact = _compare_exactly(right, given)
        if exact is not None:
            return exact
        # Its own time-out is off, because it raises from a signal handler, which sympy may swallow. An inequality with
        # an unknown equals the set of its solutions; without one, it is true or false.
        return verify(
            right, given, allow_set_relation_comp=bool(given.free_symbols), timeout_seconds=None, raise_on_error=True
        )

    return compare


def _is_false(expression: Any) -> bool:
    """Return whether an equation between two numbers, as in 8 = 7 or x = 8 = 7, does not hold."""
    from sympy import Basic, Equality

    equations = expression.atoms(Equality) if isinstance(expression, Basic) else ()
    # math-verify's grammar wraps what it has already computed, such as a greatest common divisor.
    sides = ((one.lhs.doit(), one.rhs.doit()) for one in equations if not one.free_symbols)
    return any(_differ_numerically(left, right) for left, right in sides)


def _with_imaginary_unit(parsed: Any, letter: Any) -> Any:
    """Replace the letter i, which the grammar reads as a variable, by the imaginary unit."""
    from sympy import I
    from sympy.core.relational import Relational

    if isinstance(parsed, Relational):
        # A real unknown equals no complex number, so that sympy would evaluate the relation.
        return type(parsed)(parsed.lhs.xreplace({letter: I}), parsed.rhs.xreplace({letter: I}), evaluate=False)
    try:
        return parsed.xreplace({letter: I})
    except ValueError:  # the end of an interval, which is a pair here
        return parsed


def _result(expression: Any, other: Any) -> Any:
    """Return the value that an equation names, as in f(2) = 5 or gcd(10, 15) = 5, if the other side is no equation."""
    from sympy import Equality, UnevaluatedExpr
    from sympy.core.function import Application

    is_named = isinstance(expression, Equality) and isinstance(expression.lhs, Application | UnevaluatedExpr)
    return expression.rhs if is_named and not other.has(Equality) else expression


def _compare_exactly(one: Any, other: Any) -> bool | None:
    """Compare two rational numbers of any size; None for anything else."""
    from sympy import Expr, Rational

    if not all(isinstance(e, Expr) and e.is_number and e.is_rational and not e.is_Atom for e in (one, other)):
        return None
    first, second = one.doit(), other.doit()
    return bool(first == second) if isinstance(first, Rational) and isinstance(second, Rational) else None


def _differ_numerically(one: Any, other: Any) -> bool:
    """Return whether two expressions have clearly different values at one point, which no simplification can change.

    This decides most wrong answers. math-verify would simplify their difference, which takes milliseconds to minutes.

    Args:
        one, other: what math-verify parsed. The result is False, so that math-verify decides, for words, which it
            parses as symbols, for percentages, and for everything without a value: sets, relations, matrices, unknown
            functions.
    """
    from sympy import Expr, Symbol, UnevaluatedExpr

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
    # math-verify rounds to six decimals, which would make all numbers near zero equal.
    if not symbols and min(sizes) > 0 and difference > 1e-3 * max(sizes):
        return True
    # math-verify counts numbers with six equal decimals as equal; these two are far from that.
    return difference > 1e-3 * max(1.0, *sizes)


def _parse_in_two_stages() -> None:
    """Let ANTLR try its fast prediction mode first, which finds the same tree or none and is four times as fast.

    See Terence Parr et al., "Adaptive LL(*) Parsing", OOPSLA 2014, section 3.2. latex2sympy always uses the slow mode.
    """
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended.antlr_parser import PSParser

    parse_fully = PSParser.math

    def parse(parser):
        # All tokens are read first, so that an unknown one raises here. If the first stage met it, it would be missing
        # in the second.
        parser.getTokenStream().fill()
        parser._interp.predictionMode = PredictionMode.SLL
        try:
            return parse_fully(parser)
        except Exception:
            parser.reset()
            parser._interp.predictionMode = PredictionMode.LL
            return parse_fully(parser)

    PSParser.math = parse


if __name__ == "__main__":
    main()
