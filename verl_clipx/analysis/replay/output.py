"""A replay as lists for the terminal and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import pandas
from rich.markup import escape

from verl_clipx.analysis.replay.command import ReplayedRun
from verl_clipx.analysis.replay.measures import HIGH, LOW, Replay
from verl_clipx.analysis.replay.tokens import TracedTokens
from verl_clipx.analysis.replay.traced_numbers import (
    MEANING_OF_HEADINGS,
    SAMPLER_HEADINGS,
    compare_sampler_by,
    format_comparison,
)
from verl_clipx.analysis.runs.traced import has_bounds_on_ratio
from verl_clipx.common.sentences import number, percent
from verl_clipx.common.terminal import TerminalConsole

# How many words of changed tokens are shown for each setting.
WORDS = 6
HEADINGS = ("setting", "clipped low", "clipped high", "bounds", "gradient A > 0", "cosine", "norm ratio")
# The regions in which PPO clips.
BEYOND_LOW = "LN"
BEYOND_HIGH = "HP"
# The columns by whose values tokens are grouped to compare the sampler with the trainer, and what a list calls each.
GROUPS = {"age": "age of the weights that sampled", "turn": "turn of the response"}
MEANINGS = (
    "cosine: of this step’s F·A with the run’s own, over all tokens, 1 if both push the same way; norm ratio: its "
    "length over the run’s"
)
OUTSIDE = "outside: beyond the bounds, and kept or pulled back"
ESTIMATES = "estimates, [95 % interval over prompts] where each update has five prompts"

# What no replay can say.
UNKNOWN = (
    "What the policy would have become is not known: after its first own update another method has other weights, "
    "samples other tokens and meets other ratios. Each row is that method's step on this run's tokens."
)

# The columns of a changed token in JSON.
TOKEN_FIELDS = ["update", "prompt", "sample", "position", "text", "change", "ratio", "low", "high", "advantage"]


def replayed_as_json(replayed: ReplayedRun, most_tokens: int) -> dict[str, Any]:
    """Return all numbers of a replay, for JSON.

    Args:
        replayed: the replay.
        most_tokens: how many tokens of each setting are listed at most, of those whose gradient appears or goes; of the
            run itself none is.
    """
    comparisons = {f"sampler_by_{column}": compare_sampler_by(column, replayed.updates) for column in GROUPS}
    return {
        "run": replayed.run.name,
        "step": replayed.updates[0].step,
        "exact": replayed.as_trained.exact,
        "of_run": setting_as_json(replayed.as_trained, most_tokens=0),
        "settings": [setting_as_json(replay, most_tokens) for replay in replayed.settings],
        **comparisons,
        "unknown": UNKNOWN,
    }


def print_replayed(console: TerminalConsole, replayed: ReplayedRun) -> None:
    """Print a replay: lists, then how near the run's own setting comes, and what is unknown."""
    replays = [replayed.as_trained, *replayed.settings]
    console.print_line(heading_of(replayed.run.name, replayed.updates))
    console.print_list(
        "what each would do to this run's tokens",
        HEADINGS,
        [[escape(cell) for cell in format_row(replay)] for replay in replays],
        caption_of(replays, exact=replayed.as_trained.exact),
    )
    for column in GROUPS:
        print_sampler(console, column, replayed.updates)
    for replay in replayed.settings:
        console.print_line(say_changes(replay))
    for replay in replayed.settings:
        if replay.against_run is not None:
            console.print_line(
                f"{replay.label}: the run's own setting; its bounds are within {replay.against_run:.1g} of those it "
                "trained with."
            )
    console.print_line(UNKNOWN)


def caption_of(replays: Sequence[Replay], *, exact: bool) -> str:
    """Explain what is in the list of replays."""
    notes = [MEANINGS]
    if any(has_gradient_beyond(replay, side) for replay in replays for side in (BEYOND_LOW, BEYOND_HIGH)):
        notes.append(OUTSIDE)
    if not exact:
        notes.append(ESTIMATES)
    return "; ".join(notes)


def print_sampler(console: TerminalConsole, column: str, updates: Sequence[TracedTokens]) -> None:
    """Print how far the sampler is from the trainer, a row for each value of a column.

    Nothing is printed if the sampler's log-probabilities are not traced, or by turn if all responses have a single one.

    Args:
        console: where to print.
        column: one of GROUPS.
        updates: the step's updates.
    """
    numbers_by_value = compare_sampler_by(column, updates)
    has_single_turn = column == "turn" and len(numbers_by_value) == 1
    if not numbers_by_value or has_single_turn:
        return
    rows = [(value, *format_comparison(numbers)) for value, numbers in numbers_by_value.items()]
    title = f"the sampler against the trainer, by {GROUPS[column]}"
    console.print_list(title, (column, *SAMPLER_HEADINGS), rows, MEANING_OF_HEADINGS)


def say_changes(replay: Replay) -> str:
    """Say how many tokens regain and lose their gradient under a setting, and which words are frequent among them."""
    changes = []
    for change, tokens in replay.changes.items():
        text = f"{change} {len(tokens)}"
        if len(tokens):
            text += f": {words_of(tokens)}"
        changes.append(text)
    return f"{replay.label}: {'; '.join(changes)}."


def format_row(replay: Replay) -> tuple[str, ...]:
    """Return a setting's row in the list: a cell for each of HEADINGS."""
    numbers = replay.numbers
    return (
        replay.label,
        _clipped_cell(replay, LOW, BEYOND_LOW),
        _clipped_cell(replay, HIGH, BEYOND_HIGH),
        f"{_ends_of_bound(replay, 'low')} / {_ends_of_bound(replay, 'high')}",
        percent(*numbers["positive_share"], digits=2),
        number(*numbers["cosine"]),
        number(*numbers["norm_ratio"]),
    )


def _clipped_cell(replay: Replay, name: str, region: str) -> str:
    """Return the share of tokens beyond a bound, and whether they have a gradient there."""
    share = percent(*replay.numbers[name], digits=2)
    return f"{share} outside" if has_gradient_beyond(replay, region) else share


def has_gradient_beyond(replay: Replay, region: str) -> bool:
    """Return whether tokens beyond a bound, where PPO would clip them, have a gradient."""
    beyond = replay.tokens[replay.tokens.region.eq(region) & replay.tokens.counts]
    return bool((beyond.weight != 0).any())


def _ends_of_bound(replay: Replay, side: str) -> str:
    """Return the least and the greatest bound of any token on one side, or the one bound that all tokens have.

    A bound on a ratio that lies below 0 is written as 0: no ratio is lower.
    """
    least, _, greatest = replay.bounds[side]
    if has_bounds_on_ratio(replay.tokens):
        least = max(least, 0.0)
        greatest = max(greatest, 0.0)
    if math.isclose(least, greatest, rel_tol=1e-6):
        return f"{least:.3g}"
    return f"{least:.3g} to {greatest:.3g}"


def words_of(tokens: pandas.DataFrame) -> str:
    """Return the most frequent texts of tokens, and how often each occurs; white space has visible signs."""
    visible = tokens.text.str.replace("\n", "⏎").str.replace("\t", "⇥").str.replace(" ", "␣").replace("", "∅")
    counts = visible.value_counts().head(WORDS)
    words = []
    for word, count in counts.items():
        times = "once" if count == 1 else f"{count} times"
        words.append(f"`{word}` ({times})")
    return ", ".join(words)


def setting_as_json(replay: Replay, most_tokens: int) -> dict[str, Any]:
    """Return a replay for other programs, with at most `most_tokens` of the tokens whose gradient appears or goes."""
    changed = replay.tokens[replay.tokens.change != ""].head(most_tokens)
    bounds = {}
    for side, (least, median, greatest) in replay.bounds.items():
        bounds[side] = {"least": least, "median": median, "greatest": greatest}
    return {
        "setting": replay.label,
        "exact": replay.exact,
        "numbers": {name: value._asdict() for name, value in replay.numbers.items()},
        "bounds": bounds,
        "bounds_against_run": replay.against_run,
        **{change: len(tokens) for change, tokens in replay.changes.items()},
        "tokens": changed[TOKEN_FIELDS].to_dict("records"),
    }


def heading_of(run: str, updates: Sequence[TracedTokens]) -> str:
    """Say what was replayed: the run, the step, how many tokens of how many prompts, and whether these are all.

    Args:
        run: the run's name.
        updates: the step's updates.
    """
    token_count = sum(len(update.table) for update in updates)
    prompt_count = len({prompt for update in updates for prompt in update.table.prompt})
    counted = f"{run}, step {updates[0].step}, {len(updates)} updates: {token_count} tokens of {prompt_count} prompts"
    if not all(update.whole for update in updates):
        return f"{counted}, a part of all. The numbers are estimates."
    # A file says how many of its rows were lost, unless an older version wrote it.
    say_lost_rows = all(facts.lost is not None for update in updates for facts in update.facts)
    if say_lost_rows:
        return f"{counted}, all that there were."
    return f"{counted}, all that its files have: they don't say how many there were."
