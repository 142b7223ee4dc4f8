r"""Decides which texts may be compared symbolically at all.

The comparison processes have limits of time and memory. This refuses texts that would obviously reach them.
"""

import re

MAX_LENGTH = 400  # characters; the longest answer among the papers' evaluation sets has 224
MAX_DEPTH = 12
MAX_DIGITS = 60
MAX_EXPONENT = 10_000  # powers are evaluated: 10**10000 is a number of ten thousand digits

# Long numbers; factorials of numbers from 1000 on, of factorials, and of groups with a power or a number from 100 on,
# and functions that grow as fast; operators that iterate; macros; Python's powers.
_UNBOUNDED = re.compile(
    rf"\d{{{MAX_DIGITS + 1}}}|\*\*|\d{{4}}\s*!|![\s)\]}}]*!|(?:\^|\d{{3}})[^()\[\]]*[)\]}}]\s*!"
    r"|\\(?:[dt]?binom|Gamma|zeta)(?![a-zA-Z])[^\n]{0,12}?\d{4}"
    r"|\\(?:sum|prod|i+nt|lim|bigcup|bigcap|input|include|def|newcommand|let|csname)(?![a-zA-Z])"
)
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_EXPONENT = rf"{_GROUP}|\([^()]*\)|-?\d+|\\?[A-Za-z]+|\S"
# A power right after an exponent, since powers associate to the right; one inside it is seen below.
_TOWER = re.compile(rf"\^\s*(?:{_EXPONENT})\s*\^")
_TOKEN = re.compile(rf"\^\s*(?P<exponent>{_EXPONENT})|\S")


def is_safe(text: str) -> bool:
    r"""Return whether a cleaned answer may be parsed and compared symbolically.

    Refused: more than MAX_LENGTH characters, anything outside printable ASCII (look-alikes are compared as text),
    unbalanced braces, nesting beyond MAX_DEPTH, numbers beyond MAX_DIGITS digits, towers of exponents, powers whose
    exponents multiply to more than MAX_EXPONENT, factorials of large numbers, and operators that iterate.
    """
    if len(text) > MAX_LENGTH or not text.isascii() or not text.isprintable():
        return False
    if _UNBOUNDED.search(text) or _TOWER.search(text):
        return False
    # For each open group, the largest product of exponents so far; that of the base of the next power.
    groups, base, braces = [1], 1, 0
    for token in _TOKEN.finditer(text):
        character, exponent = token[0], token["exponent"] or ""
        if exponent:
            if "^" in exponent or exponent in "([{}])":
                return False
            base *= max(map(int, re.findall(r"\d+", exponent)), default=1) or 1
        elif character in "([{":
            groups.append(1)
            base = 1
        elif character in ")]}":
            # A half-open interval closes with another kind of bracket, and only braces have to match.
            base = groups.pop() if len(groups) > 1 else 1
        else:
            base = 1
        braces += (character == "{") - (character == "}")
        groups[-1] = max(groups[-1], base)
        depth = len(groups) - 1 + len(re.findall(r"[(\[{]", exponent))
        if base > MAX_EXPONENT or depth > MAX_DEPTH or braces < 0:
            return False
    return braces == 0
