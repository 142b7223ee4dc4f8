r"""Decides whether two answers are equal: as text, as plain numbers, or by math-verify.

The first two take microseconds and decide most answers. math-verify is asked about all accepted answers in one
question, so that one limit covers the verdict (`processes`). Its verdicts are kept, because responses to the same
prompt share their right answers, and often give the same one.
"""

import importlib.util
import re
from fractions import Fraction
from functools import lru_cache

from verl_clipx.common.extras import needs_tool
from verl_clipx.papers.tasks.math import processes
from verl_clipx.papers.tasks.math.spelling import NUMERALS, SPELLINGS, canonical, clean, is_word, parse_number
from verl_clipx.papers.tasks.math.units import split_units

for _module in ("math_verify", "pebble"):
    if importlib.util.find_spec(_module) is None:
        raise ModuleNotFoundError(needs_tool("a reward of mathematics", _module), name=_module)

_NAME = re.compile(SPELLINGS["patterns"]["name"])
_CHOICE = re.compile(SPELLINGS["patterns"]["choice"])
_OFFER = re.compile(SPELLINGS["patterns"]["offer"])
_NAMES = {*SPELLINGS["names"].split()}
# A word of letters alone. Two letters are no word, nor are small ones without a vowel: xy equals yx, AB is the line BA,
# and mgh equals ghm.
_WORD = re.compile(r"[A-Z]{3,}|(?=.*[AEIOUYaeiouy])[A-Za-z]{3,}")
_APPROXIMATION = re.compile(r"\s*\\(?:approx|approxeq|simeq|sim)(?![a-zA-Z])\s*")
# A number with its base, such as (52)_8, or 1A_{16} with letters as digits. A letter with an index, such as a_{12}, is
# a variable.
_BASE = re.compile(r"\d\)?_|\d[A-Za-z]+\)?_\{?[1-3]\d")
_DECIMAL = re.compile(r"\d\.\d")
# The digits, and the base in digits or as a word.
_IN_BASE = re.compile(rf"([\da-z]+)(?:_([2-9]|[12]\d|3[0-6]|{'|'.join(NUMERALS[2:])}))?")
# The responses to one prompt often give the same answer.
_ask = lru_cache(maxsize=8192)(processes.compare)


def is_equivalent(answer: str, *golds: str) -> bool | None:
    r"""Return whether an answer equals one of those that are accepted, for training.

    math-verify's conventions hold:

    - `x=5` equals 5, 50\% equals 50 and 0.5, and 0.333333 equals 1/3 (six decimals);
    - a unit that only one of the two has does not matter, nor does the order of a set.

    It is stricter than math-verify in these:

    - The whole answer must be readable.
    - Words must be equal letter by letter.
    - Numbers, however small, may differ by at most a thousandth of the larger one.
    - A given answer `a \approx b` counts as a, unless b contradicts it. A right answer with that sign equals only the
      same text.
    - Two units must be the same.
    - Letters must have the same case, except in words and choices.

    Args:
        answer: the given answer.
        golds: the accepted answers.

    Returns:
        None if there is no verdict: one of the two cannot be read completely, a guard refused the comparison, or it
        took too long.
    """
    return _decide(answer, golds, strict=False)


def equal_answers(answer: str, *golds: str) -> bool | None:
    r"""Return whether an answer equals one of those that are accepted beyond reasonable doubt, as evaluation counts it.

    The rules of `is_equivalent` hold, and these:

    - Numbers must be exactly equal: 0.333333 is not 1/3, and 50\% is 0.5 and not 50.
    - A number without its base equals none that has one.
    - A decimal equals no symbolic expression.
    - An ordered pair or interval equals no plain list.
    - An answer with an approximation sign equals none without it.
    - math-verify must also find them equal with the roles exchanged.
    """
    return _decide(answer, golds, strict=True)


def _decide(answer: str, golds: tuple[str, ...], strict: bool) -> bool | None:
    """Return the verdict on an answer. math-verify is asked once, about all pairs that are still open.

    Args:
        strict: whether the rules of `equal_answers` hold instead of those of `is_equivalent`.
    """
    results = [_compare(clean(answer), clean(gold), strict) for gold in golds]
    if True in results:
        return True
    open_pairs = tuple(result for result in results if result is not False)
    if not open_pairs:
        return False
    return _ask(open_pairs, strict)


def _compare(answer: str, gold: str, strict: bool) -> bool | tuple[str, str]:
    """Compare two cleaned answers without math-verify.

    Returns:
        The verdict. If math-verify must decide, the pair for `comparison.judge` instead: the right answer and the given
        one, both without names, offers and units.
    """
    only_one_is_equation = (answer + gold).count("=") == 1
    if only_one_is_equation:
        # Its left side only names the value, as in f(2)=5.
        answer = _without_name(answer)
        gold = _without_name(gold)
    if not answer or not gold:
        return False
    # Both calls need the other answer before it is changed, so this is one assignment.
    answer, gold = _without_offer(answer, gold), _without_offer(gold, answer)
    verdict = _compare_texts(answer, gold)
    if verdict is not None:
        return verdict
    values = split_units(answer, gold)
    if values is None:
        # Their units contradict each other.
        return False
    answer, gold = values
    answer_is_approximate = _APPROXIMATION.search(answer) is not None
    gold_is_approximate = _APPROXIMATION.search(gold) is not None
    if answer_is_approximate != gold_is_approximate:
        if strict:
            return False
        if answer_is_approximate:
            return _compare(_first_value(answer), gold, strict)
        # An approximate right answer is not split. math-verify cannot read the sign, so that it gives no verdict.
    if _BASE.search(f"{answer} {gold}"):
        # If both answers are equations, they still have their names. These are not compared.
        given = canonical(_without_name(answer))
        right = canonical(_without_name(gold))
        return _compare_bases(given, right, strict)
    verdict = _compare_numbers(answer, gold, strict)
    if verdict is not None:
        return verdict
    return gold, answer


def _compare_texts(answer: str, gold: str) -> bool | None:
    """Compare two answers as texts: letter by letter, as words, and as choices.

    Returns:
        None if the texts decide nothing.
    """
    given = canonical(answer)
    right = canonical(gold)
    if given == right:
        return True
    if given.casefold() == right.casefold():
        if is_word(given, right):
            return True
    elif _WORD.fullmatch(given) and _WORD.fullmatch(right):
        # math-verify reads words as products of letters, so that CBA would equal ABC.
        return False
    has_choice = _CHOICE.fullmatch(answer) or _CHOICE.fullmatch(gold)
    if has_choice and given.strip("().").casefold() == right.strip("().").casefold():
        return True
    return None


def _compare_numbers(answer: str, gold: str, strict: bool) -> bool | None:
    """Compare two values, of which at least one is a plain number. Return None if math-verify must decide."""
    number = parse_number(answer)
    right_number = parse_number(gold)
    if number and right_number:
        exact, without_percent = number
        right_exact, right_without_percent = right_number
        if exact == right_exact:
            return True
        if strict:
            return False
        if without_percent == right_without_percent:
            return True
        # This is not left to math-verify, which rounds to six decimals: for it, all numbers near zero are equal.
        if _differ(exact, right_exact) and _differ(without_percent, right_without_percent):
            return False
        return None
    if strict:
        # At most one of the two is a plain number. If that is a decimal, it equals no symbolic expression.
        if number and _DECIMAL.search(answer):
            return False
        if right_number and _DECIMAL.search(gold):
            return False
    return None


def _without_name(text: str) -> str:
    r"""Return an answer without the name of its value: 5 for `\text{Area}=5`; an answer without one unchanged.

    The words of a name are in the list "names" of spellings.yaml. "not" and "twice", for instance, name no value.
    """
    name = _NAME.match(text)
    if name is None:
        return text
    letters = re.sub(r"\\[A-Za-z]+|\(.*", " ", name[0])
    # In plain letters, AB is a length and mgh a product.
    word_pattern = "[A-Za-z]{2,}" if name[0].startswith(r"\text") else "[A-Za-z][a-z]{3,}"
    words = re.findall(word_pattern, letters)
    if all(word.lower() in _NAMES for word in words):
        return text[name.end() :]
    return text


def _without_offer(answer: str, other: str) -> str:
    r"""Return the part of `\textbf{(B)} 14` that the other answer has too: (B) if that is a choice, otherwise 14.

    The answer is returned unchanged if it is not a choice with what it offers, or if the other answer is one as well.
    """
    offer = _OFFER.match(answer)
    if not offer or _OFFER.match(other):
        return answer
    if _CHOICE.fullmatch(other):
        letter = offer[1] or offer[2]
        return f"({letter})"
    return answer[offer.end() :]


def _first_value(text: str) -> str:
    r"""Return a of `a \approx b`, or b if a is an unknown.

    "" is returned if a or b is missing, if b has no digit, or if a and b are numbers that differ.
    """
    parts = _APPROXIMATION.split(text)
    if not all(parts):
        return ""
    numbers = [parse_number(part) for part in parts]
    exact = [number[0] for number in numbers if number is not None]
    if exact and _differ(min(exact), max(exact)):
        return ""
    is_unknown = re.fullmatch("[A-Za-z]", parts[0]) is not None
    if is_unknown:
        return parts[-1]
    if all(re.search(r"\d", part) for part in parts[1:]):
        return parts[0]
    return ""


def _differ(first: Fraction, second: Fraction) -> bool:
    """Return whether two numbers differ by more than a thousandth of the larger one."""
    return abs(first - second) > max(abs(first), abs(second)) / 1000


def _compare_bases(given: str, right: str, strict: bool) -> bool:
    r"""Compare numbers such as 1,203_4, (52)_8 or 52_{\text{eight}}, whose bases math-verify would ignore.

    Args:
        given: the given answer, as `canonical` spells it.
        right: the right answer, as `canonical` spells it.
        strict: whether a number without its base equals none that has one.
    """
    given_number = _read_in_base(given)
    right_number = _read_in_base(right)
    if given_number is None or right_number is None:
        return False
    digits, given_base = given_number
    right_digits, right_base = right_number
    if digits != right_digits:
        return False
    for base in (given_base, right_base):
        if base is not None and not _has_digits_of(digits, base):
            return False
    if given_base == right_base:
        return True
    # A number without its base is right if the question has named the base. Evaluation cannot know whether it has.
    return not strict and (given_base is None or right_base is None)


def _read_in_base(text: str) -> tuple[str, int | None] | None:
    """Read a number in any base.

    Returns:
        Its digits as a text, and its base, or None if the text names no base. None instead of both if the text is no
        such number.
    """
    plain = re.sub(r",(?=\d{3})|[{}]", "", text.lower())
    match = _IN_BASE.fullmatch(re.sub(r"\((\w+)\)", r"\1", plain))
    if match is None:
        return None
    digits, base = match.groups()
    if base is None:
        return digits, None
    if base in NUMERALS:
        return digits, NUMERALS.index(base)
    return digits, int(base)


def _has_digits_of(number: str, base: int) -> bool:
    """Return whether all digits of a number belong to this base. The digits after 9 are a to z."""
    return all(int(digit, 36) < base for digit in number)
