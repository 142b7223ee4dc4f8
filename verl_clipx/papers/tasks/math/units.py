r"""Splits the unit off an answer: `\text{…}` after it, a degree sign, a dollar sign before it."""

import re

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s{0,4}\{([^{}\\]*)\}")
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
_GROUP = r"\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}"

# In order: how a unit is spelt, and its standard spelling.
_REWRITTEN = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\\frac{_GROUP}{_GROUP}", r"\1/\2"),
        (_TEXT.pattern, r" \1 "),
        (r"\^\{?\\circ\}?", "degree "),
        (r"\bper\b", "/"),
        (r"\bsq(?:uare)?\.?\s+([a-z]+)", r"\g<1>2"),
        (r"\bcu(?:bic)?\.?\s+([a-z]+)", r"\g<1>3"),
        (r"[A-Za-z]+", lambda match: _short_name(match[0])),
        (r"\\(?:cdot|times)(?![a-zA-Z])", " "),
        (r"[{}^.]|\\(?=\$)", ""),
        (r"([A-Za-z]+) *-(?:1(?!\d)|(\d))", lambda match: f"/{match[1]}{match[2] or ''}"),
        (r"\s+", " "),
        (r"^ | $", ""),
        (r" ?/ ?", "/"),
        (r"(?<=[A-Za-z]) (?=\d)", ""),
    )
)
_NAMES = """
dollar=$ USD=$ degree=deg inch=in inche=in foot=ft feet=ft yard=yd mile=mi second=s sec=s minute=min hour=h hr=h gram=g
kilogram=kg meter=m metre=m centimeter=cm centimetre=cm millimeter=mm millimetre=mm kilometer=km kilometre=km liter=l
litre=l L=l kph=km/h kmh=km/h mph=mi/h
"""
_SHORT_NAMES = dict(pair.split("=") for pair in _NAMES.split())


def split_units(answer: str, gold: str) -> tuple[str, str, str, str]:
    """Return two cleaned answers without their units, and the units' standard spellings, "" where there is none.

    A unit in plain letters is one only if the other answer has it; otherwise they are variables.
    """
    (answer, unit), (gold, unit_of_gold) = _split(answer), _split(gold)
    if unit_of_gold and not unit:
        answer = _without_letters(answer, unit_of_gold)
    elif unit and not unit_of_gold:
        gold = _without_letters(gold, unit)
    return answer, gold, unit, unit_of_gold


def _split(cleaned: str) -> tuple[str, str]:
    if match := _DOLLAR.match(cleaned):
        return match[1] + cleaned[match.end() :], "$"
    match = _UNIT.search(cleaned)
    # After a word, a text is not a unit: northeast is not north.
    if match is None or _TEXT.fullmatch(cleaned[: match.start()]):
        return cleaned, ""
    return cleaned[: match.start()], _standard(match[0])


def _without_letters(cleaned: str, unit: str) -> str:
    match = _BARE_UNIT.search(cleaned)
    return cleaned[: match.start()] if match and _standard(match[0]) == unit else cleaned


def _standard(unit: str) -> str:
    """Return the standard spelling of a unit: abbreviated, without typesetting, such as m/s2."""
    for pattern, replacement in _REWRITTEN:
        unit = pattern.sub(replacement, unit)
    return unit


def _short_name(word: str) -> str:
    name = word.lower() if len(word) > 3 else word
    single = name.removesuffix("s")
    return _SHORT_NAMES.get(name) or _SHORT_NAMES.get(single) or (single if len(name) > 3 else name)
