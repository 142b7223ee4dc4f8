"""Brings answers into a standard spelling, and reads plain numbers as exact fractions.

`clean` returns the spelling that the comparison processes read. `canonical` shortens it further, so that answers can be
compared as text.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from importlib.resources import files

import yaml

MAX_NUMBER_LENGTH = 100
"""In characters. A longer number is only compared as text, so that exact arithmetic costs little, whatever it is."""

# The commands whose braces have text.
TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s{0,4}"
SPELLINGS = yaml.safe_load(files("verl_clipx.papers.tasks.math").joinpath("spellings.yaml").read_text(encoding="utf-8"))


def _spell_entry(entry: str) -> str:
    r"""Return what a character is replaced with.

    Args:
        entry: what spellings.yaml has for the character: the name of a command, such as times, or a text such as
            `\text{or}` or -.

    Returns:
        The command with its backslash, or the text. A blank follows a letter at the end, so that the answer's next
        letter does not become part of the command.
    """
    if entry.isalpha():
        return "\\" + entry + " "
    if entry[-1].isalpha():
        return entry + " "
    return entry


# What replaces each unusual character.
_CHARACTERS = {}
for _pair in SPELLINGS["characters"].split():
    # A pair is a character, an equals sign and the entry, in which there may be another equals sign.
    _CHARACTERS[_pair[0]] = _spell_entry(_pair[2:])
# The numbers in words, from "zero" on.
NUMERALS = SPELLINGS["numerals"].split()
# Unicode's names for the form of raised and lowered characters, and what TeX writes before such characters.
_OPERATOR_OF_FORM = {"<super>": "^", "<sub>": "_"}
_REWRITTEN = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement, *_ in SPELLINGS["rewritten"]]
_ROOT = re.compile(SPELLINGS["patterns"]["root"], re.ASCII)
_GROUPED = re.compile(SPELLINGS["patterns"]["grouped"], re.ASCII)
_REPEATING = re.compile(SPELLINGS["patterns"]["repeating"], re.ASCII)
_NUMBER = re.compile(SPELLINGS["patterns"]["number"], re.ASCII)
_JOINT = re.compile(SPELLINGS["patterns"]["joint"], re.ASCII)
# Raised characters in a row, or lowered ones, as `_fold` spells them: x²⁰ is x^⁅2⁆^⁅0⁆. x₁² has two such rows.
_RAISED_OR_LOWERED = re.compile(r"([_^])⁅[^⁆]*⁆(?:\1⁅[^⁆]*⁆)*")
_INEQUALITY = re.compile(r"[<>]|\\(?:[lg](?:e|eq|eqslant|t)|neq?)(?![a-zA-Z])")
# A word, or several, with a vowel among their letters.
_HAS_VOWEL = r"(?=.*[AEIOUYaeiouy])"
# The first word is at least two small letters, perhaps after a capital; or at least three capitals; or "no".
_FIRST_WORD = r"(?:[A-Z]?[a-z]{2,}|[A-Z]{3,}|[Nn]o|NO)"
# Each further word can match in one way only. Otherwise the time for a long sentence would be exponential.
_FURTHER_WORDS = r"(?:[ ,'-]+(?:[A-Za-z][a-z]*|[A-Z]{2,}))*[ ,'-]*"
_WORD = re.compile(_HAS_VOWEL + _FIRST_WORD + _FURTHER_WORDS)
_SPACE_OUTSIDE_WORDS = re.compile(r"(?<!\w)\s+|\s+(?!\w)")

# \frac{1}{2}, and also \frac12, \frac1{2} and \frac{1}2. With more digits, it is unclear which number they belong to.
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{\s*(-?\d+)\s*\}|(\d))\s*(?:\{\s*(-?\d+)\s*\}|(\d)(?!\d))", re.ASCII)


def clean(text: str) -> str:
    r"""Return an answer without mere typesetting, in the spelling that math-verify reads.

    - Unusual characters become usual ones or commands, such as ≤ and x²⁰.
    - The list "rewritten" in spellings.yaml is applied in its order. It leaves out dollar signs and commands for size
      and space, and gives units, percentages, intervals, ratios and more one spelling each.
    - Digits are no longer grouped, and a repeating decimal such as `0.1\overline{6}` becomes a fraction.
    - Any white space becomes one blank. Full stops, commas and line breaks at the end are left out.
    - Between inequalities, "or" becomes `\lor` and "and" becomes `\land`.
    """
    text = "".join(_fold(character) for character in unicodedata.normalize("NFC", text))
    text = _RAISED_OR_LOWERED.sub(_write_raised_or_lowered, text)
    text = _ROOT.sub(_write_root, text)
    # A root that _ROOT does not match, such as √x.
    text = text.replace("√", r"\sqrt ")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(_write_digits, text)
    text = _REPEATING.sub(_write_fraction, text)
    # The backslashes at the end are a line break.
    text = " ".join(text.split()).rstrip(" .,\\")
    if _joins_inequalities(text):
        text = _JOINT.sub(_write_joint, text)
    return text


def _joins_inequalities(text: str) -> bool:
    """Return whether every part between words such as "or" is an equation or an inequality, and one is an inequality.

    A text without such a word is a single part.
    """
    if not _INEQUALITY.search(text):
        return False
    # A split also returns the groups of the pattern, after each part.
    parts = _JOINT.split(text)[:: _JOINT.groups + 1]
    return all("=" in part or _INEQUALITY.search(part) for part in parts)


def _write_joint(match: re.Match[str]) -> str:
    r"""Return `\land` for "and" and the signs that mean it, among them `\cap`, and `\lor` for "or" and the like.

    Args:
        match: of _JOINT, in which the only group that took part has the word, or the command without its backslash.
    """
    word = match[match.lastindex]
    if word in ("and", "land", "wedge", "cap"):
        return r"\land "
    return r"\lor "


def _write_digits(match: re.Match[str]) -> str:
    """Return the digits of a number such as 10{,}236.

    Args:
        match: of _GROUPED.
    """
    return re.sub(r"\D", "", match[0])


@lru_cache(maxsize=4096)
def _fold(character: str) -> str:
    """Return a character's usual spelling: LaTeX's, or the plain characters of which it is only another form.

    ² becomes ^⁅2⁆, and ₁ becomes _⁅1⁆, for `_write_raised_or_lowered`. Letters in circles, numbers in brackets and
    Roman numerals stay as they are. Otherwise ①③ would become 13.
    """
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    if character.isascii():
        return character
    greek = re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(character, ""))
    if greek:
        # Unicode spells the name of lambda without a B.
        letter = greek[2].replace("LAMDA", "LAMBDA")
        command = letter.lower() if greek[1] == "SMALL" else letter.title()
        return f"\\{command} "
    plain = unicodedata.normalize("NFKC", character)
    # Unicode's name for the form in angle brackets, such as <super>. Some characters have other text here, or none.
    form = unicodedata.decomposition(character).partition(" ")[0]
    if form == "<fraction>" and not plain.endswith("⁄"):
        top, bottom = plain.split("⁄")
        return rf"\frac{{{top}}}{{{bottom}}}"
    is_numeral = form == "<compat>" and unicodedata.numeric(character, None)
    if plain == character or form == "<circle>" or is_numeral:
        return character
    folded = "".join(_fold(part) for part in plain)
    if form in _OPERATOR_OF_FORM:
        return f"{_OPERATOR_OF_FORM[form]}⁅{folded}⁆"
    return folded


def _write_raised_or_lowered(match: re.Match[str]) -> str:
    """Return raised or lowered characters in TeX's spelling: x^⁅2⁆^⁅0⁆ becomes x^{20}.

    A single character gets no braces, unless a digit follows: x²3 would become x^23, which reads like a power of 23.

    Args:
        match: of _RAISED_OR_LOWERED.
    """
    operator = match[1]
    # Leave out the operators and brackets between the characters, then those around them.
    content = match[0].replace(f"⁆{operator}⁅", "")
    content = content.removeprefix(f"{operator}⁅").removesuffix("⁆")
    digit_follows = match.string[match.end() : match.end() + 1].isdecimal()
    if len(content) > 1 or digit_follows:
        content = f"{{{content}}}"
    return operator + content


def _write_root(match: re.Match[str]) -> str:
    r"""Return a root such as ³√(2+√3) in TeX's spelling, here `\sqrt[3]{2+\sqrt{3}}`.

    Args:
        match: of _ROOT.
    """
    raised_degree, bracketed_degree, in_brackets, number = match.groups()
    if bracketed_degree:
        degree = bracketed_degree
    elif raised_degree:
        degree = f"[{raised_degree}]"
    else:
        degree = ""
    # There may be roots in brackets.
    content = _ROOT.sub(_write_root, in_brackets or number or "")
    return rf"\sqrt{degree}{{{content}}}"


def is_word(*spellings: str) -> bool:
    """Return whether spellings that differ at most in their case are one word, or the same words.

    Mgh and mgh are no word, because words have a vowel. ABC and abc are not one word, because ABC may be the points of
    a figure.
    """
    if not all(_WORD.fullmatch(spelling) for spelling in spellings):
        return False
    in_capitals = [spelling.isupper() for spelling in spellings]
    only_some_in_capitals = any(in_capitals) and not all(in_capitals)
    letters = list(spellings[0].upper())
    # The points of a figure have different letters, and are named in the order of the alphabet.
    may_be_points = letters == sorted(set(letters))
    return not (only_some_in_capitals and may_be_points)


def _write_fraction(match: re.Match[str]) -> str:
    r"""Return a decimal such as `0.1\overline{6}` as a fraction: 0.1666… is (16 - 1) / 90.

    Args:
        match: of _REPEATING.
    """
    # The digits before the point, those that come once, and those that repeat.
    whole, once, period = match.groups()
    top = int(whole + once + period) - int(whole + once)
    bottom = (10 ** len(period) - 1) * 10 ** len(once)
    value = Fraction(top, bottom)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def canonical(cleaned: str) -> str:
    r"""Return the spelling by which answers are compared as texts: without `\text{}` and needless blanks.

    Args:
        cleaned: an answer as `clean` returns it.
    """
    unwrapped = re.sub(rf"{TEXT}\{{([^{{}}\\]*)\}}", r"\1", cleaned)
    return _SPACE_OUTSIDE_WORDS.sub("", unwrapped)


def parse_number(cleaned: str) -> tuple[Fraction, Fraction] | None:
    r"""Read a number: an integer, decimal, fraction, mixed number, percentage, power of ten, or a word up to "twenty".

    Args:
        cleaned: an answer as `clean` returns it. Only ASCII digits are read.

    Returns:
        The exact value, and the value if a percent sign is ignored: 1/2 and 50 for "50%". None for anything else, and
        for a text longer than MAX_NUMBER_LENGTH.
    """
    word = canonical(cleaned).casefold()
    if word in NUMERALS:
        cleaned = str(NUMERALS.index(word))
    if len(cleaned) > MAX_NUMBER_LENGTH:
        return None
    # A fraction becomes 1/2 after a blank, so that 3\frac12 becomes the mixed number 3 1/2.
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
    """Return the value of a fraction or mixed number; None if it divides by zero, or may be a product.

    Args:
        match: of _NUMBER, with `top` and `bottom`. A mixed number also has `whole`.
    """
    top = int(match["top"])
    bottom = int(match["bottom"])
    if bottom == 0:
        return None
    if not match["whole"]:
        return Fraction(top, bottom)
    # After a whole number, an improper fraction may as well be a factor.
    if not 0 <= top < bottom:
        return None
    return int(match["whole"]) + Fraction(top, bottom)


def _decimal_value(match: re.Match[str]) -> Fraction:
    """Return the value of a decimal, of a decimal times a power of ten, or of a power of ten.

    Args:
        match: of _NUMBER, without `top`. It has `digits`, or else the exponent `ten`. With `digits`, it may also have
            the exponent `power`.
    """
    digits = match["digits"] or "1"
    power = match["power"] or match["ten"] or "0"
    return Fraction(re.sub(r"[{}, ]", "", f"{digits}e{power}"))
