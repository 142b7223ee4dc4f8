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
_CHARACTERS = {
    pair[0]: (rf"\{pair[2:]} " if pair[2:].isalpha() else pair[2:] + " " * pair[-1].isalpha())
    for pair in SPELLINGS["characters"].split()
}
NUMERALS = SPELLINGS["numerals"].split()
_INDICES = {"<super>": "^", "<sub>": "_"}
_REWRITTEN = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement, *_ in SPELLINGS["rewritten"]]
_ROOT, _GROUPED, _REPEATING, _NUMBER, _JOINT = (
    re.compile(SPELLINGS["patterns"][name], re.ASCII) for name in ("root", "grouped", "repeating", "number", "joint")
)
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
    """Return an answer without mere typesetting: dollar signs, size and spacing commands, what ends a line or sentence.

    Every run of white space becomes one blank, a repeating decimal a fraction, and "or" between inequalities a sign.
    The answers "all real numbers" and "no solution" have one spelling each.
    """
    text = "".join(map(_fold, unicodedata.normalize("NFC", text)))
    text = _INDEX.sub(_index, text)
    text = _ROOT.sub(_root, text).replace("√", r"\sqrt ")
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_fraction, _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text))
    text = " ".join(text.split()).rstrip(" .,\\")
    parts = _JOINT.split(text)[::4]
    if not _INEQUALITY.search(text) or not all("=" in part or _INEQUALITY.search(part) for part in parts):
        return text
    both = ("and", "land", "wedge", "cap")
    return _JOINT.sub(lambda match: r"\land " if match[match.lastindex] in both else r"\lor ", text)


@lru_cache(maxsize=4096)
def _fold(character: str) -> str:
    """Return a character's usual spelling: LaTeX's, or that of which Unicode says that it differs only in its form.

    Letters in circles, numbers in brackets and Roman numerals stay, as ① and ③ would become 13. Indices are in ⁅⁆.
    """
    if character in _CHARACTERS or character.isascii():
        return _CHARACTERS.get(character, character)
    plain = unicodedata.normalize("NFKC", character)
    kind = unicodedata.decomposition(character).partition(" ")[0]
    if greek := re.fullmatch("GREEK (SMALL|CAPITAL) LETTER ([A-Z]+)", unicodedata.name(character, "")):
        letter = greek[2].replace("LAMDA", "LAMBDA")
        return f"\\{letter.lower() if greek[1] == 'SMALL' else letter.title()} "
    if kind == "<fraction>" and plain[-1] != "⁄":
        return r"\frac{{{}}}{{{}}}".format(*plain.split("⁄"))
    if plain == character or kind == "<circle>" or (kind == "<compat>" and unicodedata.numeric(character, None)):
        return character
    folded = "".join(map(_fold, plain))
    return f"{_INDICES[kind]}⁅{folded}⁆" if kind in _INDICES else folded


def _index(index: re.Match[str]) -> str:
    content = re.sub("⁆[_^]⁅", "", index[0])[2:-1]
    digit_follows = index.string[index.end() : index.end() + 1].isdecimal()
    return index[1] + (content if len(content) == 1 and not digit_follows else f"{{{content}}}")


def _root(root: re.Match[str]) -> str:
    before, index, *contents = root.groups()
    return rf"\sqrt{index or (before and f'[{before}]') or ''}{{{_ROOT.sub(_root, ''.join(filter(None, contents)))}}}"


def is_word(*texts: str) -> bool:
    """Return whether texts that differ at most in their case are one word: not Mgh and mgh, nor points ABC and abc."""
    points = len(set(map(str.isupper, texts))) == 2 and list(texts[0].upper()) == sorted(set(texts[0].upper()))
    return not points and all(map(_WORD.fullmatch, texts))


def _fraction(repeating: re.Match[str]) -> str:
    r"""Return 0.1\overline{6} as a fraction: 0.1666… is (16 - 1) / 90."""
    whole, once, period = repeating.groups()
    value = Fraction(int(whole + once + period) - int(whole + once), (10 ** len(period) - 1) * 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def canonical(cleaned: str) -> str:
    r"""Return the spelling that decides equality as text, with `\text{}` unwrapped and without needless spaces."""
    return _SPACE_OUTSIDE_WORDS.sub("", re.sub(rf"{TEXT}\{{([^{{}}\\]*)\}}", r"\1", cleaned))


def parse_number(cleaned: str) -> tuple[Fraction, Fraction] | None:
    r"""Read an integer, decimal, fraction, mixed number, percentage or power of ten, in ASCII digits, or a word to 20.

    Returns:
        The exact value, 1/2 for "50%", and the value without the percent sign; None for anything else, and for what is
        longer than MAX_NUMBER_LENGTH.
    """
    if (word := canonical(cleaned).casefold()) in NUMERALS:
        cleaned = str(NUMERALS.index(word))
    match = _NUMBER.fullmatch(_FRACTION.sub(r" \1\2/\3\4", cleaned[: MAX_NUMBER_LENGTH + 1]).lstrip())
    if match is None or len(cleaned) > MAX_NUMBER_LENGTH:
        return None
    if match["top"]:
        whole, top, bottom = int(match["whole"] or 0), int(match["top"]), int(match["bottom"])
        # After a number, an improper fraction may as well be a factor.
        if bottom == 0 or (match["whole"] and not 0 <= top < bottom):
            return None
        value = whole + Fraction(top, bottom)
    else:
        digits, power = match["digits"] or "1", match["power"] or match["ten"] or "0"
        value = Fraction(re.sub(r"[{}, ]", "", f"{digits}e{power}"))
    value = -value if match["sign"] == "-" else value
    return value / 100 if match["percent"] else value, value
