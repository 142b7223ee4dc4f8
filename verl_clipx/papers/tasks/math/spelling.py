"""Brings answers into a standard spelling, and reads plain numbers as exact fractions.

`clean` returns the spelling that the comparison processes read. `canonical` makes of this a shorter one, by which
answers are compared as text.
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


def _replacement(entry: str) -> str:
    r"""Return what a character is replaced with.

    Args:
        entry: what spellings.yaml has for the character: the name of a command, such as times, or a text such as
            `\text{or}` or -.

    Returns:
        The command with its backslash, or the text. After a letter comes a blank, so that no letter of an answer joins
        it.
    """
    if entry.isalpha():
        return "\\" + entry + " "
    if entry[-1].isalpha():
        return entry + " "
    return entry


_CHARACTERS = {}
for _pair in SPELLINGS["characters"].split():
    # A pair is a character, an equals sign and the entry, in which there may be another equals sign.
    _CHARACTERS[_pair[0]] = _replacement(_pair[2:])
NUMERALS = SPELLINGS["numerals"].split()
# By the name that Unicode has for the form of raised and lowered characters.
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
# A word, or several. There is a vowel in them, and the first has two small letters after its first letter or instead of
# it, or three capitals, or is "no".
_HAS_VOWEL = r"(?=.*[AEIOUYaeiouy])"
_FIRST_WORD = r"(?:[A-Z]?[a-z]{2,}|[A-Z]{3,}|[Nn]o|NO)"
# Each matches in one way only, as otherwise the time for a long sentence would be exponential.
_FURTHER_WORDS = r"(?:[ ,'-]+(?:[A-Za-z][a-z]*|[A-Z]{2,}))*[ ,'-]*"
_WORD = re.compile(_HAS_VOWEL + _FIRST_WORD + _FURTHER_WORDS)
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
    text = _ROOT.sub(_root, text)
    text = text.replace("√", r"\sqrt ")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(_digits_alone, text)
    text = _REPEATING.sub(_fraction, text)
    text = " ".join(text.split()).rstrip(" .,\\")
    if _joins_inequalities(text):
        text = _JOINT.sub(_joint, text)
    return text


def _joins_inequalities(text: str) -> bool:
    """Return whether the parts of a text between words such as "or" are equations and inequalities, not only equations.

    A text without such a word is a single part.
    """
    if not _INEQUALITY.search(text):
        return False
    # The pattern has three groups, so that a split gives a part and then these three.
    parts = _JOINT.split(text)[:: _JOINT.groups + 1]
    return all("=" in part or _INEQUALITY.search(part) for part in parts)


def _joint(match: re.Match[str]) -> str:
    r"""Return in place of a word such as "or" the command that the comparison processes know."""
    word = match[match.lastindex]
    return r"\land " if word in ("and", "land", "wedge", "cap") else r"\lor "


def _digits_alone(number: re.Match[str]) -> str:
    """Return the digits of a number such as 10{,}236."""
    return re.sub(r"\D", "", number[0])


@lru_cache(maxsize=4096)
def _fold(character: str) -> str:
    """Return a character's usual spelling: LaTeX's, or the plain characters of which it is only another form.

    Raised and lowered characters become these between ⁅ and ⁆, after ^ or _. Letters in circles, numbers in brackets
    and Roman numerals stay, as ① and ③ would become 13.
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
    # The form's name in angle brackets, such as <super>; empty if Unicode names none.
    form = unicodedata.decomposition(character).partition(" ")[0]
    if form == "<fraction>" and not plain.endswith("⁄"):
        top, bottom = plain.split("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}"
    is_numeral = form == "<compat>" and unicodedata.numeric(character, None)
    if plain == character or form == "<circle>" or is_numeral:
        return character
    folded = "".join(_fold(part) for part in plain)
    if form in _INDICES:
        return f"{_INDICES[form]}⁅{folded}⁆"
    return folded


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


def is_word(*spellings: str) -> bool:
    """Return whether spellings that differ at most in their case are of one word, or of the same words.

    Mgh and mgh are none, because words have a vowel. Nor are ABC and abc, of which ABC may be points of a figure.
    """
    if not all(_WORD.fullmatch(spelling) for spelling in spellings):
        return False
    in_capitals = [spelling.isupper() for spelling in spellings]
    only_some_in_capitals = any(in_capitals) and not all(in_capitals)
    letters = list(spellings[0].upper())
    # Points of a figure have different letters and are named in the order of the alphabet.
    may_be_points = letters == sorted(set(letters))
    return not (only_some_in_capitals and may_be_points)


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
    # Fractions as 1/2, after a blank, so that 3\frac12 becomes the mixed number 3 1/2.
    with_slashes = _FRACTION.sub(r" \1\2/\3\4", cleaned).lstrip()
    match = _NUMBER.fullmatch(with_slashes)
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
