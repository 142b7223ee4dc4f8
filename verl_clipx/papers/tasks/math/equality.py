r"""Compares answers as text, as plain numbers, or by math-verify.

The first two take microseconds and decide most answers. math-verify runs in the processes of `pool.py`, for all
accepted answers at once, so that one time limit covers the verdict. Each question is asked once, because responses to
the same prompt share their right answers, and often the given one.
"""

import importlib.util
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from verl_clipx.common.extras import needs_tool
from verl_clipx.papers.tasks.math.guards import is_safe
from verl_clipx.papers.tasks.math.normalisation import (
    INEQUALITY,
    Number,
    canonical,
    clean,
    parse_number,
    split_unit,
    strip_bare_unit,
)
from verl_clipx.papers.tasks.math.pool import shared_pool

if importlib.util.find_spec("math_verify") is None:
    raise ModuleNotFoundError(needs_tool("a reward of mathematics", "math_verify"), name="math_verify")

_CACHED_QUESTIONS = 8192
_DECIMAL = re.compile(r"\d\.\d")
# An unknown, a value of a function, an angle, a length or a pair of unknowns; not a calculation, which may be false.
_NAME = re.compile(
    r"(?:(?!(?:gcd|lcm|max|min|log|ln|exp|sin|cos|tan|sqrt)\()(?:m?\s*\\angle\s*)?"
    r"(?:[A-Za-z]+|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|varphi|rho|sigma|omega)(?![a-zA-Z]))'*"
    r"(?:_(?:\w|\{\w+\}))?(?:\^\{-1\})?(?:\s*\((?:[^()=]|\([^()=]*\))*\))?"
    r"|\\(?:gcd|max|min)\s*\((?=[^()]*[A-Za-z])[^()=]*\)|\\text\{[^{}]*\}|\([A-Za-z](?:,\s*[A-Za-z])+\))"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*"
)
# Not two small letters: xy equals yx.
_WORD = re.compile(r"[A-Za-z]*[A-Z][A-Za-z]+|[A-Za-z]+[A-Z]|[A-Za-z]{3,}")
# A text after an answer that adds another one or takes it back. The digit of cm3 or m^2 is part of a unit.
_SECOND_ANSWER = re.compile(
    r".\s*\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}"
    r"\{[^{}\\]*(?:(?<![A-Za-z^])\d|\b(?:or|and|but|not|wrong|incorrect)\b)[^{}\\]*\}\W*$"
)
# A text between two formulas, after which another answer begins. Short texts are functions and units.
_TEXT_BETWEEN = re.compile(
    r"\S\s*\\(?:text|textbf|textit|textrm|mbox)\s{0,4}\{[^{}\\]*[A-Za-z]{3}[^{}\\]*\}\s*"
    r"(?!\\(?:cdot|times|text|mathrm|mbox)(?![a-zA-Z]))[\w\\({\[]"
)
# A number in a base. A letter with an index, such as a_{12}, is not one.
_BASE = re.compile(
    r"(?P<open>\()?(?P<digits>(?=[A-F]*\d)[\dA-F]+(?:(?:\{,\}|,)\d{3})*)(?(open)\))"
    r"_(?:\{(?P<braced>\w{1,5})\}|(?P<bare>\w))",
    re.ASCII | re.IGNORECASE,
)
_BASE_NAMES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_SUBSCRIPTED_NUMBER = re.compile(r"\d\)?_")
_OR = re.compile(r"\\(?:lor|vee)(?![a-zA-Z])")
_APPROXIMATION = re.compile(r"\\(?:approx|approxeq|simeq|sim)(?![a-zA-Z])")
_MAGNITUDE = re.compile(
    r"(?<![A-Za-z\\])(?:hundred|thousand|million|billion|trillion|dozen)s?(?![A-Za-z])", re.IGNORECASE
)
_COMMA = re.compile(r",(?!\d{3}(?!\d))|,\s")


# A question for math-verify: the right answer and the given one.
_Pair = tuple[str, str]


def is_equivalent(answer: str, *golds: str) -> bool | None:
    r"""Return whether an answer is right for training.

    math-verify's conventions hold: `x=5` equals 5, 50\% equals 50 and 0.5, `3,500` equals 3500, 0.333333 equals 1/3
    (six decimals), and neither units nor the order of a set matter. However, the whole answer must be readable, words
    must be equal letter by letter, and numbers that differ by more than a thousandth of the larger one are not equal,
    however small they are. `5\text{ or 6}`, `x=5 \lor x=6` and `5\text{ million}` are not 5, `8=7` is not 7, `2516_7`
    is not `2516_8` (but equals 2516), and `a \approx b` counts as a, unless b contradicts it.

    Args:
        answer: the response's answer, without the box.
        *golds: the right answer, or all answers that are accepted.

    Returns:
        The verdict. None if there is none, because one of the two cannot be read completely, a guard refused the
        comparison, or it took too long.
    """
    return _decide(_compare_leniently, answer, golds, both_ways=False)


def equal_answers(answer: str, *ground_truths: str) -> bool | None:
    r"""Return whether an answer is right beyond reasonable doubt, as evaluation counts it.

    Unlike in `is_equivalent`, numbers must be exactly equal (0.333333 is not 1/3; 50\% is 0.5 and not 50) and have the
    same unit, unless one has none. A number without its base gets no verdict, a decimal does not equal a symbolic
    expression, and an ordered pair or interval does not equal a plain list. math-verify must also agree with the roles
    exchanged.

    Args:
        answer: the response's answer, without the box.
        *ground_truths: the right answer, or all answers that are accepted.

    Returns:
        The verdict; None in the same cases as in `is_equivalent`.
    """
    return _decide(_compare_conservatively, answer, ground_truths, both_ways=True)


def _decide(
    compare: Callable[[str, str], bool | _Pair | None], answer: str, golds: tuple[str, ...], both_ways: bool
) -> bool | None:
    results = [compare(*_without_name(clean(answer), clean(gold))) for gold in golds]
    if any(result is True for result in results):
        return True
    open_pairs = [result for result in results if isinstance(result, tuple)]
    safe_pairs = tuple(pair for pair in open_pairs if all(map(is_safe, pair)))
    verdict = _compare_symbolically(safe_pairs, both_ways) if safe_pairs else False
    refused = None in results or len(safe_pairs) < len(open_pairs)
    return None if verdict is False and refused else verdict


def _compare_leniently(answer: str, gold: str) -> bool | _Pair | None:
    """Return the verdict on two cleaned answers for training, or the pair, for math-verify to decide."""
    verdict = _compare_as_text(answer, gold)
    if verdict is not None:
        return verdict
    if _SECOND_ANSWER.search(answer) and not _SECOND_ANSWER.search(gold):
        return False
    if _gives_another(answer, gold) or _magnitudes(answer) != _magnitudes(gold):
        return False
    if _APPROXIMATION.search(answer) and not _APPROXIMATION.search(gold):
        return _compare_approximation(answer, gold)
    if _SUBSCRIPTED_NUMBER.search(canonical(answer) + " " + canonical(gold)):
        return _compare_bases(answer, gold, without_base=True)
    (answer, _), (gold, _) = _split_units(answer, gold)
    given, right = parse_number(answer), parse_number(gold)
    if given is not None and right is not None:
        if given.value == right.value or _face_value(given) == _face_value(right):
            return True
        if given.literal_integer and right.literal_integer:
            return False
        # math-verify rounds to six decimals, so that for it all numbers near zero are equal.
        if _differ(given.value, right.value) and _differ(_face_value(given), _face_value(right)):
            return False
    return gold, answer


def _compare_conservatively(answer: str, gold: str) -> bool | _Pair | None:
    """Return the verdict on two cleaned answers for evaluation, or the pair, for math-verify to decide."""
    verdict = _compare_as_text(answer, gold)
    if verdict is not None:
        return verdict
    if any(bool(mark.search(answer)) != bool(mark.search(gold)) for mark in (_SECOND_ANSWER, _APPROXIMATION)):
        return False
    if _gives_another(answer, gold) or _gives_another(gold, answer) or _magnitudes(answer) != _magnitudes(gold):
        return False
    if _SUBSCRIPTED_NUMBER.search(canonical(answer) + " " + canonical(gold)):
        return _compare_bases(answer, gold, without_base=None)
    (answer, unit), (gold, unit_of_gold) = _split_units(answer, gold)
    if unit and unit_of_gold and unit != unit_of_gold:
        return False
    given, right = parse_number(answer), parse_number(gold)
    if given is not None and right is not None:
        return given.value == right.value
    if ("%" in answer) != ("%" in gold):
        return False
    # x > 3 equals the interval of its solutions, so brackets count only between answers of the same kind.
    both_alike = bool(INEQUALITY.search(answer)) == bool(INEQUALITY.search(gold))
    if both_alike and _delimiters(answer) != _delimiters(gold):
        return False
    if (_is_decimal(answer) and right is None) or (_is_decimal(gold) and given is None):
        return False
    return gold, answer


def _without_name(answer: str, gold: str) -> tuple[str, str]:
    """Return both texts without the name of a value, as in f(2)=5, if only one of them is an equation."""
    if answer.count("=") + gold.count("=") == 1:
        answer, gold = (
            _NAME.sub("", text, count=1) if _NAME.match(text) and "=" in text else text for text in (answer, gold)
        )
    return answer, gold


def _split_units(answer: str, gold: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return each text without its unit, and the unit. One in plain letters is one only if the other text has it."""
    (answer, unit), (gold, unit_of_gold) = split_unit(answer), split_unit(gold)
    if unit_of_gold and not unit:
        answer = strip_bare_unit(answer, unit_of_gold)
    elif unit and not unit_of_gold:
        gold = strip_bare_unit(gold, unit)
    return (answer, unit), (gold, unit_of_gold)


@lru_cache(maxsize=_CACHED_QUESTIONS)
def _compare_symbolically(pairs: tuple[_Pair, ...], both_ways: bool) -> bool | None:
    return shared_pool().compare(pairs, both_ways)


def _compare_as_text(answer: str, gold: str) -> bool | None:
    """Return the verdict if the spelling decides (an empty answer, the same spelling, two words), else None."""
    if not answer or not gold:
        return False
    given, right = canonical(answer), canonical(gold)
    if given == right:
        return True
    # math-verify reads words as products of letters, so that CBA would equal ABC.
    return given.casefold() == right.casefold() if _WORD.fullmatch(given) and _WORD.fullmatch(right) else None


def _gives_another(answer: str, gold: str) -> bool:
    """Return whether an answer names a second one, after `or` or a text, although the right answer names only one."""
    # Joined inequalities are one set of numbers, which math-verify compares.
    marks = (_TEXT_BETWEEN,) if INEQUALITY.search(answer) else (_OR, _TEXT_BETWEEN)
    return any(mark.search(answer) and not mark.search(gold) and not _COMMA.search(gold) for mark in marks)


def _magnitudes(cleaned: str) -> list[str]:
    """Return words such as "million", which give the same digits another value."""
    return [word.lower().removesuffix("s") for word in _MAGNITUDE.findall(cleaned)]


def _compare_bases(answer: str, gold: str, without_base: bool | None) -> bool | None:
    """Compare two numbers of which at least one has a base as its index, which math-verify would ignore.

    Args:
        without_base: the verdict if the digits are equal but one number has no base. The question must have named it.
    """
    given, right = _digits_and_base(answer), _digits_and_base(gold)
    if given is None or right is None:
        return None
    if given[1] and right[1]:
        return given == right
    return without_base if given[0] == right[0] else False


def _digits_and_base(cleaned: str) -> tuple[str, int] | None:
    """Return a number's digits and its base, 0 if it has none; None for anything else, such as 9_8 or 5_x."""
    text = canonical(_NAME.sub("", cleaned, count=1) if _NAME.match(cleaned) else cleaned)
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    found = _BASE.fullmatch(text)
    digits, name = (found["digits"], found["braced"] or found["bare"]) if found else (text, "")
    digits = re.sub(r"[{},]", "", digits).upper()
    if found is None:
        return (digits, 0) if digits.isascii() and digits.isalnum() else None
    base = _BASE_NAMES.get(name.lower()) or int(name if name.isdigit() else 0)
    return (digits, base) if all(int(digit, 36) < base <= 36 for digit in digits) else None


def _compare_approximation(answer: str, gold: str) -> bool | _Pair | None:
    first, *others = [part.strip() for part in _APPROXIMATION.split(answer)]
    if not first or not all(others):
        return None
    if re.fullmatch("[A-Za-z]", first) and len(others) == 1:
        return _compare_leniently(others[0], gold)
    numbers = [parse_number(part) for part in (first, *others)]
    if all(numbers) and any(_differ(numbers[0].value, number.value) for number in numbers[1:]):
        return False
    return _compare_leniently(first, gold)


def _face_value(number: Number) -> Fraction:
    return number.value * 100 if number.percent else number.value


def _differ(one: Fraction, other: Fraction) -> bool:
    return abs(one - other) > max(abs(one), abs(other)) / 1000


def _is_decimal(cleaned: str) -> bool:
    return _DECIMAL.search(cleaned) is not None and parse_number(cleaned) is not None


def _delimiters(cleaned: str) -> str:
    """Return the outer brackets of an interval, pair or tuple; "" for a set or a plain list, whose order is free."""
    cleaned = _NAME.sub("", cleaned, count=1) if _NAME.match(cleaned) else cleaned
    if cleaned and cleaned[0] in "([" and cleaned[-1] in ")]" and _COMMA.search(cleaned[1:-1]):
        depth = 0
        for position, character in enumerate(cleaned):
            depth += (character in "([") - (character in ")]")
            if depth == 0:
                # A list of pairs and a union of intervals have no outer brackets; all numbers are a set too.
                is_outer = position == len(cleaned) - 1 and canonical(cleaned) != r"(-\infty,\infty)"
                return cleaned[0] + cleaned[-1] if is_outer else ""
    return ""
