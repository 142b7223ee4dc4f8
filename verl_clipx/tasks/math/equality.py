r"""Whether two answers are equal: as text, as plain numbers, or as math-verify sees it.

The first two cost microseconds and decide most answers; the third runs in the processes of `pool.py`. A pair is
compared once: the responses to one prompt share their right answer and often the given one.
"""

import importlib.util
import re
from fractions import Fraction
from functools import lru_cache

from verl_clipx.extras import needs_tool
from verl_clipx.tasks.math.guards import is_safe
from verl_clipx.tasks.math.normalisation import Number, canonical, clean, parse_number, split_unit
from verl_clipx.tasks.math.pool import shared_pool

if importlib.util.find_spec("math_verify") is None:
    raise ModuleNotFoundError(needs_tool("a reward of mathematics", "math_verify"), name="math_verify")

_CACHED_PAIRS = 8192
_DECIMAL = re.compile(r"\d\.\d")
_NAME = re.compile(r"[A-Za-z]\s*(?:=|\\in(?![A-Za-z]))\s*")
# Not two small letters: xy equals yx.
_WORD = re.compile(r"[A-Za-z]*[A-Z][A-Za-z]+|[A-Za-z]+[A-Z]|[A-Za-z]{3,}")
# A text behind an answer that is more than its unit; the digit of cm3 or m^2 is part of one.
_SECOND_ANSWER = re.compile(
    r".\s*\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}\{[^{}\\]*(?:(?<![A-Za-z^])\d|\b(?:or|and)\b)[^{}\\]*\}\W*$"
)
# A text between two formulas: what stands behind it is another answer. Short ones are functions and units.
_TEXT_BETWEEN = re.compile(
    r"\S\s*\\(?:text|textbf|textit|textrm|mbox)\s{0,4}\{[^{}\\]*[A-Za-z]{3}[^{}\\]*\}\s*"
    r"(?!\\(?:cdot|times|text|mathrm|mbox)(?![a-zA-Z]))[\w\\({\[]"
)
_BASE = re.compile(r"[0-9A-Fa-f]+_(?:\{(?P<braced>\d+)\}|(?P<bare>\d+))")
_OR = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])")
_APPROXIMATION = re.compile(r"\\(?:approx|approxeq|simeq|sim)(?![a-zA-Z])")
_MAGNITUDE = re.compile(
    r"(?<![A-Za-z\\])(?:hundred|thousand|million|billion|trillion|dozen)s?(?![A-Za-z])", re.IGNORECASE
)
_COMMA = re.compile(r",(?!\d{3}(?!\d))|,\s")


def is_equivalent(answer: str, gold: str) -> bool | None:
    r"""Return whether an answer is right, as training counts it.

    math-verify's conventions hold: `x=5` equals 5, 50\% equals 50 and 0.5, `3,500` equals 3500, 0.333333 equals 1/3
    (six decimals), units and the order of a set don't matter. But words are equal letter by letter, numbers that differ
    by more than a thousandth are not equal, however small they are, `5\text{ or 6}` and `x=5 \lor x=6` are not 5,
    `5\text{ million}` is not 5, `2516_7` is not `2516_8`, and `a \approx b` gives a, if b doesn't contradict it.

    Args:
        answer: what the response gives, without the box.
        gold: the right answer.

    Returns:
        The verdict; None if it could not be reached: a guard refused the comparison, or it took too long.
    """
    answer, gold = clean(answer), clean(gold)
    if not answer or not gold:
        return False
    if canonical(answer) == canonical(gold):
        return True
    if _are_words(answer, gold):
        return canonical(answer).casefold() == canonical(gold).casefold()
    if _SECOND_ANSWER.search(answer) and not _SECOND_ANSWER.search(gold):
        return False
    if _gives_another(answer, gold) or _scaled_otherwise(answer, gold):
        return False
    if _APPROXIMATION.search(answer) and not _APPROXIMATION.search(gold):
        return _is_first_of_approximation(answer, gold)
    given, right = parse_number(answer), parse_number(gold)
    if given is not None and right is not None:
        if given.value == right.value or _face_value(given) == _face_value(right):
            return True
        if given.literal_integer and right.literal_integer:
            return False
        # math-verify rounds to six decimals: to it, all numbers near zero are one.
        if _differ(given.value, right.value) and _differ(_face_value(given), _face_value(right)):
            return False
    return _compare_symbolically(gold, answer, False)


def equal_answers(answer: str, ground_truth: str) -> bool | None:
    r"""Return whether two answers are equal beyond reasonable doubt, as evaluation counts it; in doubt, they are not.

    Unlike `is_equivalent`: numbers are equal exactly or not at all (0.333333 is not 1/3, 50\% is 0.5 and not 50) and
    have the same unit or one of them has none, a decimal does not equal a symbolic expression, an ordered pair or
    interval does not equal a plain list, and math-verify has to agree with the roles exchanged.

    Args:
        answer: what the response gives, without the box.
        ground_truth: the right answer.

    Returns:
        The verdict; None if it could not be reached: a guard refused the comparison, or it took too long.
    """
    answer, gold = clean(answer), clean(ground_truth)
    if not answer or not gold:
        return False
    if canonical(answer) == canonical(gold):
        return True
    if _are_words(answer, gold):
        return canonical(answer).casefold() == canonical(gold).casefold()
    if any(bool(mark.search(answer)) != bool(mark.search(gold)) for mark in (_SECOND_ANSWER, _APPROXIMATION)):
        return False
    if _gives_another(answer, gold) or _gives_another(gold, answer) or _scaled_otherwise(answer, gold):
        return False
    (plain_answer, unit), (plain_gold, unit_of_gold) = split_unit(answer), split_unit(gold)
    given, right = parse_number(plain_answer), parse_number(plain_gold)
    if given is not None and right is not None:
        return given.value == right.value and (unit == unit_of_gold or not unit or not unit_of_gold)
    if ("%" in answer) != ("%" in gold) or _delimiters(answer) != _delimiters(gold):
        return False
    if (_is_decimal(answer) and right is None) or (_is_decimal(gold) and given is None):
        return False
    return _compare_symbolically(gold, answer, True)


@lru_cache(maxsize=_CACHED_PAIRS)
def _compare_symbolically(gold: str, answer: str, both_ways: bool) -> bool | None:
    if not is_safe(gold) or not is_safe(answer):
        return None
    return shared_pool().compare(gold, answer, both_ways)


def _are_words(*cleaned: str) -> bool:
    """Return whether all are words, which math-verify reads as products of letters: CBA would equal ABC."""
    return all(_WORD.fullmatch(canonical(text)) for text in cleaned)


def _gives_another(answer: str, gold: str) -> bool:
    """Return whether an answer to a question with one right answer names a second one behind `or` or a text."""
    return any(
        mark.search(answer) and not mark.search(gold) and not _COMMA.search(gold) for mark in (_OR, _TEXT_BETWEEN)
    )


def _scaled_otherwise(answer: str, gold: str) -> bool:
    """Return whether words such as million, or the bases of both, give the same digits another size."""
    words, bases = zip(*map(_scale, (answer, gold)), strict=True)
    return words[0] != words[1] or (all(bases) and bases[0] != bases[1])


def _scale(cleaned: str) -> tuple[list[str], str]:
    base = _BASE.fullmatch(cleaned)
    words = [word.lower().removesuffix("s") for word in _MAGNITUDE.findall(cleaned)]
    return words, (base["braced"] or base["bare"]) if base else ""


def _is_first_of_approximation(answer: str, gold: str) -> bool | None:
    first, *others = [part.strip() for part in _APPROXIMATION.split(answer)]
    if re.fullmatch("[A-Za-z]", first) and len(others) == 1:
        return is_equivalent(others[0], gold)
    numbers = [parse_number(part) for part in (first, *others)]
    if all(numbers) and any(_differ(numbers[0].value, number.value) for number in numbers[1:]):
        return False
    return is_equivalent(first, gold)


def _face_value(number: Number) -> Fraction:
    return number.value * 100 if number.percent else number.value


def _differ(one: Fraction, other: Fraction) -> bool:
    return abs(one - other) > max(abs(one), abs(other)) / 1000


def _is_decimal(cleaned: str) -> bool:
    return _DECIMAL.search(cleaned) is not None and parse_number(cleaned) is not None


def _delimiters(cleaned: str) -> str:
    """Return the outer brackets of an interval, pair or tuple, or nothing; a set is a list whose order is free."""
    cleaned = _NAME.sub("", cleaned, count=1) if _NAME.match(cleaned) else cleaned
    if cleaned and cleaned[0] in "([" and cleaned[-1] in ")]" and _COMMA.search(cleaned[1:-1]):
        return cleaned[0] + cleaned[-1]
    return ""
