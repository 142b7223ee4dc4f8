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
"""Data source of rows whose prompt asks for a box. LaTeX operators such as \\times do not count in it."""

# In characters. Expressions of six numbers have about 30. The limit bounds the parser's depth and the integers' size.
MAX_ANSWER_LENGTH = 256

# ACPO's Countdown reward accepts a value that differs from the target by at most this.
TOLERANCE = Fraction(1, 100_000)

# The characters of an arithmetic expression. Python's parser would also accept other digits, names, strings, comments
# and line ends, so it never sees these.
_ARITHMETIC = re.compile(r"[0-9+\-*/() ]+")
# The functions that compute the operators of two operands, and the signs before one operand.
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}
# verl scores in threads. Before Python 3.12, threads that build syntax trees share one recursion counter. If garbage
# collection lets another thread run meanwhile, `ast.parse` raises SystemError (CPython issue 106905).
_PARSER_LOCK = threading.Lock()


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response 1.0 if its answer is right, else 0.0. No response raises an error, and any thread may call it.

    The rule is that of ACPO's Countdown experiments. An answer may have addition, subtraction, multiplication,
    division, signs and parentheses. With any other operator, it is not an arithmetic expression.

    Args:
        data_source: `BOXED_DATA_SOURCE` for an answer in a box, anything else for one in tags.
        solution_str: the response.
        ground_truth: a mapping `{"numbers": integers, "target": number}`, or its JSON. With anything else, no answer is
            right.
        extra_info, kwargs: not used. verl passes them to every reward.

    Returns:
        `score` and `acc`: the reward.
        `format`: 1.0 if the answer is an arithmetic expression, right or wrong, else 0.0.
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
    """Raise ValueError unless the ground truth has the numbers and the target that `compute_score` describes.

    Args:
        data_source: makes no difference. See `verl_clipx.papers.tasks.reward.check_ground_truth`.
    """
    decoded = decode_ground_truth(ground_truth)
    try:
        numbers = list(decoded["numbers"])
        target = decoded["target"]
    except (TypeError, KeyError):
        numbers = []
        target = None
    has_numbers = bool(numbers) and all(isinstance(number, Integral) for number in numbers)
    has_target = isinstance(target, Rational | float)
    if not has_numbers or not has_target:
        raise ValueError(
            f"ground_truth={ground_truth!r} ({type(ground_truth).__name__}): Countdown needs "
            '{"numbers": integers, "target": number}, as a mapping or as JSON'
        )


def _parse(answer: str) -> ast.expr | None:
    """Return the syntax tree of an arithmetic expression; None for any other text.

    An expression consists of integers, the signs + and -, the operators + - * /, and parentheses. There may be blanks.
    """
    if not _ARITHMETIC.fullmatch(answer):
        return None
    try:
        with _PARSER_LOCK:
            tree = ast.parse(answer, mode="eval").body
        return tree if _is_arithmetic(tree) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_arithmetic(node: ast.expr) -> bool:
    """Return whether a syntax tree has nothing but integers, signs, and the four operators.

    Python also parses operators such as ** and //, and tuples.
    """
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.UnaryOp):
        return type(node.op) in _UNARY and _is_arithmetic(node.operand)
    if isinstance(node, ast.BinOp):
        return type(node.op) in _BINARY and _is_arithmetic(node.left) and _is_arithmetic(node.right)
    return False


def _is_solution(expression: ast.expr, truth: Any) -> bool:
    """Return whether an expression uses each number exactly once and equals the target.

    Args:
        expression: the syntax tree from `_parse`.
        truth: the ground truth, decoded from JSON. It may be anything.
    """
    if not isinstance(truth, Mapping) or not isinstance(truth.get("target"), Rational | float):
        return False
    used = Counter(node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    try:
        # Numbers from Parquet are a list or an array. If there are too many or too few, they are not even looked at.
        numbers = truth.get("numbers")
        if len(numbers) != used.total() or used != Counter(numbers):
            return False
        return abs(_evaluate(expression) - Fraction(truth["target"])) <= TOLERANCE
    except (ArithmeticError, ValueError, TypeError, RecursionError):
        # A division by zero, a target that is not finite, numbers that cannot be counted, or a very deep expression.
        return False


def _evaluate(node: ast.expr) -> Fraction:
    """Return the exact value of a syntax tree from `_parse`.

    Raises:
        ZeroDivisionError: it divides by zero.
    """
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand))
    return Fraction(node.value)
