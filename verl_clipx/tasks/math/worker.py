r"""One comparison process: reads pairs of answers as JSON lines, writes `1` or `0` for each.

`pool.py` starts this file as a script, so that a comparison process imports math-verify and nothing of the training.
It ends itself: at the end of its input, which is when its parent dies, and, through a kernel timer that no exception
handler or C extension can delay, when one comparison has used its processor time.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

# Of one comparison. Processor time, so that a reward does not depend on what else the machine does.
CPU_SECONDS = 3.0

# Of the whole process; an idle one has mapped about 150 MB.
MEMORY_BYTES = 1 << 30

READY = b"ready\n"


def main() -> None:
    """Serve comparisons until the input ends."""
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
        gold, answer, both_ways = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            equal = compare(gold, answer) and (not both_ways or compare(answer, gold))
        except MemoryError:
            os._exit(1)
        except Exception:
            # A comparison that fails finds no equality: math-verify itself returns False on most errors.
            equal = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        replies.write(b"1\n" if equal else b"0\n")


def _load_comparison() -> Callable[[str, str], bool]:
    import logging

    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable(logging.CRITICAL)
    _parse_in_two_stages()
    boxed = [LatexExtractionConfig(boxed_match_priority=0)]

    # The responses to one prompt share their right answer, and parsing costs more than comparing.
    @lru_cache(maxsize=256)
    def expressions(text: str) -> list:
        # math-verify's own time-outs are off: they raise from a signal handler, which sympy may swallow.
        return parse(rf"\boxed{{{text}}}", boxed, parsing_timeout=None)

    def compare(gold: str, answer: str) -> bool:
        parsed = expressions(gold), expressions(answer)
        if not all(parsed) or _differ_numerically(parsed[0][0], parsed[1][0]):
            return False
        return verify(*parsed, timeout_seconds=None)

    return compare


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
