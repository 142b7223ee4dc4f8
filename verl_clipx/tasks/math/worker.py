r"""One comparison process: reads questions as JSON lines, writes `1`, `0` or `-`, for no verdict, for each.

`pool.py` starts this file as a script, so that a comparison process imports math-verify and nothing of the training.
It ends itself: at the end of its input, which is when its parent dies, and, through a kernel timer that no exception
handler or C extension can delay, when one question has used its processor time.
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

# Of one question. Processor time, so that a reward does not depend on what else the machine does.
CPU_SECONDS = 3.0

# Of the whole process; an idle one has mapped about 150 MB.
MEMORY_BYTES = 1 << 30

READY = b"ready\n"

# Whether two answers are equal; None if one of them can't be read.
Comparison = Callable[[str, str], bool | None]

# math-verify leaves these out before it parses: 1,2,\ldots would be 1,2.
_DROPPED_SILENTLY = re.compile(r"\\ldots(?![a-zA-Z])")

# Units behind an answer: texts, their powers, and what joins them.
_TEXT = r"\\(?:text\w*|mbox|math(?:rm|it|bf))\s*\{[^{}]*\}"
_UNITS = re.compile(rf"(?<=\S)\s*{_TEXT}(?:{_TEXT}|\^\{{?-?\d\}}?|\\(?:cdot|times)(?![a-zA-Z])|[\s/])*$")
_ANY_TEXT = re.compile(_TEXT)


def main() -> None:
    """Answer questions until the input ends: whether any of some pairs of right and given answers is equal."""
    # A script's own folder comes first in the path, and this one is called math.
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
            # A comparison that fails finds no equality: math-verify itself returns False on most errors.
            equal = False
        if equal:
            return b"1\n"
        undecided = undecided or equal is None
    return b"-\n" if undecided else b"0\n"


def _load_comparison() -> Comparison:
    import logging

    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.math_normalization import normalize_latex
    from math_verify import LatexExtractionConfig, verify
    from math_verify.grader import should_treat_as_complex
    from sympy import Basic, MatrixBase

    logging.disable(logging.CRITICAL)
    _parse_in_two_stages()
    with_units = replace(LatexExtractionConfig().normalization_config, boxed="none")
    without_units = replace(with_units, units=False)

    # The responses to one prompt share their right answer, and parsing costs more than comparing.
    @lru_cache(maxsize=256)
    def expression(text: str) -> Any:
        """Return what math-verify's grammar reads in the whole text, or None.

        Not by math-verify's `parse`, which looks for an answer in a text: where it can't read the whole box, it takes
        the last equation or plain fraction in it.
        """
        if _DROPPED_SILENTLY.search(text):
            return None
        without = _UNITS.sub("", text)
        # Behind a word, no text is a unit: northeast is not north.
        text = text if _ANY_TEXT.fullmatch(without) else without
        # From the first text on, math-verify takes everything for a unit.
        normalised = normalize_latex(text, without_units if _ANY_TEXT.search(text) else with_units)
        try:
            parsed = latex2sympy(
                normalised,
                is_real=not should_treat_as_complex(normalised),
                convert_degrees=False,
                normalization_config=None,
            )
        except MemoryError:
            raise
        except Exception:
            return None
        return parsed if isinstance(parsed, Basic | MatrixBase) else None

    def compare(gold: str, answer: str) -> bool | None:
        right, given = expression(gold), expression(answer)
        if right is None or given is None:
            return None
        if _is_false(given) or _differ_numerically(right, given):
            return False
        # Its own time-out is off: it raises from a signal handler, which sympy may swallow. An inequality is the set of
        # its solutions; without an unknown it is true or false.
        return verify(right, given, allow_set_relation_comp=bool(given.free_symbols), timeout_seconds=None)

    return compare


def _is_false(expression: Any) -> bool:
    """Return whether an equation between two numbers, as in 8 = 7 or x = 8 = 7, does not hold."""
    from sympy import Basic, Equality

    equations = expression.atoms(Equality) if isinstance(expression, Basic) else ()
    return any(not one.free_symbols and _differ_numerically(one.lhs, one.rhs) for one in equations)


def _differ_numerically(one: Any, other: Any) -> bool:
    """Return whether two expressions have clearly different values at one point, which no simplification can change.

    math-verify simplifies a difference that is not zero, for milliseconds to minutes; most wrong answers end here.

    Args:
        one, other: what math-verify parsed. Left to it are words, which it parses as symbols, percentages, and
            everything that has no value: sets, relations, matrices, unknown functions.
    """
    from sympy import Expr, Symbol, UnevaluatedExpr

    if not all(isinstance(e, Expr) and not isinstance(e, Symbol) and not e.has(UnevaluatedExpr) for e in (one, other)):
        return False
    try:
        symbols = one.free_symbols | other.free_symbols
        names = sorted({symbol.name for symbol in symbols})
        # Distinct, positive, of no simple relation to each other.
        point = {symbol: 0.6180339887 + 0.4142135623 * names.index(symbol.name) for symbol in symbols}
        first, second = (complex(expression.evalf(17, subs=point)) for expression in (one, other))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    difference, sizes = abs(first - second), (abs(first), abs(second))
    # Of numbers near zero math-verify's rounding to six decimals leaves nothing.
    if not symbols and min(sizes) > 0 and difference > 1e-3 * max(sizes):
        return True
    # math-verify takes six equal decimals for equality; far from that there is no doubt.
    return difference > 1e-3 * max(1.0, *sizes)


def _parse_in_two_stages() -> None:
    """Let ANTLR try its fast prediction mode first, which finds the same tree or none: four times the speed.

    Terence Parr et al., "Adaptive LL(*) Parsing", OOPSLA 2014, section 3.2; latex2sympy uses the slow mode throughout.
    """
    from antlr4.atn.PredictionMode import PredictionMode
    from latex2sympy2_extended.antlr_parser import PSParser

    parse_fully = PSParser.math

    def parse(parser):
        # All tokens first: an unknown one ends it here. Met during the first stage, it would be missing in the second.
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
