"""The error of a setting that cannot be meant as it stands, and what a mistyped name could have meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

# The `value` of a refusal whose message shows no value. An ellipsis, because it is the same object after pickling.
NO_VALUE = ...

# Words that YAML or the command line reads as null, a boolean or a number, in small letters.
WORDS_FOR_VALUES = {"null", "~", "true", "false", "yes", "no", "on", "off", ".inf", "+.inf", "-.inf", ".nan"}


class Refusal(ValueError):
    """A setting that is refused. As text it is `key=value: reason. advice`, a line for each refusal.

    Args:
        key: the full key, or the word of a command line, that has to change.
        value: its value; `NO_VALUE` if the message is about the key alone.
        reason: what is wrong, without a full stop. If it names another key, it gives that key's value too, as
            key=value.
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
        setting = self.key if self.value is NO_VALUE else f"{self.key}={format_exactly(self.value)}"
        own_line = f"{setting}: {self.reason}. {self.advice}".rstrip()
        return "\n".join([own_line, *map(str, self.others)])

    @property
    def all(self) -> tuple["Refusal", ...]:
        """This refusal alone, followed by its others."""
        return (Refusal(self.key, self.value, self.reason, self.advice), *self.others)


def raise_refusals(refusals: Iterable[Refusal | None]) -> None:
    """Raise one Refusal that is the first refusal, with all further ones as its `others`. Do nothing without any.

    Args:
        refusals: None stands for no refusal. Refusals of the same text count once.

    Raises:
        Refusal: at least one of `refusals` is not None.
    """
    refusal_by_text = {}
    for refusal in refusals:
        if refusal is None:
            continue
        for single in refusal.all:
            refusal_by_text.setdefault(str(single), single)
    if not refusal_by_text:
        return
    first, *others = refusal_by_text.values()
    raise Refusal(first.key, first.value, first.reason, first.advice, tuple(others))


def format_exactly(value: Any) -> str:
    """Return a configuration's value as messages show it.

    None is shown as null. A string is quoted if it is empty, begins with a digit, or would be read as a number, a
    boolean or null without quotes.
    """
    if value is None:
        return "null"
    if isinstance(value, str) and needs_quotes(value):
        return repr(value)
    return str(value)


def needs_quotes(text: str) -> bool:
    """Return whether a string that stands in a message without quotes could be taken for another value."""
    # Dates, times and numbers in other bases than ten begin with a digit too.
    if not text or text[0].isdigit():
        return True
    if text.lower() in WORDS_FOR_VALUES:
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def did_you_mean(word: str, known: Iterable[str], before: str = "") -> str:
    """Return a sentence that names the known words nearest to a mistyped one, or an empty text if none is near.

    Args:
        word: what the user wrote.
        known: the words to choose from.
        before: what stands before the word where the user writes it, such as "+clipx=".

    Returns:
        The sentence with a space before it, so that it can be added to a message.
    """
    known = list(dict.fromkeys(known))
    # Two swapped letters are the commonest mistake, and difflib does not rank them first.
    near = [candidate for candidate in known if sorted(candidate) == sorted(word)]
    if not near:
        near = get_close_matches(word, known, n=3)
    if not near:
        return ""
    suggestions = " or ".join(f"{before}{candidate}" for candidate in near)
    return f" Did you mean {suggestions}?"
