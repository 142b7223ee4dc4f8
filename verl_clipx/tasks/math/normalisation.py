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
# Two backslashes end a row of a matrix, whatever follows.
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~")
_NEGATIVE_SPACE = re.compile(r"(?<!\\)\\!")
# MATH writes 10,\!236; others 10\,236.
_DIGIT_GROUP = re.compile(r"(?<=\d)(?:,\s*\\!|\\[,!])\s*(?=\d{3}(?!\d))")
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
_UNIT = re.compile(
    r"\s*(?P<unit>\\(?:text|textbf|textit|textrm|mathrm|mbox)\s{0,4}\{[^{}\\]*\}(?:\^\{?-?\d\}?)?|\^\{?\\circ\}?)$"
)
_DEGREES = ("degree", "degrees", r"^{\circ}")
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
    text = _DIGIT_GROUP.sub("{,}", text.translate(_TRANSLATION))
    text = _SPACING.sub(" ", _NEGATIVE_SPACE.sub("", text))
    text = _FRACTION.sub(r"\\frac", _DROPPED.sub("", text))
    text = _BARE_DENOMINATOR.sub(r"\1{\2}", _BARE_NUMERATOR.sub(r"\\frac{\1}", text))
    text = _EMPTY_SET.sub(r"\\emptyset ", _BLACKBOARD.sub(r"\\mathbb{\1}", text))
    text = _REPEATING.sub(_fraction_of_repeating, text)
    text = _SCIENTIFIC.sub(lambda match: rf"{match[1]}\times 10^{{{int(match[2])}}}", text)
    return " ".join(text.split()).removesuffix(".").rstrip()


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
    if cleaned.startswith(r"\$"):
        return cleaned[2:].lstrip(), r"\$"
    found = _UNIT.search(cleaned)
    if found is None:
        return cleaned, ""
    unit = canonical(found["unit"]).strip()
    return cleaned[: found.start()], r"^\circ" if unit in _DEGREES else unit


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
