"""Brings answers into a standard spelling, and reads plain numbers as exact fractions.

There are two spellings: the comparison processes read that of `clean`; answers with the same `canonical` spelling are
equal as text.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from importlib.resources import files

import yaml

# Longer literals are compared only as text, so that no response can demand expensive exact arithmetic.
MAX_NUMBER_LENGTH = 100

TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s{0,4}"
SPELLINGS = yaml.safe_load(files("verl_clipx.papers.tasks.math").joinpath("spellings.yaml").read_text(encoding="utf-8"))


def _plain_spelling(spelling: str) -> str:
    """Return the text that a character becomes: a command's name gets its backslash, and no letter can join it."""
    if spelling.isalpha():
        return rf"\{spelling} "
    if spelling[-1].isalpha():
        return f"{spelling} "
    return spelling


# A pair is a character, an equals sign and its spelling, which may hold another one.
_CHARACTERS = {pair[0]: _plain_spelling(pair[2:]) for pair in SPELLINGS["characters"].split()}
NUMERALS = SPELLINGS["numerals"].split()
_INDICES = {"<super>": "^", "<sub>": "_"}
_REWRITTEN = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement, *_ in SPELLINGS["rewritten"]]
_ROOT = re.compile(SPELLINGS["patterns"]["root"], re.ASCII)
_GROUPED = re.compile(SPELLINGS["patterns"]["grouped"], re.ASCII)
_REPEATING = re.compile(SPELLINGS["patterns"]["repeating"], re.ASCII)
_NUMBER = re.compile(SPELLINGS["patterns"]["number"], re.ASCII)
_JOINT = re.compile(SPELLINGS["patterns"]["joint"], re.ASCII)
# Raised or lowered characters in a row: x²⁰ is x^{20}, and x₁² has an index and a power.
_INDEX = re.compile(r"([_^])⁅[^⁆]*⁆(?:\1⁅[^⁆]*⁆)*")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:e|eq|eqslant|t)|neq?)(?![a-zA-Z])")
_WORD = re.compile(
    r"(?=.*[AEIOUYaeiouy])(?:[A-Z]?[a-z]{2,}|[A-Z]{3,}|[Nn]o|NO)(?:[ ,'-]+(?:[A-Za-z]?[a-z]*|[A-Z]{2,}))*"
)
_SPACE_OUTSIDE_WORDS = re.compile(r"(?<!\w)\s+|\s+(?!\w)")

# Also \frac12, \frac1{2} and \frac{1}2. With more digits it is unclear which number they belong to.
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d)(?!\d))", re.ASCII)


def clean(text: str) -> str:
    r"""Return an answer without mere typesetting, in the spelling that math-verify reads.

    Dollar signs, commands for size and space, and the full stop or line break at the end are left out. White space
    becomes one blank, and a repeating decimal a fraction. Between inequalities, "or" becomes `\lor` and "and" `\land`.
    The answers "all real numbers" and "no solution" have one spelling each.
    """
    text = "".join(_fold(character) for character in unicodedata.normalize("NFC", text))
    text = _INDEX.sub(_index, text)
    text = _ROOT.sub(_root, text).replace("√", r"\sqrt ")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(_digits_alone, text)
    text = _REPEATING.sub(_fraction, text)
    text = " ".join(text.split()).rstrip(" .,\\")
    return _JOINT.sub(_joint, text) if _joins_inequalities(text) else text


def _joins_inequalities(text: str) -> bool:
    """Return whether each part between words such as "or" is an equation or inequality, and one is an inequality."""
    if not _INEQUALITY.search(text):
        return False
    # The pattern has three groups, so that a split gives a part and then these three.
    parts = _JOINT.split(text)[:: _JOINT.groups + 1]
    return all("=" in part or _INEQUALITY.search(part) for part in parts)


def _joint(match: re.Match[str]) -> str:
    word = match[match.lastindex]
    return r"\land " if word in ("and", "land", "wedge", "cap") else r"\lor "


def _digits_alone(number: re.Match[str]) -> str:
    """Return the digits of a number such as 10{,}236."""
    return re.sub(r"\D", "", number[0])


@lru_cache(maxsize=4096)
def _fold(character: str) -> str:
    """Return a character's usual spelling: LaTeX's, or that of which Unicode says that it differs only in its form.

    Letters in circles, numbers in brackets and Roman numerals stay, as ① and ③ would become 13. Indices are in ⁅⁆.
    """
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if character.isascii():
        return character
    greek = re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(character, ""))
    if greek:
        # Unicode's name for lambda.
        letter = greek[2].replace("LAMDA", "LAMBDA")
        command = letter.lower() if greek[1] == "SMALL" else letter.title()
        return f"\\{command} "
    plain = unicodedata.normalize("NFKC", character)
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if kind == "<fraction>" and not plain.endswith("⁄"):
        top, bottom = plain.split("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}"
    is_numeral = kind == "<compat>" and unicodedata.numeric(character, None)
    if plain == character or kind == "<circle>" or is_numeral:
        return character
    folded = "".join(_fold(part) for part in plain)
    return f"{_INDICES[kind]}⁅{folded}⁆" if kind in _INDICES else folded


def _index(index: re.Match[str]) -> str:
    """Return raised or lowered characters in TeX's spelling, in braces unless it is one that no digit follows."""
    # Between two characters stands ⁆^⁅ or ⁆_⁅; before the first one ^⁅ or _⁅, after the last one ⁆.
    content = re.sub("⁆[_^]⁅", "", index[0])[2:-1]
    digit_follows = index.string[index.end() : index.end() + 1].isdecimal()
    if len(content) > 1 or digit_follows:
        content = f"{{{content}}}"
    return index[1] + content


def _root(root: re.Match[str]) -> str:
    """Return a root such as ³√(2+√3) as TeX's, with the roots in it."""
    raised_index, bracketed_index, in_brackets, number = root.groups()
    if bracketed_index:
        index = bracketed_index
    elif raised_index:
        index = f"[{raised_index}]"
    else:
        index = ""
    content = _ROOT.sub(_root, in_brackets or number or "")
    return rf"\sqrt{index}{{{content}}}"


def is_word(*texts: str) -> bool:
    """Return whether texts that differ at most in their case are one word: not Mgh and mgh, nor points ABC and abc."""
    if not all(_WORD.fullmatch(text) for text in texts):
        return False
    one_in_capitals = len({text.isupper() for text in texts}) == 2
    letters = list(texts[0].upper())
    # Points of a figure have different letters and are named in the order of the alphabet.
    in_alphabetical_order = letters == sorted(set(letters))
    return not (one_in_capitals and in_alphabetical_order)


def _fraction(repeating: re.Match[str]) -> str:
    r"""Return 0.1\overline{6} as a fraction: 0.1666… is (16 - 1) / 90."""
    whole, once, period = repeating.groups()
    top = int(whole + once + period) - int(whole + once)
    bottom = (10 ** len(period) - 1) * 10 ** len(once)
    value = Fraction(top, bottom)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def canonical(cleaned: str) -> str:
    r"""Return the spelling that decides equality as text, with `\text{}` unwrapped and without needless spaces."""
    unwrapped = re.sub(rf"{TEXT}\{{([^{{}}\\]*)\}}", r"\1", cleaned)
    return _SPACE_OUTSIDE_WORDS.sub("", unwrapped)


def parse_number(cleaned: str) -> tuple[Fraction, Fraction] | None:
    r"""Read an integer, decimal, fraction, mixed number, percentage or power of ten, in ASCII digits, or a word to 20.

    Returns:
        The exact value, 1/2 for "50%", and the value without the percent sign; None for anything else, and for what is
        longer than MAX_NUMBER_LENGTH.
    """
    word = canonical(cleaned).casefold()
    if word in NUMERALS:
        cleaned = str(NUMERALS.index(word))
    if len(cleaned) > MAX_NUMBER_LENGTH:
        return None
    match = _NUMBER.fullmatch(_FRACTION.sub(r" \1\2/\3\4", cleaned).lstrip())
    if match is None:
        return None
    magnitude = _fraction_value(match) if match["top"] else _decimal_value(match)
    if magnitude is None:
        return None
    value = -magnitude if match["sign"] == "-" else magnitude
    if match["percent"]:
        return value / 100, value
    return value, value


def _fraction_value(match: re.Match[str]) -> Fraction | None:
    """Return a fraction's or mixed number's value; None if it has none, or may be a product."""
    top = int(match["top"])
    bottom = int(match["bottom"])
    if bottom == 0:
        return None
    if not match["whole"]:
        return Fraction(top, bottom)
    # After a number, an improper fraction may as well be a factor.
    if not 0 <= top < bottom:
        return None
    return int(match["whole"]) + Fraction(top, bottom)


def _decimal_value(match: re.Match[str]) -> Fraction:
    """Return the value of a decimal, with a power of ten or without, or of a power of ten alone."""
    digits = match["digits"] or "1"
    power = match["power"] or match["ten"] or "0"
    return Fraction(re.sub(r"[{}, ]", "", f"{digits}e{power}"))
