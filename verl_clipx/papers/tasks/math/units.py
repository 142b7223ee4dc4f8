r"""Splits the unit off an answer: `\text{…}` after it, a degree sign, a dollar sign before it."""

import re
from collections import Counter

from verl_clipx.papers.tasks.math.spelling import SPELLINGS, TEXT, canonical

_UNIT_TEXT = r"(?:\\mu\s*(?=\\\w+\s*\{\w+\}))?\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s{0,4}\{(?:[^{}]|\{[^{}]*\})*\}"
_POWER = r"\^(?:\{\s*-?\d\s*\}|-?\d)"
_CURRENCY = re.compile(r"\A(-?)\s*(?:\\\$|(?:\\text\{\s*)?([€£¥₹])\}?|\\(?:text|mathrm)\{\s*\\?\$\s*\})\s*")


def _read_names(key: str) -> dict[str, str]:
    """Return the pairs of a list of spellings such as "metre=m second=s"."""
    return dict(pair.split("=") for pair in SPELLINGS[key].split())


_PREFIXES = {"": "", **_read_names("prefixes")}
_SI = _read_names("si")
# From every name of a unit to its short name.
_SHORT_NAMES = _read_names("units")
for _prefix, _short_prefix in _PREFIXES.items():
    for _unit, _short_unit in _SI.items():
        _SHORT_NAMES[_prefix + _unit] = _short_prefix + _short_unit
# Units and other words that may follow a value without changing it.
_HARMLESS = {
    *_SHORT_NAMES,
    *_SHORT_NAMES.values(),
    *(name for key in ("other_units", "counted", "around") for name in SPELLINGS[key].split()),
}
# In plain letters, words that no product of variables spells.
_WORDS = rf"(?:(?:square|cubic) )?(?:{'|'.join(name for name in _SHORT_NAMES if len(name) > 3)})s?"
# What no unit contains: another number, words that add an answer or take it back, a multiple.
_NO_UNIT = re.compile(
    r"(?<![a-z])\d|\b(?:or|and|but|not|if|unless|when|except|wrong|incorrect|hundred|thousand|million|billion|trillion"
    r"|dozen)s?\b"
)
# What a trigonometric function is applied to without brackets, up to the end.
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])[^()=<>+,|/]*$")
# Texts, their powers, and what joins them; degrees; words.
_UNIT = re.compile(
    rf"(?<=\S)\s*(?:\^(?:\\circ|\{{\s*\\circ\s*\}})\s*(?:[CF]\b)?|{_UNIT_TEXT})"
    rf"(?:{_UNIT_TEXT}|{_POWER}|\\(?:cdot|times|Omega)(?![a-zA-Z])|[\s/])*$|(?<=\d)\s*(?:\\\$|[€£¥₹])$|(?<=[\d}}])\s*{_WORDS}$"
    r"|(?<=[\d}])\s+(?:[A-Za-z]{2,}\s+){0,3}[A-Za-z]{4,}$"
)
_LIST = re.compile(r"[,;]|\b(?:and|or)\b")
# What is no part of a unit: another command, and a character that neither belongs to a name nor joins two.
_ELSE = re.compile(
    r"\\(?!(?:text(?:bf|it|rm)?|mathrm|mbox|mu|Omega|circ|cdot|times)(?![a-zA-Z])|[$ ,])|[^\w\s\\{}^/.,()$€£¥₹°µ-]"
)
_LETTERS = r"(?:\\Omega\b|[A-Za-z]+)(?:\^\{?\d\}?)?"
_BARE_UNIT = re.compile(rf"(?<=[\d}}\s])\s*(?:\^\{{?\\circ\}}?\s*)?{_LETTERS}(?:\s*/\s*{_LETTERS})?$")
_FACTOR = re.compile(r"(?:(square|cubic)\s+)?([A-Za-z]+|[$€£¥₹])\s*(-?\d)?")


def split_units(answer: str, gold: str) -> tuple[str, str] | None:
    """Return two cleaned answers without their units.

    A unit in plain letters is one only if the other answer has it; otherwise they are variables. None is returned if
    both have a unit, but not the same, or what follows one answer may be more than a unit, such as a second answer or
    "squared", and differs from what follows the other.
    """
    answer, end = _split(answer)
    gold, end_of_gold = _split(gold)
    unit = _standard(end)
    unit_of_gold = _standard(end_of_gold)
    more = _NO_UNIT.findall(re.sub(_POWER, "", end.lower()))
    more_of_gold = _NO_UNIT.findall(re.sub(_POWER, "", end_of_gold.lower()))
    if answer.endswith("%") != gold.endswith("%") and (unit if gold.endswith("%") else unit_of_gold):
        return None
    if more != more_of_gold or (unit and unit_of_gold and unit != unit_of_gold):
        return None
    if canonical(end) != canonical(end_of_gold) and any(map(_has_more, (end, end_of_gold))):
        return None
    if bool(unit) != bool(unit_of_gold) and not all(map(is_harmless, unit or unit_of_gold)):
        return None
    return _without_letters(answer, unit_of_gold), _without_letters(gold, unit)


def _split(cleaned: str) -> tuple[str, str]:
    """Return a cleaned answer without its unit, and the unit; a sign of a currency stands before it."""
    currency = _CURRENCY.match(cleaned)
    value = _CURRENCY.sub(r"\1", cleaned)
    # After a word, a text is not a unit: north east is not north.
    match = None if re.match(TEXT, value) else _UNIT.search(value)
    if match and match[0].lstrip().startswith("^") and _ANGLE.search(value):
        match = None
    if currency and match and _LIST.search(value):
        return cleaned, ""  # 3 dollars and 50 cents are one value
    end = match.start() if match else len(value)
    sign = ""
    if currency:
        sign = currency[2] or "$"
    return value[:end], sign + value[end:]


def _without_letters(cleaned: str, unit: Counter[str]) -> str:
    """Return an answer without a unit in plain letters, if it is the unit of the other answer."""
    match = _BARE_UNIT.search(cleaned)
    if match and unit and _standard(match[0]) == unit:
        return cleaned[: match.start()]
    return cleaned


def _standard(unit: str) -> Counter[str]:
    """Return the short name of each factor and its power: m and 1, s and -2 of m/s^2; nothing if there is no unit."""
    over, _, under = re.sub("[A-Za-z]+", _short_name, _plain(unit)).partition("/")
    powers: Counter[str] = Counter()
    for sign, part in ((1, over), (-1, under)):
        for word, name, power in _FACTOR.findall(part):
            powers[name] += sign * int(power or {"square": 2, "cubic": 3}.get(word, 1))
    return powers


def _plain(unit: str) -> str:
    """Return a unit without commands: m / s 2."""
    unit = re.sub(r"\\mu(?![a-z])\s*(?:\\[a-z]+\s*\{)?", "u", unit)
    unit = re.sub(r"\^\{?\s*\\circ\s*\}?", "degree ", unit)
    return re.sub(r"\\[a-z]+|[{}^]|(?<=[a-z])\.", " ", unit)


def _has_more(end: str) -> bool:
    """Return whether what follows a value has commands or signs of no unit, or a power without a unit's name."""
    return bool(_ELSE.search(end) or re.search(r"\d", _FACTOR.sub("", _plain(end))))


def is_harmless(name: str) -> bool:
    """Return whether the name of a unit, or a word without its s, may follow a value without changing it."""
    singulars = {name, name + "s", re.sub("e$", "", name), re.sub("ie$", "y", name)}
    return not _HARMLESS.isdisjoint(singulars)


def _short_name(word: re.Match[str]) -> str:
    name = re.sub("(?<=..)s$", "", word[0].lower() if len(word[0]) > 3 else word[0])
    return _SHORT_NAMES.get(name, name)
