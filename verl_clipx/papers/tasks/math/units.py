r"""Splits the unit off an answer: `\text{…}` after it, a degree sign, a dollar sign before it."""

import re

from verl_clipx.papers.tasks.math.spelling import TEXT

_UNIT_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}\{[^{}]*\}"
_POWER = r"\^(?:\{\s*-?\d\s*\}|-?\d)"
_FACTORS = rf"\s*(?:{_UNIT_TEXT}(?:{_POWER})?)+\s*"
_DOLLAR = re.compile(r"(-?)\s*(?:\\\$|\\(?:text|mathrm)\{\s*\\?\$\s*\})\s*")
# Texts, their powers, and what joins them; degrees.
_UNIT = re.compile(
    rf"(?<=\S)\s*((?:\^\{{?\\circ\}}?\s*(?:[CF]\b)?|\\frac\s*\{{{_FACTORS}\}}\s*\{{{_FACTORS}\}}|{_UNIT_TEXT})"
    rf"(?:{_UNIT_TEXT}|{_POWER}|\\(?:cdot|times)(?![a-zA-Z])|[\s/])*)$|(?<=\d)\s*\\\$$"
)
_LETTERS = r"[A-Za-z]+(?:\^\{?\d\}?)?"
_BARE_UNIT = re.compile(rf"(?<=[\d}}\s])\s*(?:\^\{{?\\circ\}}?\s*)?{_LETTERS}(?:\s*/\s*{_LETTERS})?$")
_GROUP = r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
_TOKEN = re.compile(r"[A-Za-z]+|\$|/|-?\d")
_NAMES = """
dollar=$ USD=$ degree=deg inch=in inche=in foot=ft feet=ft yard=yd mile=mi second=s sec=s minute=min hour=h hr=h gram=g
kilogram=kg meter=m metre=m centimeter=cm centimetre=cm millimeter=mm millimetre=mm kilometer=km kilometre=km liter=l
litre=l L=l kph=km/h kmh=km/h mph=mi/h per=/ sq=square cu=cubic
"""
_SHORT_NAMES = dict(pair.split("=") for pair in _NAMES.split())
_POWERS = {"square": 2, "cubic": 3}

Unit = tuple[tuple[str, int], ...]
"""The short name of each factor and its power: m/s^2 is (("m", 1), ("s", -2))."""


def split_units(answer: str, gold: str) -> tuple[str, str, Unit, Unit]:
    """Return two cleaned answers without their units, and their units, which are empty where there is none.

    A unit in plain letters is one only if the other answer has it; otherwise they are variables.
    """
    (answer, unit), (gold, unit_of_gold) = _split(answer), _split(gold)
    if unit_of_gold and not unit:
        answer = _without_letters(answer, unit_of_gold)
    elif unit and not unit_of_gold:
        gold = _without_letters(gold, unit)
    return answer, gold, unit, unit_of_gold


def _split(cleaned: str) -> tuple[str, Unit]:
    if match := _DOLLAR.match(cleaned):
        return match[1] + cleaned[match.end() :], (("$", 1),)
    match = _UNIT.search(cleaned)
    # After a word, a text is not a unit: northeast is not north.
    if match is None or re.fullmatch(rf"{TEXT}\{{[^{{}}\\]*\}}", cleaned[: match.start()]):
        return cleaned, ()
    return cleaned[: match.start()], _standard(match[0])


def _without_letters(cleaned: str, unit: Unit) -> str:
    match = _BARE_UNIT.search(cleaned)
    return cleaned[: match.start()] if match and _standard(match[0]) == unit else cleaned


def _standard(unit: str) -> Unit:
    unit = re.sub(rf"\\frac{_GROUP}{_GROUP}", r"\1/\2", unit)
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
