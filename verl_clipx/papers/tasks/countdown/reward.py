r"""Rule reward of Countdown: 1 if the answer uses each number exactly once and equals the target, else 0.

The answer is the last `<answer>…</answer>`, or, for rows whose prompt asks for a box, the last `\boxed{…}`. An answer
inside the thinking does not count.

verl loads this file by path (`reward.custom_reward_function.path`, name `compute_score`), so it imports little more
than the standard library. Responses come from a policy under training: they must never raise an error, be executed, or
cost more than a scan.
"""

import ast
import operator
import re
import threading
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

from verl_clipx.papers.responses import final_part, find_last_boxed, tagged_answer
from verl_clipx.papers.tasks.ground_truth import decode_ground_truth

BOXED_DATA_SOURCE = "countdown_boxed"
"""Data source of rows whose prompt asks for a box, in which LaTeX operators such as \\times do not count."""

# Expressions of six numbers have about 30 characters. The limit bounds the parser's depth and the integers' size.
MAX_ANSWER_LENGTH = 256

# ACPO's Countdown reward accepts a difference up to this.
TOLERANCE = Fraction(1, 100_000)

# Python's parser would also accept other digits, names, strings, comments and line ends, so it never sees these.
_ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
# verl scores in threads. Before Python 3.12, threads that build syntax trees share one recursion counter. If garbage
# collection lets another thread run meanwhile, `ast.parse` raises SystemError (CPython issue 106905).
_PARSING = threading.Lock()


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response; never raises, and any thread may call it.

    The rule is that of ACPO's Countdown experiments. Addition, subtraction, multiplication, division, signs and
    parentheses count; other operators do not.

    Args:
        data_source: `BOXED_DATA_SOURCE` for an answer in a box, anything else for one in tags.
        ground_truth: a mapping `{"numbers": integers, "target": number}`, or its JSON; with anything else no answer is
            right.

    Returns:
        `score` and `acc`, the reward, 1.0 or 0.0; `format`, 1.0 if the last answer is an arithmetic expression.
    """
    if data_source == BOXED_DATA_SOURCE:
        final = final_part(solution_str) if isinstance(solution_str, str) else None
        answer = find_last_boxed(final, MAX_ANSWER_LENGTH)
    else:
        answer = tagged_answer(solution_str, MAX_ANSWER_LENGTH)
    expression = None if answer is None else _parse(answer.strip())
    correct = expression is not None and _is_solution(expression, decode_ground_truth(ground_truth))
    return {"score": float(correct), "acc": float(correct), "format": float(expression is not None)}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """See `verl_clipx.papers.tasks.reward.check_ground_truth`; the data source makes no difference."""
    decoded = decode_ground_truth(ground_truth)
    try:
        numbers = list(decoded["numbers"])
        target = decoded["target"]
    except (TypeError, KeyError):
        numbers = []
        target = None
    if (
        not numbers
        or not all(isinstance(number, Integral) for number in numbers)
        or not isinstance(target, Rational | float)
    ):
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): Countdown needs "
            '{"numbers": integers, "target": number}, as a mapping or as JSON'
        )


def _parse(answer: str) -> ast.expr | None:
    """Return the syntax tree of integers, the signs + and -, and the operators + - * /; None of anything else."""
    if not _ARITHMETIC.fullmatch(answer):
        return None
    try:
        with _PARSING:
            tree = ast.parse(answer, mode="eval").body
        return tree if _is_arithmetic(tree) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_arithmetic(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.UnaryOp):
        return type(node.op) in _UNARY and _is_arithmetic(node.operand)
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BINARY and _is_arithmetic(node.left) and _is_arithmetic(node.right)
    return False


def _is_solution(expression: ast.expr, truth: Any) -> bool:
    if not isinstance(truth, Mapping) or not isinstance(truth.get("target"), Rational | float):
        return False
    used = Counter(node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    try:
        # Parquet gives a list or an array. If its length differs, it cannot match, whatever it contains.
        numbers = truth.get("numbers")
        if len(numbers) != used.total() or used != Counter(numbers):
            return False
        return abs(_evaluate(expression) - Fraction(truth["target"])) <= TOLERANCE
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        # Division by zero, a target that is not finite, numbers that cannot be counted, a very deep expression.
        return False


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand))
    return Fraction(node.value)
