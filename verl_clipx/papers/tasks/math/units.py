r"""Splits the unit off an answer: `\text{…}` after it, a degree sign, a dollar sign before it."""

import re

from verl_clipx.papers.tasks.math.spelling import SPELLINGS, TEXT

_UNIT_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}\{[^{}]*\}"
_POWER = r"\^(?:\{\s*-?\d\s*\}|-?\d)"
_DOLLAR = re.compile(r"\A(-?)\s*(?:\\\$|\\(?:text|mathrm)\{\s*\\?\$\s*\})\s*")
_SHORT_NAMES = dict(pair.split("=") for pair in SPELLINGS["units"].split())
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
_FACTOR = re.compile(r"(?:(square|cubic)\s+)?([A-Za-z]+|\$)\s*(-?\d)?")


def split_units(answer: str, gold: str, strict: bool) -> tuple[str, str] | None:
    """Return two cleaned answers without their units.

    A unit in plain letters is one only if the other answer has it; otherwise they are variables. None is returned if
    what follows one answer is more than a unit, such as a second answer, and differs from what follows the other; if
    `strict`, also if both have a unit, but not the same.
    """
    (answer, end), (gold, end_of_gold) = _split(answer), _split(gold)
    unit, unit_of_gold = _standard(end), _standard(end_of_gold)
    more, more_of_gold = (_NO_UNIT.findall(re.sub(_POWER, "", text.lower())) for text in (end, end_of_gold))
    if more != more_of_gold or (strict and unit and unit_of_gold and unit != unit_of_gold):
        return None
    return _without_letters(answer, unit_of_gold), _without_letters(gold, unit)


def _split(cleaned: str) -> tuple[str, str]:
    value = _DOLLAR.sub(r"\1", cleaned)
    # After a word, a text is not a unit: north east is not north.
    match = None if re.match(TEXT, value) else _UNIT.search(value)
    end = match.start() if match else len(value)
    return value[:end], "$" * (value != cleaned) + value[end:]


def _without_letters(cleaned: str, unit: list[tuple[str, int]]) -> str:
    match = _BARE_UNIT.search(cleaned)
    return cleaned[: match.start()] if match and unit and _standard(match[0]) == unit else cleaned


def _standard(unit: str) -> list[tuple[str, int]]:
    """Return the short name of each factor and its power: m and 1, s and -2 of m/s^2; nothing if there is no unit."""
    plain = re.sub(r"\\[a-z]+|[{}^]", " ", re.sub(r"\^\{?\\circ\}?", "degree ", unit))
    over, _, under = re.sub("[A-Za-z]+", _short_name, plain).partition("/")
    factors = [(1, *factor) for factor in _FACTOR.findall(over)] + [(-1, *factor) for factor in _FACTOR.findall(under)]
    return [(name, sign * int(power or {"square": 2, "cubic": 3}.get(word, 1))) for sign, word, name, power in factors]


def _short_name(word: re.Match[str]) -> str:
    name = re.sub("(?<=..)s$", "", word[0].lower() if len(word[0]) > 3 else word[0])
    return _SHORT_NAMES.get(name, name)
