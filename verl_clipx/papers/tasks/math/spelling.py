"""Brings answers into a standard spelling, and reads plain numbers as exact fractions.

There are two spellings: the comparison processes read that of `clean`; answers with the same `canonical` spelling are
equal as text.
"""

import re
from fractions import Fraction

# Longer literals are compared only as text, so that no response can demand expensive exact arithmetic.
MAX_NUMBER_LENGTH = 100

UPRIGHT = r"\\(?:text|textrm|mathrm|mbox)\s{0,4}"
TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s{0,4}"
INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:e|eq|eqslant|t)|neq?)(?![a-zA-Z])")
ALL_NUMBERS = r"(-\infty,\infty)"

# Characters of typeset mathematics with a plain or LaTeX spelling. No other look-alikes are translated.
_TRANSLATION = str.maketrans(
    {**dict.fromkeys("−–", "-"), **dict.fromkeys("\u00a0\u2009\u202f", " "), "÷": "/"}
    | {"×": r"\times ", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty "}
    | {"°": r"^\circ ", "∪": r"\cup ", "∅": r"\emptyset "}
)
_SPACE = r"\\[,;:>! ]|\\(?:q?quad|(?:thin|med|thick)space|enspace)(?![a-zA-Z])|~"
# MATH writes 10,\!236; others 10\,236, 10\ 236 or 10 236. Not 1 100/300, which is a mixed number.
_GROUPED = rf"(?<![\d.^_}}/])\d{{1,3}}(?:(?:,\s*\\!|{_SPACE}|\{{\\?,\}}|\s|')\s*\d{{3}})+(?!\d|\s*/|\s*\\frac)"
_FUNCTION = r"(gcd|lcm|max|min)"
_REALS = (
    rf"\\mathbb\{{R\}}(?!\s*[\^_])|{UPRIGHT}\{{\s*(?:all )?real(?:s| numbers)\s*\}}"
    r"|-\\infty\s*<\s*[a-z]\s*<\s*\+?\\infty"
)


def _repeating(decimal: re.Match[str]) -> str:
    r"""Return 0.1\overline{6} as a fraction: 0.1666… is (16 - 1) / 90."""
    whole, once, period = decimal.groups()
    value = Fraction(int(whole + once + period) - int(whole + once), (10 ** len(period) - 1) * 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# In order: what is mere typesetting, or has a spelling that math-verify misreads, and its replacement.
_REWRITTEN = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]", r"\\\\"),  # space between the rows of a matrix
        (_GROUPED, lambda match: "".join(re.findall(r"\d+", match[0]))),
        (rf"(?<!\\)(?:{_SPACE})", " "),  # two backslashes end a row of a matrix, whatever follows
        (r"\\(?:text|textrm|mathrm|mathit|operatorname)\s*\{\s*([ie])\s*\}", r"\1 "),  # constants, whatever their font
        (rf"(?<=[\d}}])\s*(?:{UPRIGHT}\{{\s*(?:percent|\\?%)\s*\}}|percent\b)", r"\%"),
        (r"\\degree(?![a-zA-Z])", r"^\\circ "),
        # These are computed, so that gcd(10,15)=6 is seen to be false.
        (rf"\\(?:text|textrm|mathrm|operatorname)\s*\{{\s*{_FUNCTION}\s*\}}", r"\\\1"),
        (rf"(?<![A-Za-z\\]){_FUNCTION}(?=\()", r"\\\1"),
        # A size command without a bracket is the rest of an expression that was cut off, and stays.
        (r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr)(?=\s*[^\sa-zA-Z0-9])", ""),
        (r"\\(?:displaystyle|textstyle)(?![a-zA-Z])|(?<!\\)\$", ""),
        (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"(?<![\w.,}])(?<!\d )(\d{1,30})\.(\d{0,30})\\(?:overline|bar|dot)\s*\{\s*(\d{1,30})\s*\}(?!\d)", _repeating),
        (r"(?<![\w.])(\d{1,30}(?:\.\d{1,30})?)[eE]\+?(-?)0*(\d{1,4})(?!\w)", r"\1\\times 10^{\2\3}"),
        (r"\\(?:mathbb|Bbb)\s*([A-Za-z])(?![a-zA-Z])", r"\\mathbb{\1}"),
        (_REALS, lambda _: ALL_NUMBERS),
        (r"(?<=[,<])\s*\+\s*\\infty", r"\\infty"),
    )
)
# What joins two inequalities or intervals, which are then one set of numbers.
_JOINT = re.compile(
    rf"\s*,?\s*(?:{UPRIGHT}\{{\s*(or|and)\s*\}}|\b(or|and)\b|\\(lor|vee|land|wedge|cup|cap)(?![a-zA-Z]))\s*"
)
_SPACE_OUTSIDE_WORDS = re.compile(r"(?<!\w)\s+|\s+(?!\w)")

# Also \frac12, \frac1{2} and \frac{1}2. With more digits it is unclear which number they belong to.
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d)(?!\d))", re.ASCII)
_EXPONENT = r"\{\s*-?\d{1,3}\s*\}|\d(?!\d)"
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?:(?P<whole>\d+)\s+)?(?P<top>-?\d+)\s*/\s*(?P<bottom>-?\d+)"
    r"|(?P<digits>(?:\d{1,3}(?:(?:\{,\}|,)\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
    rf"(?:\s*\\(?:times|cdot)\s*10\^(?P<power>{_EXPONENT}))?|10\^(?P<ten>{_EXPONENT}))\s*(?P<percent>\\?%)?",
    re.ASCII,
)


def clean(text: str) -> str:
    """Return an answer without mere typesetting: dollar signs, size and spacing commands, a final full stop.

    Every run of white space becomes one blank, a repeating decimal a fraction, and "or" between inequalities a sign.
    All numbers and no number have one spelling each.
    """
    text = text.translate(_TRANSLATION)
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).removesuffix(".").rstrip()
    parts = _JOINT.split(text)[::4]
    if len(parts) > 1 and all(map(INEQUALITY.search, parts)):
        both, either = r"\land ", r"\lor "
    elif len(parts) > 1 and all(r"\infty" in part and part[-1] in ")]" for part in parts):
        both, either = r"\cap ", r"\cup "
    else:
        return text
    return _JOINT.sub(lambda match: both if match[match.lastindex] in ("and", "land", "wedge", "cap") else either, text)


def canonical(cleaned: str) -> str:
    r"""Return the spelling that decides equality as text, with `\text{}` unwrapped and without needless spaces."""
    return _SPACE_OUTSIDE_WORDS.sub("", re.sub(rf"{TEXT}\{{([^{{}}\\]*)\}}", r"\1", cleaned))


def parse_number(cleaned: str) -> tuple[Fraction, Fraction] | None:
    r"""Read an integer, decimal, fraction, mixed number, percentage or power of ten, in ASCII digits.

    Returns:
        The exact value, 1/2 for "50%", and the value without the percent sign; None for anything else, and for what is
        longer than MAX_NUMBER_LENGTH.
    """
    match = (
        _NUMBER.fullmatch(_FRACTION.sub(r" \1\2/\3\4", cleaned).lstrip()) if len(cleaned) <= MAX_NUMBER_LENGTH else None
    )
    if match is None:
        return None
    if match["top"]:
        whole, top, bottom = int(match["whole"] or 0), int(match["top"]), int(match["bottom"])
        # After a number, an improper fraction may as well be a factor.
        if bottom == 0 or (match["whole"] and not 0 <= top < bottom):
            return None
        value = whole + Fraction(top, bottom)
    else:
        power = int((match["power"] or match["ten"] or "0").strip("{ }"))
        value = Fraction(re.sub(r"[{},]", "", match["digits"] or "1")) * Fraction(10) ** power
    value = -value if match["sign"] == "-" else value
    return value / 100 if match["percent"] else value, value
