"""A replay as lists for the terminal and as JSON."""

import math
from collections.abc import Sequence
from typing import Any

import pandas
from rich.markup import escape

from verl_clipx.analysis.replay.command import ReplayedRun
from verl_clipx.analysis.replay.measures import HIGH, LOW, Replay
from verl_clipx.analysis.replay.of_run import OF_RATIOS, OF_SAMPLER, cells_of, sampler_by
from verl_clipx.analysis.runs.traced import has_bounds_on_ratio
from verl_clipx.common.sentences import number, percent
from verl_clipx.common.terminal import TerminalConsole

# How many words of changed tokens are shown for each setting.
WORDS = 6
HEADINGS = ("setting", "clipped low", "clipped high", "bounds", "gradient A > 0", "cosine", "norm ratio")
MEANINGS = (
    "cosine: of this step’s F·A with the run’s own, over all tokens, 1 if both push the same way; norm ratio: its "
    "length over the run’s"
)
OUTSIDE = "outside: beyond the bounds, and kept or pulled back"

# What no replay can say.
UNKNOWN = (
    "What the policy would have become is not known: after its first own update another method has other weights, "
    "samples other tokens and meets other ratios. Each row is that method's step on this run's tokens."
)


def content_of(replayed: ReplayedRun, tokens: int) -> dict[str, Any]:
    """Returns all numbers of a replay, for JSON, with so many changed tokens of each setting."""
    return {
        "run": replayed.run.name,
        "step": replayed.updates[0].step,
        "exact": replayed.of_run.exact,
        "of_run": as_json(replayed.of_run, 0),
        "settings": [as_json(one, tokens) for one in replayed.settings],
        **{f"sampler_by_{group}": sampler_by(group, replayed.updates) for group in ("age", "turn")},
        "unknown": UNKNOWN,
    }


def print_replayed(console: TerminalConsole, replayed: ReplayedRun) -> None:
    """Prints a replay: lists, then how near the run's own setting comes, and what is unknown."""
    replays = [replayed.of_run, *replayed.settings]
    estimates = "estimates, [95 % interval over prompts] where each update has five prompts"
    notes = [MEANINGS, *[OUTSIDE] * any(keeps_outside(one, side) for one in replays for side in ("LN", "HP"))]
    console.print_line(heading_of(replayed.run.name, replayed.updates))
    rows = [list(map(escape, row_of(one))) for one in replays]
    caption = "; ".join([*notes, *[estimates] * (not replayed.of_run.exact)])
    console.print_list("what each would do to this run's tokens", HEADINGS, rows, caption)
    for group, title in (("age", "age of the weights that sampled"), ("turn", "turn of the response")):
        if len(found := sampler_by(group, replayed.updates)) > (group == "turn"):
            rows = [(name, *cells_of(numbers)) for name, numbers in found.items()]
            console.print_list(f"the sampler against the trainer, by {title}", (group, *OF_SAMPLER), rows, OF_RATIOS)
    for one in replayed.settings:
        changes = (f"{what} {len(of)}{': ' * bool(len(of))}{words_of(of)}" for what, of in one.changes.items())
        console.print_line(f"{one.label}: {'; '.join(changes)}.")
    for one in replayed.settings:
        if one.against_run is not None:
            within = f"its bounds are within {one.against_run:.1g} of those it trained with"
            console.print_line(f"{one.label}: the run's own setting; {within}.")
    console.print_line(UNKNOWN)


def row_of(replay: Replay) -> tuple[str, ...]:
    """Returns a setting's cells, by HEADINGS."""
    numbers = replay.numbers
    kept = [" outside" * keeps_outside(replay, region) for region in ("LN", "HP")]
    return (
        replay.label,
        f"{percent(*numbers[LOW], digits=2)}{kept[0]}",
        f"{percent(*numbers[HIGH], digits=2)}{kept[1]}",
        " / ".join(_ends(replay, side) for side in ("low", "high")),
        percent(*numbers["positive_share"], digits=2),
        number(*numbers["cosine"]),
        number(*numbers["norm_ratio"]),
    )


def keeps_outside(replay: Replay, region: str) -> bool:
    """Returns whether tokens beyond a bound, where PPO would clip them, have a gradient."""
    there = replay.tokens[replay.tokens.region.eq(region) & replay.tokens.counts]
    return bool((there.weight != 0).any())


def _ends(replay: Replay, side: str) -> str:
    """Returns the least and the greatest bound of a token, or the one that all have; 0 is no lower bound on a ratio."""
    least, _, greatest = replay.bounds[side]
    if has_bounds_on_ratio(replay.tokens):
        least, greatest = max(least, 0.0), max(greatest, 0.0)
    if math.isclose(least, greatest, rel_tol=1e-6):
        return f"{least:.3g}"
    return f"{least:.3g} to {greatest:.3g}"


def words_of(tokens: pandas.DataFrame) -> str:
    """Returns the most frequent words of tokens, with signs for line ends and blanks, and how often each occurs."""
    counts = tokens.text.str.replace("\n", "⏎").str.replace("\t", "⇥").str.replace(" ", "␣").replace("", "∅")
    words = counts.value_counts().head(WORDS).items()
    return ", ".join(f"`{word}` ({'once' if n == 1 else f'{n} times'})" for word, n in words)


def as_json(replay: Replay, most_tokens: int) -> dict[str, Any]:
    """Returns a replay for other programs, with at most `most_tokens` of the tokens whose gradient appears or goes."""
    changed = replay.tokens[replay.tokens.change != ""].head(most_tokens)
    fields = ["update", "prompt", "sample", "position", "text", "change", "ratio", "low", "high", "advantage"]
    ends = ("least", "median", "greatest")
    return {
        "setting": replay.label,
        "exact": replay.exact,
        "numbers": {name: number._asdict() for name, number in replay.numbers.items()},
        "bounds": {side: dict(zip(ends, bounds, strict=True)) for side, bounds in replay.bounds.items()},
        "bounds_against_run": replay.against_run,
        **{change: len(tokens) for change, tokens in replay.changes.items()},
        "tokens": changed[fields].to_dict("records"),
    }


def heading_of(run: str, updates: Sequence[Any]) -> str:
    """Says what was replayed: the run, the step, and how many tokens of how many prompts."""
    tokens = sum(len(update.table) for update in updates)
    prompts = len({name for update in updates for name in update.table.prompt})
    whole = all(update.whole for update in updates)
    counted = all(facts.lost is not None for update in updates for facts in update.facts)
    all_of_them = "all that there were." if counted else "all that its files have: they don't say how many there were."
    what = all_of_them if whole else "a part of all. The numbers are estimates."
    return f"{run}, step {updates[0].step}, {len(updates)} updates: {tokens} tokens of {prompts} prompts, {what}"
