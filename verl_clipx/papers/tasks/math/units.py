r"""Splits the unit off an answer: `\text{…}` after it, a degree sign, a dollar sign before it."""

import re
from collections import Counter

from verl_clipx.papers.tasks.math.spelling import SPELLINGS, TEXT, canonical

# A text such as \text{cm}, or \mu\text{m} with its prefix.
_UNIT_TEXT = r"(?:\\mu\s*(?=\\\w+\s*\{\w+\}))?\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s{0,4}\{(?:[^{}]|\{[^{}]*\})*\}"
# The power of a unit: ^2, ^-1 or ^{-1}.
_POWER = r"\^(?:\{\s*-?\d\s*\}|-?\d)"
# The sign of a currency before a value, as in \$5, -\$5, €5 or \text{£}5. The groups are the minus and the sign. The
# second one is empty for a dollar.
_CURRENCY = re.compile(r"\A(-?)\s*(?:\\\$|(?:\\text\{\s*)?([€£¥₹])\}?|\\(?:text|mathrm)\{\s*\\?\$\s*\})\s*")


def _read_names(key: str) -> dict[str, str]:
    """Return the pairs of a list of spellings such as "metre=m second=s"."""
    return dict(pair.split("=") for pair in SPELLINGS[key].split())


_PREFIXES = {"": "", **_read_names("prefixes")}
_SI = _read_names("si")
# The short name of every name of a unit.
_SHORT_NAMES = _read_names("units")
for _prefix, _short_prefix in _PREFIXES.items():
    for _unit, _short_unit in _SI.items():
        _SHORT_NAMES[_prefix + _unit] = _short_prefix + _short_unit
# Units and other words that may follow a value without changing it.
_HARMLESS = {
    *_SHORT_NAMES,
    *_SHORT_NAMES.values(),
    *SPELLINGS["other_units"].split(),
    *SPELLINGS["counted"].split(),
    *SPELLINGS["around"].split(),
}
# A word that no unit contains: it adds an answer, takes one back, or multiplies the value. Or a number that belongs to
# no name.
_NOT_IN_A_UNIT = re.compile(
    r"(?<![a-z])\d|\b(?:or|and|but|not|if|unless|when|except|wrong|incorrect|hundred|thousand|million|billion|trillion"
    r"|dozen)s?\b"
)
# The argument of a trigonometric function without brackets, if it reaches to the end of the text.
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])[^()=<>+,|/]*$")

# What `_split` takes for a unit at the end of an answer.
# A degree sign, perhaps with C or F.
_DEGREE = r"\^(?:\\circ|\{\s*\\circ\s*\})\s*(?:[CF]\b)?"
# What may follow the first text or the degree sign: more texts, powers, and what joins them.
_REST_OF_UNIT = rf"(?:{_UNIT_TEXT}|{_POWER}|\\(?:cdot|times|Omega)(?![a-zA-Z])|[\s/])*"
_CURRENCY_AFTER_VALUE = r"(?<=\d)\s*(?:\\\$|[€£¥₹])"
# The name of a unit in plain letters, if it is too long to be a product of variables.
_LONG_NAMES = "|".join(name for name in _SHORT_NAMES if len(name) > 3)
_LONG_NAME = rf"(?<=[\d}}])\s*(?:(?:square|cubic) )?(?:{_LONG_NAMES})s?"
# Up to four words after a blank. The last one has at least four letters.
_WORDS = r"(?<=[\d}])\s+(?:[A-Za-z]{2,}\s+){0,3}[A-Za-z]{4,}"
_UNIT = re.compile(
    rf"(?<=\S)\s*(?:{_DEGREE}|{_UNIT_TEXT}){_REST_OF_UNIT}$|{_CURRENCY_AFTER_VALUE}$|{_LONG_NAME}$|{_WORDS}$"
)

_LIST = re.compile(r"[,;]|\b(?:and|or)\b")
# A command that no unit has, or a character that neither belongs to a name nor joins two names.
_FOREIGN_SIGN = re.compile(
    r"\\(?!(?:text(?:bf|it|rm)?|mathrm|mbox|mu|Omega|circ|cdot|times)(?![a-zA-Z])|[$ ,])|[^\w\s\\{}^/.,()$€£¥₹°µ-]"
)
# The name of a unit in plain letters, such as cm or cm^2.
_LETTERS = r"(?:\\Omega\b|[A-Za-z]+)(?:\^\{?\d\}?)?"
# A unit in plain letters at the end, such as cm, m/s or ^\circ C.
_PLAIN_UNIT = re.compile(rf"(?<=[\d}}\s])\s*(?:\^\{{?\\circ\}}?\s*)?{_LETTERS}(?:\s*/\s*{_LETTERS})?$")
# A factor of a unit that `_plain` returned: square m, s -2 or $.
_FACTOR = re.compile(r"(?:(square|cubic)\s+)?([A-Za-z]+|[$€£¥₹])\s*(-?\d)?")
_POWER_OF_WORD = {"square": 2, "cubic": 3}


def split_units(answer: str, gold: str) -> tuple[str, str] | None:
    """Return two cleaned answers without their units, or None if what follows their values makes them unequal.

    Plain letters, as in "5 cm", are a unit only if the other answer has the same unit. Otherwise they are variables.

    None is returned if

    - both answers have a unit, and the units differ;
    - only one answer has a percent sign, and the other has a unit;
    - only one answer has a unit, and this may not be left out (see `is_harmless`), such as "squared";
    - other numbers follow the values, or other words such as "or" and "million";
    - what follows the values differs, and one of the two has signs that no unit has.

    Args:
        answer: the given answer.
        gold: the right answer.
    """
    answer, unit_text = _split(answer)
    gold, unit_text_of_gold = _split(gold)
    unit = _powers_of_names(unit_text)
    unit_of_gold = _powers_of_names(unit_text_of_gold)
    if unit and unit_of_gold and unit != unit_of_gold:
        return None
    if answer.endswith("%") != gold.endswith("%"):
        unit_beside_percent = unit if gold.endswith("%") else unit_of_gold
        if unit_beside_percent:
            return None
    if bool(unit) != bool(unit_of_gold):
        only_unit = unit or unit_of_gold
        if not all(map(is_harmless, only_unit)):
            return None
    if _not_in_a_unit(unit_text) != _not_in_a_unit(unit_text_of_gold):
        return None
    has_foreign_sign = _has_foreign_sign(unit_text) or _has_foreign_sign(unit_text_of_gold)
    if has_foreign_sign and canonical(unit_text) != canonical(unit_text_of_gold):
        return None
    return _without_plain_unit(answer, unit_of_gold), _without_plain_unit(gold, unit)


def _split(cleaned: str) -> tuple[str, str]:
    r"""Split a cleaned answer into its value and the text of its unit.

    Returns:
        The answer without its unit, and the unit's text; empty if there is no unit. The sign of a currency before the
        value, as in `\$5`, begins the unit's text.
    """
    currency = _CURRENCY.match(cleaned)
    value = _CURRENCY.sub(r"\1", cleaned)
    match = _UNIT.search(value)
    if re.match(TEXT, value):
        # After a word, a text is not a unit: north east is not north.
        match = None
    elif match and match[0].lstrip().startswith("^") and _ANGLE.search(value):
        # The degree sign in \sin 30^\circ belongs to the angle. It is no unit of the answer.
        match = None
    if currency and match and _LIST.search(value):
        # The currency is not that of the whole answer, as in "$3 and 50 cents".
        return cleaned, ""
    end = match.start() if match else len(value)
    sign = ""
    if currency:
        sign = currency[2] or "$"
    return value[:end], sign + value[end:]


def _not_in_a_unit(unit_text: str) -> list[str]:
    """Return the words and digits that belong to no unit, such as "or", "million" or a second number."""
    return _NOT_IN_A_UNIT.findall(re.sub(_POWER, "", unit_text.lower()))


def _without_plain_unit(cleaned: str, other_unit: Counter[str]) -> str:
    """Return an answer without the plain letters at its end if they mean the other answer's unit; otherwise unchanged.

    Args:
        other_unit: the other answer's unit as `_powers_of_names` returns it; empty if it has none.
    """
    match = _PLAIN_UNIT.search(cleaned)
    if match and other_unit and _powers_of_names(match[0]) == other_unit:
        return cleaned[: match.start()]
    return cleaned


def _powers_of_names(unit_text: str) -> Counter[str]:
    """Return the power of each factor of a unit, by the factor's short name. Without a unit, there is none.

    For m/s^2, the power of m is 1, and that of s is -2.
    """
    with_short_names = re.sub("[A-Za-z]+", _short_name, _plain(unit_text))
    numerator, _, denominator = with_short_names.partition("/")
    powers: Counter[str] = Counter()
    for sign, part in ((1, numerator), (-1, denominator)):
        for word, name, power in _FACTOR.findall(part):
            default_power = _POWER_OF_WORD.get(word, 1)
            powers[name] += sign * int(power or default_power)
    return powers


def _plain(unit_text: str) -> str:
    r"""Return a unit without commands, braces and signs of powers, with blanks in their places.

    For `\text{m}/\text{s}^2`, it is "m/s 2" with some more blanks.
    """
    unit_text = re.sub(r"\\mu(?![a-z])\s*(?:\\[a-z]+\s*\{)?", "u", unit_text)
    unit_text = re.sub(r"\^\{?\s*\\circ\s*\}?", "degree ", unit_text)
    return re.sub(r"\\[a-z]+|[{}^]|(?<=[a-z])\.", " ", unit_text)


def _has_foreign_sign(unit_text: str) -> bool:
    """Return whether what follows a value has a sign that no unit has, or a digit that is no power of a name."""
    if _FOREIGN_SIGN.search(unit_text):
        return True
    without_factors = _FACTOR.sub("", _plain(unit_text))
    return re.search(r"\d", without_factors) is not None


def is_harmless(name: str) -> bool:
    """Return whether a word may follow a value without changing it: a unit, or what is counted.

    Args:
        name: the word or the short name of the unit, without the s of a plural.
    """
    # Without its s, bus is bu, boxes is boxe, and cherries is cherrie.
    forms = {name, name + "s", re.sub("e$", "", name), re.sub("ie$", "y", name)}
    return not _HARMLESS.isdisjoint(forms)


def _short_name(match: re.Match[str]) -> str:
    """Return a word's short name as a unit, such as cm for "Centimeters"; the word without its s if it has none.

    Up to three letters keep their case, because Mg is not mg.

    Args:
        match: of a word.
    """
    name = match[0]
    if len(name) > 3:
        name = name.lower()
    name = re.sub("(?<=..)s$", "", name)
    return _SHORT_NAMES.get(name, name)
