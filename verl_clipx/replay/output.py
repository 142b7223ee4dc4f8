"""A replay as lists for the terminal and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import pandas

from verl_clipx.base.shared_metrics import QUARTILES
from verl_clipx.replay.measures import HIGH, LOST, LOW, REGAINED, Replay
from verl_clipx.replay.numbers import percent, plain

# How many words of changed tokens the terminal shows for each setting.
WORDS = 6
HEADINGS = (
    "setting",
    "clipped low",
    "clipped high",
    "bounds",
    "gradient from A > 0",
    "cosine",
    "norm ratio",
    "regained",
    "lost",
)

# What no replay can say.
UNKNOWN = (
    "What the policy would have become is not known: after its first own update another method has other weights, "
    "samples other tokens and meets other ratios. Each row is that method's step on this run's tokens."
)


def row_of(replay: Replay) -> tuple[str, ...]:
    """A setting's cells, by HEADINGS."""
    numbers = replay.numbers
    low, high = replay.bounds["low"], replay.bounds["high"]
    changes = replay.changed.change.value_counts()
    return (
        replay.label,
        percent(numbers[LOW]),
        percent(numbers[HIGH]),
        f"{ends(low)} / {ends(high)}",
        percent(numbers["positive_share"]),
        plain(numbers["cosine"]),
        plain(numbers["norm_ratio"]),
        _with_words(changes.get(REGAINED, 0), replay.changed[replay.changed.change == REGAINED]),
        _with_words(changes.get(LOST, 0), replay.changed[replay.changed.change == LOST]),
    )


def by_probability_of(replay: Replay) -> tuple[str, ...]:
    """A setting's clipped tokens by quarter of the old probability, low and high, in percent."""
    return replay.label, *(f"{100 * low:.2f} / {100 * high:.2f} %" for low, high in replay.clipped_by_probability)


BY_PROBABILITY = ("setting", *(f"p {k / QUARTILES:g} to {(k + 1) / QUARTILES:g}" for k in range(QUARTILES)))


def ends(bounds: tuple[float, float, float]) -> str:
    """The least and the greatest bound of a token, or the one that all have."""
    least, _, greatest = bounds
    if math.isclose(least, greatest, rel_tol=1e-6) or least == greatest:
        return f"{least:.3g}"
    return f"{least:.3g} to {greatest:.3g}"


def _with_words(count: int, tokens: pandas.DataFrame) -> str:
    """A number of tokens, and the most frequent words among them."""
    return f"{count}: {words_of(tokens)}" if len(tokens) else str(count)


def words_of(tokens: pandas.DataFrame) -> str:
    """The most frequent words of tokens, and how often each occurs."""
    counts = tokens.text.value_counts().head(WORDS)
    return ", ".join(f"`{visible(text)}` ({'once' if n == 1 else f'{n} times'})" for text, n in counts.items())


def visible(text: str) -> str:
    """A token's text with signs for line ends and blanks, at which a cell would break."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "∅"


def as_json(replay: Replay, most_tokens: int) -> dict[str, Any]:
    """A whole replay for other programs, with at most `most_tokens` of the tokens whose gradient appears or goes."""
    changed = replay.changed.head(most_tokens)
    fields = ["update", "prompt", "sample", "position", "text", "change", "ratio", "low", "high", "advantage"]
    return {
        "setting": replay.label,
        "exact": replay.exact,
        "numbers": {name: number._asdict() for name, number in replay.numbers.items()},
        "by_update": {str(update): found for update, found in replay.by_update.items()},
        "bounds": {
            side: dict(zip(("least", "median", "greatest"), found, strict=True))
            for side, found in replay.bounds.items()
        },
        "clipped_by_probability": [{"low": low, "high": high} for low, high in replay.clipped_by_probability],
        "bounds_against_run": replay.against_run,
        "regained": int((replay.changed.change == REGAINED).sum()),
        "lost": int((replay.changed.change == LOST).sum()),
        "tokens": changed[fields].to_dict("records"),
    }


def heading_of(run: str, updates: Sequence[Any]) -> str:
    """What was replayed: the run, the step, and how many tokens of how many prompts."""
    tokens = sum(len(update.table) for update in updates)
    prompts = len({name for update in updates for name in update.table.prompt})
    traced = f"{run}, step {updates[0].step}, {len(updates)} updates: {tokens} tokens of {prompts} prompts, "
    if all(update.whole for update in updates):
        return f"{traced}all that there were."
    return f"{traced}a part of all. The numbers are estimates."
