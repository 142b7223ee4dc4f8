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

# Units after an answer: texts, their powers, and what joins them.
_TEXT = r"\\(?:text\w*|mbox|math(?:rm|it|bf))\s*\{[^{}]*\}"
_UNITS = re.compile(rf"(?<=\S)\s*{_TEXT}(?:{_TEXT}|\^\{{?-?\d\}}?|\\(?:cdot|times)(?![a-zA-Z])|[\s/])*$")
_ANY_TEXT = re.compile(_TEXT)


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
            # A comparison that fails counts as unequal: math-verify itself returns False on most errors.
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

        This does not call math-verify's `parse`, which searches a text for an answer: if it cannot read the whole box,
        it takes the last equation or plain fraction in it.
        """
        if _DROPPED_SILENTLY.search(text):
            return None
        without = _UNITS.sub("", text)
        # After a word, a text is not a unit: northeast is not north.
        text = text if _ANY_TEXT.fullmatch(without) else without
        # math-verify takes everything from the first text on for a unit.
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
        # Its own time-out is off, because it raises from a signal handler, which sympy may swallow. An inequality with
        # an unknown equals the set of its solutions; without one, it is true or false.
        return verify(right, given, allow_set_relation_comp=bool(given.free_symbols), timeout_seconds=None)

    return compare


def _is_false(expression: Any) -> bool:
    """Return whether an equation between two numbers, as in 8 = 7 or x = 8 = 7, does not hold."""
    from sympy import Basic, Equality

    equations = expression.atoms(Equality) if isinstance(expression, Basic) else ()
    return any(not one.free_symbols and _differ_numerically(one.lhs, one.rhs) for one in equations)


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
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return False
    difference, sizes = abs(first - second), (abs(first), abs(second))
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
