"""The one error of a setting that cannot be meant as it stands, and what a mistyped name could have meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

# The value of a refusal that is about a key alone; it is the same object after pickling.
ABSENT = ...


class Refusal(ValueError):
    """A setting that is refused. As text it is `key=value: reason. advice`, a line for each refusal.

    Args:
        key: the full key, or the word of a command line, that has to change.
        value: its value; `ABSENT` if the key alone is wrong.
        reason: what is wrong, without a full stop; other keys in it stand with their values.
        advice: what to do, in whole sentences; may be empty if the reason says it.
        others: further refusals of the same configuration.
    """

    def __init__(self, key: str, value: Any, reason: str, advice: str = "", others: tuple["Refusal", ...] = ()):
        # Positional, so that the error survives pickling on its way out of a Ray worker.
        super().__init__(key, value, reason, advice, others)
        self.key = key
        self.value = value
        self.reason = reason
        self.advice = advice
        self.others = others

    def __repr__(self) -> str:
        # Hydra shows an error by its repr.
        return f"Refusal({str(self)!r})"

    def __str__(self) -> str:
        setting = self.key if self.value is ABSENT else f"{self.key}={written(self.value)}"
        return "\n".join([f"{setting}: {self.reason}. {self.advice}".rstrip(), *map(str, self.others)])

    @property
    def all(self) -> tuple["Refusal", ...]:
        """This refusal, without its others, and they."""
        return (Refusal(self.key, self.value, self.reason, self.advice), *self.others)


def refuse(refusals: Iterable[Refusal | None]) -> None:
    """Raises the first refusal with all others, each once; returns if there is none.

    Raises:
        Refusal: there is one.
    """
    lines = {str(part): part for refusal in refusals if refusal is not None for part in refusal.all}
    first, *others = [*lines.values()] or [None]
    if first is not None:
        raise Refusal(first.key, first.value, first.reason, first.advice, tuple(others))


def written(value: Any) -> str:
    """A value as it is written on the command line: null for None, quotes around text that would be something else."""
    if isinstance(value, str) and not value.isidentifier() and (not value or value[0].isdigit()):
        return repr(value)
    return "null" if value is None else str(value)


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """Returns a sentence, after a blank, that names the known words nearest to a mistyped one; empty if none is near.

    `before` stands before the word where the user writes it, such as "+clipx=".
    """
    known = list(dict.fromkeys(known))
    # Two swapped letters are the commonest mistake, and difflib does not rank them first.
    near = [one for one in known if sorted(one) == sorted(word)] or get_close_matches(word, known, n=3)
    return f" Did you mean {' or '.join(f'{before}{one}' for one in near)}?" if near else ""
