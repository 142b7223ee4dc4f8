r"""Decides which texts may be compared symbolically at all.

The comparison processes have limits of time and memory. This refuses texts that would obviously reach them.
"""

import re
from itertools import accumulate

MAX_LENGTH = 400  # characters; the longest answer among the papers' evaluation sets has 224
MAX_DEPTH = 12

# Exponents from 10000 on and towers of them; factorials of numbers from 1000 on, of factorials, and of groups with a
# power or a number from 100 on, and functions that grow as fast; operators that iterate; macros; Python's powers.
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}|\([^()]*\)"
_UNBOUNDED = re.compile(
    rf"\^\s*(?:(?:{_GROUP}|-?\d+|\\?[A-Za-z]+|\S)\s*\^|(?:\{{[^{{}}]*(?:\{{[^{{}}]*)?|\([^()]*)(?:\^|\d{{5}})|\d{{5}})|\*\*"
    r"|\d{4}\s*!|![\s)\]}]*!|(?:\^|\d{3})[^()\[\]]*[)\]}]\s*!"
    r"|\\(?:[dt]?binom|Gamma|zeta)(?![a-zA-Z])[^\n]{0,12}?\d{4}"
    r"|\\(?:sum|prod|i+nt|lim|bigcup|bigcap|input|include|def|newcommand|let|csname)(?![a-zA-Z])"
)


def is_safe(text: str) -> bool:
    r"""Return whether a cleaned answer may be parsed and compared symbolically.

    Refused: more than MAX_LENGTH characters, anything outside printable ASCII (look-alikes are compared as text),
    nesting beyond MAX_DEPTH, towers of exponents, large exponents and factorials, and operators that iterate.
    """
    if len(text) > MAX_LENGTH or not text.isascii() or not text.isprintable() or _UNBOUNDED.search(text):
        return False
    depths = accumulate((character in "([{") - (character in ")]}") for character in text)
    return max(depths, default=0) <= MAX_DEPTH
