r"""Brings answers into a standard spelling, and reads plain numbers as exact fractions.

There are two spellings: the comparison processes read that of `clean`; answers with the same `canonical` spelling are
equal as text.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

# Longer literals are compared only as text, so that no response can demand expensive exact arithmetic.
MAX_NUMBER_LENGTH = 100

# Characters of typeset mathematics with a plain or LaTeX spelling. No other look-alikes are translated.
_TRANSLATION = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "≤": r"\le ",
        "≥": r"\ge ",
        "π": r"\pi ",
        "√": r"\sqrt ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
    }
)
# Two backslashes end a row of a matrix, whatever follows. The space after it is not part of the matrix.
_SPACING = re.compile(r"(?<!\\)\\[,;:> ]|\\(?:q?quad|(?:thin|med|thick)space|enspace)(?![a-zA-Z])|~")
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!")
# MATH writes 10,\!236; others 10\,236, 10\ 236 or 10 236. Not 1 100/300, which is a mixed number.
_SPACE_IN_NUMBER = r"(?:,\s*\\!|\\[,;:>! ]|\\(?:thin|med|thick)space|\{\\?,\}|~|\s|')\s*"
_DIGIT_GROUPS = re.compile(rf"(?<![\d.^_}}/])\d{{1,3}}(?:{_SPACE_IN_NUMBER}\d{{3}})+(?!\d|\s*/|\s*\\frac)", re.ASCII)
# A size command without a bracket is the rest of an expression that was cut off, and stays.
_DROPPED = re.compile(
    r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr)(?=\s*[^\sa-zA-Z0-9])|\\(?:displaystyle|textstyle)(?![a-zA-Z])|(?<!\\)\$"
)
_BLACKBOARD = re.compile(r"\\(?:mathbb|Bbb)\s*([A-Za-z])(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_EMPTY_SET = re.compile(r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}")
# \frac12, \frac1{2}, \frac{1}2. With more digits it is unclear which number they belong to.
_BARE_NUMERATOR = re.compile(r"\\frac\s*(\d)\s*(?=\{|\d(?!\d))", re.ASCII)
_BARE_DENOMINATOR = re.compile(r"(\\frac\s*\{[^{}]{0,40}\})\s*(\d)(?!\d)", re.ASCII)
# 0.1\overline{6}; a bar and a dot mean the same.
_REPEATING = re.compile(
    r"(?<![\w.,}])(?<!\d )(\d{1,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{\s*(\d{1,30})\s*\}(?!\d)", re.ASCII
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s{0,4}\{([^{}\\]*)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,30}(?:\.\d{1,30})?)[eE]([+-]?\d{1,4})(?!\w)")
INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:e|eq|eqslant|t)|neq?)(?![a-zA-Z])")
_BOTH = ("and", "land", "wedge", "cap")
# What joins two inequalities or intervals, which are then one set of numbers.
_JOINT = re.compile(
    r"\s*,?\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*(or|and)\s*\}|\b(or|and)\b|\\(lor|vee|land|wedge|cup|cap)(?![a-zA-Z]))\s*"
)
_DEGREE = re.compile(r"\\degree(?![a-zA-Z])")
# These are computed, so that gcd(10,15)=6 is seen to be false.
_FUNCTION = re.compile(
    r"\\(?:text|textrm|mathrm|operatorname)\s*\{\s*(gcd|lcm|max|min)\s*\}|(?<![A-Za-z\\])(gcd|lcm|max|min)(?=\()"
)
# The constants are letters, whatever their font.
_CONSTANT = re.compile(r"\\(?:text|textrm|mathrm|mathit|operatorname)\s*\{\s*([ie])\s*\}|\\([ij])math(?![a-zA-Z])")
_PERCENT = re.compile(r"(?<=[\d}])\s*(?:\\(?:text|textrm|mathrm|mbox)\s*\{\s*(?:percent|\\?%)\s*\}|percent\b)")
# Words that no product of variables spells.
_BARE_UNIT = re.compile(
    r"(?<=[\d}])\s*((?:square |cubic )?(?:degree|dollar|cent|inche|feet|foot|inch|yard|mile"
    r"|(?:centi|milli|kilo)?met(?:er|re)|second|minute|hour|day|week|month|year|unit|gram|kilogram|lit(?:er|re))s?)$"
)
_REALS = re.compile(
    r"\\mathbb\{R\}(?!\s*[\^_])|\\text\{\s*(?:all )?real(?:s| numbers)\s*\}|-\\infty\s*<\s*[a-z]\s*<\s*\+?\\infty"
)
_UNIT_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}\{[^{}]*\}"
_UNIT_POWER = r"\^(?:\{\s*-?\d\s*\}|-?\d)"
_UNIT_FACTOR = rf"(?:{_UNIT_TEXT}(?:{_UNIT_POWER})?)"
# Texts, their powers, and what joins them; degrees.
_UNIT = re.compile(
    rf"(?<=\S)\s*(?P<unit>(?:\^\{{?\\circ\}}?\s*(?:[CF]\b)?"
    rf"|\\frac\s*\{{\s*{_UNIT_FACTOR}+\s*\}}\s*\{{\s*{_UNIT_FACTOR}+\s*\}}|{_UNIT_TEXT})"
    rf"(?:{_UNIT_TEXT}|{_UNIT_POWER}|\\(?:cdot|times)(?![a-zA-Z])|[\s/])*)$"
)
_UNIT_FRACTION = re.compile(r"\\frac\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}")
_SQUARE = re.compile(r"\b(sq(?:uare)?|cu(?:bic)?)\.?\s+([a-z]+)")
_UNIT_NAMES = {
    **dict.fromkeys(("dollar", "USD"), "$"),
    **{"degree": "deg", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi"},
    **{"second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg"},
    **{
        prefix + name: short + "m"
        for prefix, short in (("", ""), ("centi", "c"), ("milli", "m"), ("kilo", "k"))
        for name in ("meter", "metre")
    },
    **{"liter": "l", "litre": "l", "L": "l", "kph": "km/h", "kmh": "km/h", "mph": "mi/h"},
}
_SPACE_OUTSIDE_WORDS = re.compile(r"(?<!\w)\s+|\s+(?!\w)")

_DIGITS = r"(?:\d{1,3}(?:\{,\}\d{3})+|\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:"
    rf"\\frac\s*\{{\s*(?P<inner>-?)\s*(?P<top>\d+)\s*\}}\s*\{{\s*(?P<below>-?)\s*(?P<bottom>\d+)\s*\}}"
    rf"|(?P<over>\d+)\s*/\s*(?P<under>\d+)"
    rf"|(?P<ones>\d+)(?:\s*\\frac\s*\{{\s*(?P<part>\d+)\s*\}}\s*\{{\s*(?P<parts>\d+)\s*\}}"
    rf"|\s+(?P<slice>\d+)/(?P<slices>\d+))"
    rf"|10\^(?:\{{\s*(?P<tens>-?\d{{1,3}})\s*\}}|(?P<ten>\d))"
    rf"|(?P<digits>{_DIGITS})(?:\s*\\(?:times|cdot)\s*10\^(?:\{{\s*(?P<power>-?\d{{1,3}})\s*\}}|(?P<short>\d))(?!\d))?"
    rf")\s*(?P<percent>\\?%)?",
    re.ASCII,
)


@dataclass(frozen=True)
class Number:
    """A literal number.

    Attributes:
        value: the exact value, 1/2 for "50%".
        percent: whether a percent sign follows.
        literal_integer: whether it is written as an integer without separators, so that it has only one reading.
    """

    value: Fraction
    percent: bool
    literal_integer: bool


def clean(text: str) -> str:
    """Return an answer without mere typesetting: dollar signs, size and spacing commands, a final full stop.

    Every run of white space becomes one blank, since line ends, as in a matrix, mean nothing. Fractions get both pairs
    of braces, the empty set has one spelling, and a repeating decimal becomes a fraction.
    """
    if text.isascii() and text.isdigit():  # most answers
        return text
    text = _ROW_SPACE.sub(r"\\\\", " ".join(text.translate(_TRANSLATION).split()))
    text = _DIGIT_GROUPS.sub(lambda match: "".join(re.findall(r"\d+", match[0])), text)
    text = _SPACING.sub(" ", _NEGATIVE_SPACE.sub("", text))
    text = _PERCENT.sub(r"\\%", _CONSTANT.sub(r"\1\2 ", text))
    text = _FUNCTION.sub(r"\\\1\2", _DEGREE.sub(r"^\\circ ", text))
    text = _FRACTION.sub(r"\\frac", _DROPPED.sub("", text))
    text = _BARE_DENOMINATOR.sub(r"\1{\2}", _BARE_NUMERATOR.sub(r"\\frac{\1}", text))
    text = _EMPTY_SET.sub(r"\\emptyset ", _BLACKBOARD.sub(r"\\mathbb{\1}", text))
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _SCIENTIFIC.sub(lambda match: rf"{match[1]}\times 10^{{{int(match[2])}}}", text)
    text = _REALS.sub(r"(-\\infty,\\infty)", " ".join(text.split()).removesuffix(".").rstrip())
    text = _BARE_UNIT.sub(r"\\text{ \1}", re.sub(r"(?<=[,<])\s*\+\s*\\infty", r"\\infty", text))
    return _join_sets(text)


def _join_sets(text: str) -> str:
    """Spell "or" and "and" between inequalities as signs, and "or" between unbounded intervals as a union."""
    parts = _JOINT.split(text)[::4]
    if len(parts) > 1 and all(INEQUALITY.search(part) for part in parts):
        return _JOINT.sub(lambda match: r"\land " if match[match.lastindex] in _BOTH else r"\lor ", text)
    if len(parts) > 1 and all(r"\infty" in part and part[-1] in ")]" for part in parts):
        return _JOINT.sub(lambda match: r"\cap " if match[match.lastindex] in _BOTH else r"\cup ", text)
    return text


def _fraction_of_repeating(decimal: re.Match[str]) -> str:
    whole, once, period = decimal.groups()
    # 0.1666… is (16 - 1) / 90.
    top, bottom = int(whole + once + period) - int(whole + once), (10 ** len(period) - 1) * 10 ** len(once)
    value = Fraction(top, bottom)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def canonical(cleaned: str) -> str:
    r"""Return the spelling that decides equality as text, with `\text{}` unwrapped and without needless spaces."""
    return _SPACE_OUTSIDE_WORDS.sub("", _TEXT.sub(r"\1", cleaned))


def split_unit(cleaned: str) -> tuple[str, str]:
    r"""Split an answer into the part without its unit, and the unit, "" if there is none.

    Args:
        cleaned: an answer from `clean`. A unit is `\text{…}` after it, perhaps with a power, a degree sign after it, or
            a dollar sign before it.
    """
    if match := re.match(r"(-?)\s*(?:\\\$|\\(?:text|mathrm)\{\s*\\?\$\s*\})\s*", cleaned):
        return match[1] + cleaned[match.end() :], "$"
    match = re.search(r"(?<=\d)\s*(\\\$)$", cleaned) or _UNIT.search(cleaned)
    # After a word, a text is not a unit: northeast is not north.
    if match is None or _TEXT.fullmatch(cleaned[: match.start()]):
        return cleaned, ""
    return cleaned[: match.start()], _unit_name(match[1])


def strip_bare_unit(cleaned: str, unit: str) -> str:
    """Return a number without a unit in plain letters, if it is the given one; otherwise the text as it is."""
    match = re.search(
        r"(?<=[\d}\s])\s*(\^\{?\\circ\}?\s*)?[A-Za-z]+(?:\^\{?\d\}?)?(?:\s*/\s*[A-Za-z]+(?:\^\{?\d\}?)?)?$", cleaned
    )
    return cleaned[: match.start()] if match and _unit_name(match[0]) == unit else cleaned


def _unit_name(text: str) -> str:
    """Return the standard spelling of a unit: abbreviated, without typesetting, such as m/s2."""
    text = _UNIT_FRACTION.sub(r"\1/\2", text.replace(r"\$", "$"))
    text = re.sub(r"\^\{?\\circ\}?", "degree ", _TEXT.sub(r" \1 ", text))
    text = re.sub(r"\bper\b", "/", text)
    text = _SQUARE.sub(lambda match: f"{match[2]}{2 if match[1].startswith('sq') else 3}", text)
    text = re.sub(r"[A-Za-z]+", _short_name, text)
    text = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", " ", text)
    text = re.sub(r"[A-Za-z]+ *-\d", lambda match: f"/{re.sub(' *-1?', '', match[0])}", re.sub(r"[{}^.]", "", text))
    return re.sub(
        r"\s*/\s*|(?<=[A-Za-z])\s+(?=\d)", lambda match: "/" if "/" in match[0] else "", " ".join(text.split())
    )


def _short_name(match: re.Match[str]) -> str:
    name = match[0].lower() if len(match[0]) > 3 else match[0]
    return _UNIT_NAMES.get(name) or _UNIT_NAMES.get(
        name.removesuffix("s"), name.removesuffix("s") if len(name) > 3 else name
    )


def parse_number(cleaned: str) -> Number | None:
    r"""Read an integer, decimal, fraction, mixed number, percentage or power of ten, in ASCII digits.

    Returns:
        The number; None for anything else, also if it is longer than MAX_NUMBER_LENGTH.
    """
    if len(cleaned) > MAX_NUMBER_LENGTH:
        return None
    match = _NUMBER.fullmatch(cleaned)
    if match is None:
        return None
    tens = match["tens"] or match["ten"]
    if tens is not None:
        value = Fraction(10) ** int(tens)
    elif match["digits"] is not None:
        power = int(match["power"] or match["short"] or 0)
        value = Fraction(re.sub(r"[{},]", "", match["digits"])) * Fraction(10) ** power
    elif match["ones"] is not None:
        part, parts = int(match["part"] or match["slice"]), int(match["parts"] or match["slices"])
        # An improper fraction after a number may as well be a factor.
        if part >= parts:
            return None
        value = int(match["ones"]) + Fraction(part, parts)
    else:
        top, bottom = (match["top"], match["bottom"]) if match["top"] is not None else (match["over"], match["under"])
        if int(bottom) == 0:
            return None
        value = Fraction(int(top), int(bottom))
    negative = sum(match[sign] == "-" for sign in ("sign", "inner", "below")) % 2 == 1
    percent = match["percent"] is not None
    literal_integer = (
        match["digits"] is not None and match["digits"].isdigit() and match["digits"] == match[0].lstrip("+-")
    )
    return Number((-value if negative else value) / (100 if percent else 1), percent, literal_integer)
