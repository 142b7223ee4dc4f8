r"""Decides which texts may be compared symbolically at all.

The comparison processes have a deadline and a memory limit. These guards refuse texts that would obviously reach them,
in one pass over at most MAX_LENGTH characters.
"""

import re

# The longest answer among the papers' evaluation sets has 224 characters.
MAX_LENGTH = 400

MAX_DEPTH = 12
MAX_DIGITS = 60

# Powers are evaluated: 10**10000 is a number of ten thousand digits.
MAX_EXPONENT = 10_000

_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
# Factorials of numbers from 1000 on, of factorials, and of groups with a power or a number from 100 on; and functions
# that grow as fast.
_GROWTH = re.compile(
    r"\d{4}\s*!|![\s)\]}]*!|(?:\^|\d{3})[^()\[\]]*[)\]}]\s*!|\\(?:[dt]?binom|Gamma|zeta)(?![a-zA-Z])[^\n]{0,12}?\d{4}"
)
_UNBOUNDED = re.compile(r"\\(?:sum|prod|i+nt|lim|bigcup|bigcap|input|include|def|newcommand|let|csname)(?![a-zA-Z])")
_NUMBERS = re.compile(r"\d+")
_TOKEN = re.compile(r"\\?[A-Za-z]+|-?\d+|.?", re.DOTALL)
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


def is_safe(text: str) -> bool:
    r"""Return whether a cleaned answer may be parsed and compared symbolically.

    Refused: more than MAX_LENGTH characters, anything outside printable ASCII (look-alikes are compared as text),
    unbalanced braces, nesting beyond MAX_DEPTH, numbers beyond MAX_DIGITS digits, powers whose exponents multiply to
    more than MAX_EXPONENT or form a tower, factorials of large numbers, and operators that iterate.
    """
    if len(text) > MAX_LENGTH or not text.isascii() or not text.isprintable():
        return False
    if "**" in text or _LONG_NUMBER.search(text) or _GROWTH.search(text) or _UNBOUNDED.search(text):
        return False
    return _is_shallow(text) and _has_bounded_powers(text)


def _is_shallow(text: str) -> bool:
    depth = braces = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            braces += character == "{"
        elif character in _CLOSING:
            # A half-open interval closes with another kind of bracket, and only braces have to match.
            depth = max(depth - 1, 0)
            braces -= character == "}"
        if depth > MAX_DEPTH or braces < 0:
            return False
    return braces == 0


def _has_bounded_powers(text: str) -> bool:
    # For each open group, the largest product of exponents so far.
    open_groups = [1]
    base, position = 1, 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == "^":
            exponent, position = _exponent(text, position)
            # A tower is a power inside the exponent or, without braces, right after it, since powers associate to
            # the right.
            if "^" in exponent or text[position:].lstrip().startswith("^"):
                return False
            base *= max((int(number) for number in _NUMBERS.findall(exponent)), default=1) or 1
            if base > MAX_EXPONENT:
                return False
            open_groups[-1] = max(open_groups[-1], base)
        elif character in _OPENING:
            open_groups.append(1)
        elif character in _CLOSING:
            base = open_groups.pop() if len(open_groups) > 1 else 1
            open_groups[-1] = max(open_groups[-1], base)
        elif not character.isspace():
            base = 1
    return True


def _exponent(text: str, start: int) -> tuple[str, int]:
    """Return the exponent that begins at `start`, which is a group or one token, and the position of its end."""
    while start < len(text) and text[start].isspace():
        start += 1
    if start < len(text) and text[start] in _OPENING:
        depth = 0
        for position in range(start, len(text)):
            depth += (text[position] in _OPENING) - (text[position] in _CLOSING)
            if depth == 0:
                return text[start : position + 1], position + 1
        return text[start:], len(text)
    token = _TOKEN.match(text, start)
    return token[0], token.end()
