r"""Decides whether two answers are equal: as text, as plain numbers, or by math-verify.

The first two take microseconds and decide most answers. math-verify is asked about all accepted answers at once, so
that one limit covers the verdict (`processes`), and once, because responses to the same prompt share their right
answers, and often the given one.
"""

import importlib.util
import re
from functools import lru_cache

from verl_clipx.common.extras import needs_tool
from verl_clipx.papers.tasks.math import processes
from verl_clipx.papers.tasks.math.spelling import canonical, clean, parse_number
from verl_clipx.papers.tasks.math.units import split_units

for _module in ("math_verify", "pebble"):
    if importlib.util.find_spec(_module) is None:
        raise ModuleNotFoundError(needs_tool("a reward of mathematics", _module), name=_module)

# An unknown, a value of a function, an angle, a length or a pair of unknowns; not a calculation, which may be false.
_NAME = re.compile(
    r"\A(?:(?!(?:gcd|lcm|max|min|log|ln|exp|sin|cos|tan|sqrt)\()(?:m?\s*\\angle\s*)?"
    r"(?:[A-Za-z]+|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|rho|sigma|omega)(?![a-zA-Z]))'*"
    r"(?:_(?:\w|\{\w+\}))?(?:\^\{-1\})?(?:\s*\((?:[^()=]|\([^()=]*\))*\))?"
    r"|\\(?:gcd|max|min)\s*\((?=[^()]*[A-Za-z])[^()]*\)|\\text\{[^{}]*\}|\([A-Za-z](?:,\s*[A-Za-z])+\))"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*"
)
# Not two small letters: xy equals yx.
_WORD = re.compile(r"[A-Za-z]*[A-Z][A-Za-z]+|[A-Za-z]+[A-Z]|[A-Za-z]{3,}")
_APPROXIMATION = re.compile(r"\s*\\(?:approx|approxeq|simeq|sim)(?![a-zA-Z])\s*")
_DECIMAL = re.compile(r"\d\.\d")
# A number in a base. A letter with an index, such as a_{12}, is not one.
_INDEXED_NUMBER = re.compile(r"\d\)?_")
_IN_BASE = re.compile(r"\(?(?P<digits>[\dA-Z]+)\)?(?:_\{?(?P<base>\d+|[A-Z]+)\}?)?\)?", re.ASCII | re.IGNORECASE)
_BASES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def is_equivalent(answer: str, *golds: str) -> bool | None:
    r"""Return whether an answer is right for training.

    math-verify's conventions hold: `x=5` equals 5, 50\% equals 50 and 0.5, 0.333333 equals 1/3 (six decimals), and
    neither units nor the order of a set matter. However, the whole answer must be readable, words must be equal letter
    by letter, numbers, however small, differ by at most a thousandth of the larger one, and `a \approx b` counts as a,
    unless b contradicts it.

    Args:
        *golds: the right answer, or all answers that are accepted.

    Returns:
        The verdict. None if there is none, because one of the two cannot be read completely, a guard refused the
        comparison, or it took too long.
    """
    return _decide(answer, golds, strict=False)


def equal_answers(answer: str, *golds: str) -> bool | None:
    r"""Return whether an answer is right beyond reasonable doubt, as evaluation counts it.

    Unlike in `is_equivalent`, numbers must be exactly equal (0.333333 is not 1/3; 50\% is 0.5 and not 50) and have the
    same unit, unless one has none. A number without its base gets no verdict, a decimal does not equal a symbolic
    expression, and an ordered pair or interval does not equal a plain list. math-verify must also agree with the roles
    exchanged.
    """
    return _decide(answer, golds, strict=True)


def _decide(answer: str, golds: tuple[str, ...], strict: bool) -> bool | None:
    verdicts = [_compare(clean(answer), clean(gold), strict) for gold in golds]
    pairs = tuple(verdict for verdict in verdicts if isinstance(verdict, tuple))
    if pairs and True not in verdicts:
        verdicts.append(_ask(pairs, strict))
    return next((verdict for verdict in (True, None) if verdict in verdicts), False)


@lru_cache(maxsize=8192)
def _ask(pairs: tuple[tuple[str, str], ...], both_ways: bool) -> bool | None:
    return processes.compare(pairs, both_ways)


def _compare(answer: str, gold: str, strict: bool) -> bool | tuple[str, str] | None:
    """Return the verdict on two cleaned answers; if math-verify must decide, the right one and the given one."""
    if (answer + gold).count("=") == 1:
        # The name of a value, as in f(2)=5, if only one of them is an equation.
        answer, gold = _NAME.sub("", answer), _NAME.sub("", gold)
    if not answer or not gold:
        return False
    given, right = canonical(answer), canonical(gold)
    if given == right:
        return True
    if _WORD.fullmatch(given) and _WORD.fullmatch(right):
        # math-verify reads words as products of letters, so that CBA would equal ABC.
        return given.casefold() == right.casefold()
    values = split_units(answer, gold, strict)
    if values is None:
        return False
    answer, gold = values
    if bool(_APPROXIMATION.search(answer)) != bool(_APPROXIMATION.search(gold)):
        if strict:
            return False
        if _APPROXIMATION.search(answer):
            return _compare_approximation(answer, gold)
    if _INDEXED_NUMBER.search(f"{given} {right}"):
        return _compare_bases(answer, gold, strict)
    number, right_number = parse_number(answer), parse_number(gold)
    if number and right_number:
        if strict or number[0] == right_number[0]:
            return number[0] == right_number[0]
        if number[1] == right_number[1]:
            return True
        # math-verify rounds to six decimals, so that for it all numbers near zero are equal.
        if all(map(_differ, number, right_number)):
            return False
    elif strict and any(number and _DECIMAL.search(text) for number, text in ((number, answer), (right_number, gold))):
        return False
    return gold, answer


def _compare_approximation(answer: str, gold: str) -> bool | tuple[str, str] | None:
    parts = _APPROXIMATION.split(answer.strip())
    if not all(parts):
        return None
    numbers = [number[0] for number in map(parse_number, parts) if number]
    if numbers and _differ(min(numbers), max(numbers)):
        return False
    value = parts[1] if re.fullmatch("[A-Za-z]", parts[0]) else parts[0]
    return _compare(value, gold, strict=False)


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > max(abs(one), abs(other)) / 1000


def _compare_bases(answer: str, gold: str, strict: bool) -> bool | None:
    """Compare two numbers of which at least one has a base as its index, which math-verify would ignore."""
    given, right = _digits_and_base(answer), _digits_and_base(gold)
    if given is None or right is None:
        return None
    if given[1] and right[1]:
        return given == right
    # Without its base, a number is right if the question has named the base, which evaluation cannot know.
    return False if given[0] != right[0] else None if strict else True


def _digits_and_base(cleaned: str) -> tuple[str, int] | None:
    """Return a number's digits and its base, 0 if it has none; None for anything else, such as 9_8 or 5_x."""
    text = re.sub(r",(?=\d{3})", "", canonical(_NAME.sub("", cleaned)))
    match = _IN_BASE.fullmatch(text)
    if match is None or text.count("(") != text.count(")"):
        return None
    digits, name = match["digits"].upper(), (match["base"] or "").lower()
    if not name:
        return digits, 0
    try:
        base = _BASES.index(name) + 2 if name in _BASES else int(name)
        int(digits, base)
    except ValueError:  # no number, no base up to 36, or digits that it lacks
        return None
    return digits, base
