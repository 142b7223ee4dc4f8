r"""Compares answers to questions about tables: numbers, percentages, currencies, text, lists.

The release's own measure (qa/table/utils.py) compares numbers within 1e-5, normalised text, and lists in order. This
one also reads what language models write (LaTeX, units, percent signs) and accepts lists in any order. It stays strict
where leniency would reward vagueness: signs count, neither units nor magnitudes such as "million" are converted, and a
rounded number is accepted only if the right answer was computed.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial

MAX_ANSWER_LENGTH = 2000
"""In characters. The longest list of the release has ten entries."""

MAX_NUMBER_LENGTH = 60
"""In characters, with the number's unit."""

TOLERANCE = Decimal("1e-5")
"""Largest absolute difference of two numbers that count as equal, as in the release."""

MIN_ROUNDED_DIGITS = 3
"""Smallest number of significant digits of a number that may be rounded."""

LIST_SEPARATOR = "|"
"""Between several answers, as the prompt says (template table_question)."""

# What may separate the parts of an answer, in the order in which it is tried.
_LIST_SEPARATORS = (re.compile(r"\|"), re.compile(r";"), re.compile(r"\n"), re.compile(r",\s*and\s|,\s|\sand\s"))

_WRAPPER = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|boxed)\s*\{([^{}]*)\}")
_THIN_SPACE = re.compile(r"\\[,!;:]")
_DIGIT_GROUP = re.compile(r"(?<=[0-9])\{,\}(?=[0-9])")
_ESCAPED = re.compile(r"\\([%$&#_ {}])")
# Unicode's names for the forms of characters that keep their form, because it matters: neither 5² nor ⑤② is 52.
_KEPT = ("<super>", "<sub>", "<circle>")
_DASHES = re.compile("[‐‑‒–—−]")
_SINGLE_QUOTES = re.compile("[‘’´`]")
_DOUBLE_QUOTES = re.compile("[“”]")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?) ?(?:(?:us|c|ca|cad|usd|a|aud|nt|hk)?\$|[€£¥]|(?:usd|cad|eur|gbp) )? ?(?P<inner>[-+]?)"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?P<fraction>\.[0-9]*)?(?P<exponent>e[-+]?[0-9]{1,2})?"
    r"(?P<unit>(?: ?%| ?[a-z][a-z./² '-]*)?)",
    re.ASCII,
)
# What follows such a word is another answer, not a unit.
_JOINING = re.compile(r"\b(?:or|and|but|not|to)\b")
_MAGNITUDE = re.compile(r"\b(?:hundred|thousand|million|billion|trillion|dozen|bn|mn|k)s?\b")
_PERCENT = re.compile(r"%|per ?cent(?:age)?(?: points?)?\b")


@dataclass(frozen=True)
class Number:
    """A number as it is written.

    Args:
        value: the number without regard to a percent sign: 50 for 50%.
        decimals: how many digits are after the point.
        digits: how many significant digits are written; 0 for a zero.
        unit: the text after the number, without a percent sign.
        percent: whether a percent sign follows, or the word.
    """

    value: Decimal
    decimals: int
    digits: int
    unit: str
    percent: bool


def answers_match(answer: str, expected: Sequence[str], *, ratio: bool = False, rounding: bool = False) -> bool:
    """Return whether an answer gives exactly the expected answers, in any order.

    Args:
        answer: the given answer, whose parts may be separated by |, semicolons, line breaks, or commas and "and".
        expected: the expected answers.
        ratio: whether the expected numbers may be shares of 1, which an answer may give in percent.
        rounding: whether the expected numbers were computed. If so, a rounded number with decimals and at least
            `MIN_ROUNDED_DIGITS` significant digits is right.

    Returns:
        False also for an answer longer than `MAX_ANSWER_LENGTH`, and if there are no expected answers.
    """
    if not expected or len(answer) > MAX_ANSWER_LENGTH:
        return False
    answer = clean_latex(answer)
    expected = [clean_latex(text) for text in expected]
    are_equal = partial(_are_equal, ratio=ratio, rounding=rounding)
    if len(expected) == 1:
        return are_equal(answer, expected[0])
    for separator in _LIST_SEPARATORS:
        parts = [part for part in separator.split(answer) if part.strip()]
        if len(parts) == len(expected) and _can_pair(parts, expected, are_equal):
            return True
    return False


def clean_latex(text: str) -> str:
    r"""Return a text without LaTeX: \text{…}, escapes, thin spaces, the braces of `1{,}000`, dollar signs around it."""
    text = _DIGIT_GROUP.sub(",", _THIN_SPACE.sub("", text.strip()))
    # Each pass unwraps the innermost commands.
    for _ in range(3):
        text = _WRAPPER.sub(r"\1", text)
    for opening, closing in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)]
    return _ESCAPED.sub(r"\1", text)


def normalise_text(text: str) -> str:
    """Return a text for comparison: in lower case, without accents, outer quotes, a final full stop and double blanks.

    Full-width digits become digits. Superscript, subscript and circled digits do not.
    """
    plain = text if text.isascii() else "".join(map(_make_plain, text))
    # Mn is the category of accents.
    text = "".join(character for character in plain if unicodedata.category(character) != "Mn")
    text = _DOUBLE_QUOTES.sub('"', _SINGLE_QUOTES.sub("'", _DASHES.sub("-", text)))
    text = " ".join(text.casefold().split())
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    return text.removesuffix(".").rstrip()


def _make_plain(character: str) -> str:
    """Return the plain form of a character, followed by its accents as separate characters."""
    is_kept = unicodedata.decomposition(character).startswith(_KEPT)
    if is_kept:
        return character
    return unicodedata.normalize("NFKD", character)


def parse_number(text: str) -> Number | None:
    """Read a number from a normalised text. A currency may stand before it, and a unit after it.

    Returns:
        None if the text is not one number, or longer than `MAX_NUMBER_LENGTH`.
    """
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER_LENGTH else None
    if match is None or _JOINING.search(match["unit"]):
        return None
    whole = match["whole"].replace(",", "")
    fraction = (match["fraction"] or "")[1:]
    if not whole and not fraction:
        return None
    value = Decimal(f"{whole or 0}.{fraction or 0}{match['exponent'] or ''}")
    # A minus may stand before the currency or after it. Two of them cancel out.
    if (match["sign"] == "-") != (match["inner"] == "-"):
        value = -value
    unit, percents = _PERCENT.subn(" ", match["unit"])
    return Number(
        value=value,
        decimals=len(fraction),
        digits=len((whole + fraction).lstrip("0")),
        unit=" ".join(unit.split()),
        percent=percents > 0,
    )


def _are_equal(given: str, expected: str, *, ratio: bool, rounding: bool) -> bool:
    """Return whether a given answer equals one expected answer, as text or as a number; see `answers_match`."""
    given = normalise_text(given)
    expected = normalise_text(expected)
    if given == expected:
        return True
    number = parse_number(given)
    gold = parse_number(expected)
    if number is None or gold is None:
        return False
    if number.unit and gold.unit and number.unit != gold.unit:
        return False
    has_magnitude = _MAGNITUDE.search(number.unit) is not None
    gold_has_magnitude = _MAGNITUDE.search(gold.unit) is not None
    if has_magnitude != gold_has_magnitude:
        return False
    # If the right answer is a share, which is at most 1, 0.5% can only mean 0.005. A larger number is a multiple, or
    # the table states it in percent.
    gold_is_share = ratio and abs(gold.value) <= 1 and not gold.percent
    means_percent_of_share = gold_is_share and number.percent
    if not means_percent_of_share and _is_near(number, gold.value, rounding):
        return True
    if not ratio:
        return False
    as_percentage = replace(number, value=number.value / 100, decimals=number.decimals + 2)
    return _is_near(as_percentage, gold.value, rounding)


def _is_near(number: Number, gold: Decimal, rounding: bool) -> bool:
    """Return whether a number is within `TOLERANCE` of the right one, or is the right one rounded if `rounding`."""
    difference = abs(number.value - gold)
    if difference <= TOLERANCE:
        return True
    if not rounding or not number.decimals or number.digits < MIN_ROUNDED_DIGITS:
        return False
    half_unit_of_last_decimal = Decimal(5).scaleb(-number.decimals - 1)
    return difference <= half_unit_of_last_decimal


def _can_pair(parts: Sequence[str], expected: Sequence[str], are_equal: Callable[[str, str], bool]) -> bool:
    """Return whether parts and expected answers, of equal number, can be paired so that those of each pair are equal.

    Giving each part the first expected answer that fits could take the only one that fits another part. Kuhn's
    algorithm therefore moves earlier parts to other expected answers.
    """
    # For each part, the indices of the expected answers that it equals.
    candidates = []
    for part in parts:
        candidates.append([index for index, wanted in enumerate(expected) if are_equal(part, wanted)])
    # From the index of an expected answer to the index of the part that it is paired with so far.
    part_of: dict[int, int] = {}

    def assign(part: int, tried: set[int]) -> bool:
        """Pair a part with an expected answer that is free, or that another part can give up.

        Args:
            part: the index of the part.
            tried: the expected answers that need not be tried again, by index.

        Returns:
            Whether there was such an answer.
        """
        for wanted in candidates[part]:
            if wanted in tried:
                continue
            tried.add(wanted)
            if wanted not in part_of or assign(part_of[wanted], tried):
                part_of[wanted] = part
                return True
        return False

    return all(candidates) and all(assign(part, set()) for part in range(len(parts)))
