r"""Splits the unit off an answer: `\text{…}` after it, a degree sign, a dollar sign before it."""

import re

from verl_clipx.papers.tasks.math.spelling import TEXT

_UNIT_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}\{[^{}]*\}"
_POWER = r"\^(?:\{\s*-?\d\s*\}|-?\d)"
_FACTORS = rf"\s*((?:{_UNIT_TEXT}(?:{_POWER})?\s*)+)"
_QUOTIENT = re.compile(rf"\\frac\s*\{{{_FACTORS}\}}\s*\{{{_FACTORS}\}}")
_DOLLAR = re.compile(r"(-?)\s*(?:\\\$|\\(?:text|mathrm)\{\s*\\?\$\s*\})\s*")
_NAMES = """
dollar=$ USD=$ degree=deg inch=in inche=in foot=ft feet=ft yard=yd mile=mi second=s sec=s minute=min hour=h hr=h
gram=g kilogram=kg meter=m metre=m centimeter=cm centimetre=cm millimeter=mm millimetre=mm kilometer=km kilometre=km
liter=l litre=l L=l kph=km/h kmh=km/h mph=mi/h per=/ sq=square cu=cubic cent=cent day=day week=week month=month
year=year unit=unit
"""
_SHORT_NAMES = dict(pair.split("=") for pair in _NAMES.split())
# In plain letters, words that no product of variables spells.
_WORDS = rf"(?:(?:square|cubic) )?(?:{'|'.join(name for name in _SHORT_NAMES if len(name) > 3)})s?"
# What no unit contains: another number, words that add an answer or take it back, a multiple.
_NO_UNIT = re.compile(
    r"(?<![a-z])\d|\b(?:or|and|but|not|wrong|incorrect|hundred|thousand|million|billion|trillion|dozen)s?\b"
)
# Texts, their powers, and what joins them; degrees; words.
_UNIT = re.compile(
    rf"(?<=\S)\s*(?:\^\{{?\\circ\}}?\s*(?:[CF]\b)?|{_UNIT_TEXT})"
    rf"(?:{_UNIT_TEXT}|{_POWER}|\\(?:cdot|times)(?![a-zA-Z])|[\s/])*$|(?<=\d)\s*\\\$$|(?<=[\d}}])\s*{_WORDS}$"
)
_LETTERS = r"[A-Za-z]+(?:\^\{?\d\}?)?"
_BARE_UNIT = re.compile(rf"(?<=[\d}}\s])\s*(?:\^\{{?\\circ\}}?\s*)?{_LETTERS}(?:\s*/\s*{_LETTERS})?$")
_TOKEN = re.compile(r"[A-Za-z]+|\$|/|-?\d")
_POWERS = {"square": 2, "cubic": 3}

_Unit = tuple[tuple[str, int], ...]
"""The short name of each factor and its power: m/s^2 is (("m", 1), ("s", -2)); empty if there is no unit."""


def split_units(answer: str, gold: str, strict: bool) -> tuple[str, str] | None:
    """Return two cleaned answers without their units.

    A unit in plain letters is one only if the other answer has it; otherwise they are variables. None is returned if
    what follows one answer is more than a unit, such as a second answer, and differs from what follows the other; if
    `strict`, also if both have a unit, but not the same.
    """
    (answer, end), (gold, end_of_gold) = _split(answer), _split(gold)
    others = [_NO_UNIT.findall(re.sub(_POWER, "", text.lower())) for text in (end, end_of_gold)]
    if others[0] != others[1]:
        return None
    unit, unit_of_gold = _standard(end), _standard(end_of_gold)
    if strict and unit and unit_of_gold and unit != unit_of_gold:
        return None
    return _without_letters(answer, unit_of_gold), _without_letters(gold, unit)


def _split(cleaned: str) -> tuple[str, str]:
    value = _QUOTIENT.sub(r"\1/\2", cleaned)
    dollar = _DOLLAR.match(value)
    value = dollar[1] + value[dollar.end() :] if dollar else value
    match = _UNIT.search(value)
    # After a word, a text is not a unit: north east is not north.
    end = len(value) if match is None or re.match(TEXT, value) else match.start()
    return value[:end], "$" * bool(dollar) + value[end:]


def _without_letters(cleaned: str, unit: _Unit) -> str:
    match = _BARE_UNIT.search(cleaned)
    return cleaned[: match.start()] if match and unit and _standard(match[0]) == unit else cleaned


def _standard(unit: str) -> _Unit:
    unit = re.sub(r"\\[a-z]+", " ", re.sub(r"\^\{?\\circ\}?", "degree ", unit))
    factors: list[tuple[str, int]] = []
    sign = power = 1
    for token in _TOKEN.findall(" ".join(map(_short_name, _TOKEN.findall(unit)))):
        if token == "/":
            sign = -1
        elif token in _POWERS:
            power = _POWERS[token]
        elif token[-1].isdigit():
            factors[-1:] = [(name, sign * int(token)) for name, _ in factors[-1:]]
        else:
            factors.append((token, sign * power))
            power = 1
    return tuple(factors)


def _short_name(word: str) -> str:
    name = word.lower() if len(word) > 3 else word
    single = name.removesuffix("s")
    return _SHORT_NAMES.get(name) or _SHORT_NAMES.get(single) or (single if len(name) > 3 else name)
