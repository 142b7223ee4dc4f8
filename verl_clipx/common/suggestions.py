"""Says what a mistyped name could have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """Returns a sentence, after a blank, that names the known words nearest to a mistyped one; empty if none is near.

    `before` stands before the word where the user writes it, such as "+clipx=".
    """
    known = list(dict.fromkeys(known))
    # Two swapped letters are the commonest mistake, and difflib does not rank them first.
    near = [one for one in known if sorted(one) == sorted(word)] or get_close_matches(word, known, n=3)
    return f" Did you mean {' or '.join(f'{before}{one}' for one in near)}?" if near else ""
