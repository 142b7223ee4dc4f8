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
from verl_clipx.papers.tasks.math.spelling import NUMERALS, SPELLINGS, canonical, clean, is_word, parse_number
from verl_clipx.papers.tasks.math.units import split_units

for _module in ("math_verify", "pebble"):
    if importlib.util.find_spec(_module) is None:
        raise ModuleNotFoundError(needs_tool("a reward of mathematics", _module), name=_module)

_NAME, _CHOICE, _OFFER = (re.compile(SPELLINGS["patterns"][name]) for name in ("name", "choice", "offer"))
_NAMES = {*SPELLINGS["names"].split()}
# Not two letters, or small ones without a vowel: xy equals yx, AB is the line BA, and mgh equals ghm.
_WORD = re.compile(r"[A-Z]{3,}|(?=.*[AEIOUYaeiouy])[A-Za-z]{3,}")
_APPROXIMATION = re.compile(r"\s*\\(?:approx|approxeq|simeq|sim)(?![a-zA-Z])\s*")
_IN_BASE = re.compile(rf"([\da-z]+)(?:_([2-9]|[12]\d|3[0-6]|{'|'.join(NUMERALS[2:])}))?")
# The responses to one prompt often give the same answer.
_ask = lru_cache(maxsize=8192)(processes.compare)


def is_equivalent(answer: str, *golds: str) -> bool | None:
    r"""Return whether an answer equals one of those that are accepted, for training.

    math-verify's conventions hold: `x=5` equals 5, 50\% equals 50 and 0.5, 0.333333 equals 1/3 (six decimals), and
    neither a unit that one of them lacks nor the order of a set matters. However, the whole answer must be readable,
    words must be equal letter by letter, numbers, however small, differ by at most a thousandth of the larger one, and
    `a \approx b` counts as a, unless b contradicts it. Two units must be the same, and letters have the same case,
    except in words and choices.

    None means that there is no verdict: one of the two cannot be read completely, a guard refused the comparison, or
    it took too long.
    """
    return _decide(answer, golds, strict=False)


def equal_answers(answer: str, *golds: str) -> bool | None:
    r"""Return the same beyond reasonable doubt, as evaluation counts it.

    Unlike in `is_equivalent`, numbers must be exactly equal (0.333333 is not 1/3; 50\% is 0.5 and not 50). A
    number without its base equals none that has one, a decimal no symbolic expression, and an ordered pair or interval
    no plain list. math-verify must also agree with the roles exchanged.
    """
    return _decide(answer, golds, strict=True)


def _decide(answer: str, golds: tuple[str, ...], strict: bool) -> bool | None:
    verdicts = [_compare(clean(answer), clean(gold), strict) for gold in golds]
    pairs = tuple(verdict for verdict in verdicts if isinstance(verdict, tuple))
    return True in verdicts or (bool(pairs) and _ask(pairs, strict))


def _compare(answer: str, gold: str, strict: bool) -> bool | tuple[str, str]:
    """Return the verdict on two cleaned answers; if math-verify must decide, the right one and the given one."""
    if (answer + gold).count("=") == 1:
        # The name of a value, as in f(2)=5, if only one of them is an equation.
        answer, gold = _without_name(answer), _without_name(gold)
    if not answer or not gold:
        return False
    answer, gold = _without_offer(answer, gold), _without_offer(gold, answer)
    given, right = canonical(answer), canonical(gold)
    if given == right:
        return True
    if given.casefold() == right.casefold():
        if is_word(given, right):
            return True
    elif _WORD.fullmatch(given) and _WORD.fullmatch(right):
        # math-verify reads words as products of letters, so that CBA would equal ABC.
        return False
    letters = [text.strip("().").casefold() for text in (given, right)]
    if letters[0] == letters[1] and (_CHOICE.fullmatch(answer) or _CHOICE.fullmatch(gold)):
        return True
    values = split_units(answer, gold)
    if values is None:
        return False
    answer, gold = values
    if bool(_APPROXIMATION.search(answer)) != bool(_APPROXIMATION.search(gold)):
        if strict:
            return False
        if _APPROXIMATION.search(answer):
            return _compare(_first_value(answer), gold, strict)
    # A letter with an index, such as a_{12}, is a variable.
    if re.search(r"\d\)?_|\d[A-Za-z]+\)?_\{?[1-3]\d", f"{answer} {gold}"):
        return _compare_bases(*(canonical(_without_name(text)) for text in (answer, gold)), strict)
    number, right_number = parse_number(answer), parse_number(gold)
    if number and right_number:
        if number[0] == right_number[0] or (not strict and number[1] == right_number[1]):
            return True
        # math-verify rounds to six decimals, so that for it all numbers near zero are equal.
        if strict or all(map(_differ, number, right_number)):
            return False
    elif strict and any(n and re.search(r"\d\.\d", text) for n, text in ((number, answer), (right_number, gold))):
        return False
    return gold, answer


def _without_name(text: str) -> str:
    r"""Return the value that an equation names, as in `\text{Area}=5`; "not" and "twice" name no value."""
    name = _NAME.match(text)
    if name is None:
        return text
    letters = re.sub(r"\\[A-Za-z]+|\(.*", " ", name[0])
    # In plain letters, AB is a length and mgh a product.
    words = re.findall("[A-Za-z]{2,}" if name[0].startswith(r"\text") else "[A-Za-z][a-z]{3,}", letters)
    return text[name.end() :] if _NAMES.issuperset(word.lower() for word in words) else text


def _without_offer(answer: str, other: str) -> str:
    r"""Return the letter or the rest of `\textbf{(B)} 14`, of which the other answer says only one."""
    offer = _OFFER.match(answer)
    if not offer or _OFFER.match(other):
        return answer
    return f"({offer[1] or offer[2]})" if _CHOICE.fullmatch(other) else answer[offer.end() :]


def _first_value(text: str) -> str:
    r"""Return a of `a \approx b`, or b if a is an unknown; "" if one is missing or no value, or they differ."""
    parts = _APPROXIMATION.split(text)
    numbers = [number[0] for number in map(parse_number, parts) if number]
    if not all(parts) or (numbers and _differ(min(numbers), max(numbers))):
        return ""
    if re.fullmatch("[A-Za-z]", parts[0]):
        return parts[-1]
    return parts[0] if all(re.search(r"\d", part) for part in parts[1:]) else ""


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > max(abs(one), abs(other)) / 1000


def _compare_bases(given: str, right: str, strict: bool) -> bool:
    r"""Compare numbers such as 1,203_4, (52)_8 or 52_{\text{eight}}, whose bases math-verify would ignore."""
    plain = (re.sub(r",(?=\d{3})|[{}]", "", text.lower()) for text in (given, right))
    numbers = [_IN_BASE.fullmatch(re.sub(r"\((\w+)\)", r"\1", text)) for text in plain]
    if None in numbers or numbers[0][1] != numbers[1][1]:
        return False
    # Without its base, a number is right if the question has named the base, which evaluation cannot know.
    bases = {str(NUMERALS.index(number[2])) if number[2] in NUMERALS else number[2] for number in numbers}
    if any(base and not _has_digits_of(numbers[0][1], int(base)) for base in bases):
        return False
    return len(bases) == 1 or (None in bases and not strict)


def _has_digits_of(number: str, base: int) -> bool:
    return all(int(digit, 36) < base for digit in number)
