"""Replays settings for the report's page: a table, and what each would do to the tokens that are shown one by one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy
import pandas

from verl_clipx.common.sentences import Finding
from verl_clipx.replay.command import chosen_settings, own_settings, said
from verl_clipx.replay.match import target_of
from verl_clipx.replay.measures import HIGH, LOW, REGAINED, Replay, of_run, replay
from verl_clipx.replay.numbers import percent
from verl_clipx.replay.of_run import how_exact
from verl_clipx.replay.output import HEADINGS, heading_of, row_of, words_of
from verl_clipx.replay.tokens import traced_step
from verl_clipx.run.candidates import candidates_of
from verl_clipx.runs.traced import ReplayTable, TracedUpdate, events

# Which of HEADINGS fit the page.
COLUMNS = (0, 1, 2, 3, 5, 7, 8)


def with_replays(
    updates: Sequence[TracedUpdate], words: Sequence[str], matches: Sequence[str]
) -> tuple[list[TracedUpdate], list[Finding]]:
    """Adds to the traced updates of a page what other settings would have done.

    Args:
        updates: one of each run with traces.
        words: as for `candidates_of`.
        matches: each a quantity with its number, as for `target_of`, and then a method with one parameter's range.

    Returns:
        The updates, each with a table of the settings over all updates of its step, and columns `LABEL: low`, `high`,
        `weight`, `region` and `event` for each; and what they would have done, in sentences.

    Raises:
        ValueError: no run has traces, a word or a setting is wrong, or a trace cannot be replayed; says which.
    """
    if not updates:
        raise ValueError("--replay, --match: none of these runs has traces. Train with +clipx/trace=prompts.")
    found = [_with_replays(update, words, matches) for update in updates]
    return [update for update, _ in found], [finding for _, told in found for finding in told]


def _with_replays(
    update: TracedUpdate, words: Sequence[str], matches: Sequence[str]
) -> tuple[TracedUpdate, list[Finding]]:
    updates = traced_step(update.run, update.step)
    if update.not_finite or update.update not in {one.update for one in updates}:
        raise ValueError(f"--replay: {update.run.name} traced values that are not finite in step {update.step}.")
    own, of_this = own_settings(update.run), of_run(updates)
    wanted = [(None, words)] if words else []
    wanted += [(target_of(quantity), rest) for quantity, *rest in (text.split() or [""] for text in matches)]
    found, told = [], []
    for target, of_words in wanted:
        for label, settings, match in chosen_settings(candidates_of(list(of_words)), target, own, updates):
            one = replay(label, settings, own, updates)
            found.append(one)
            told.append(_kept(one, of_this, update) if match is None else said(*match, *target, exact=one.exact))
    tokens = pandas.concat([update.tokens, *(_columns(one, update.update) for one in found)], axis=1)
    rows = [tuple(row_of(one)[column] for column in COLUMNS) for one in (of_this, *found)]
    table = ReplayTable(heading_of(update.run.name, updates), tuple(HEADINGS[column] for column in COLUMNS), rows)
    return replace(update, tokens=tokens, replayed=tuple(one.label for one in found), replays=table), told


def _kept(one: Replay, of_this: Replay, update: TracedUpdate) -> Finding:
    """How many tokens that the run clipped keep a gradient under a setting, which ones, and what that would clip."""
    regained = one.changed[one.changed.change == REGAINED]
    without = int(((of_this.tokens.weight == 0) & (of_this.tokens.advantage != 0)).sum())
    clipped = f"It would clip {percent(one.numbers[LOW])} low and {percent(one.numbers[HIGH])} high"
    words = f"Most frequent: {words_of(regained)}. " if len(regained) else ""
    return Finding(
        f"{one.label} would have given a gradient to {len(regained)} of the {without} traced tokens that "
        f"{update.run.name} left without one in step {update.step}.",
        f"{words}{clipped}. {how_exact(one.numbers[LOW], whole=one.exact)}",
    )


def _columns(found: Replay, update: int) -> pandas.DataFrame:
    tokens = found.tokens[found.tokens["update"] == update].reset_index(drop=True)
    above, below = tokens.bounded > tokens.high, tokens.bounded < tokens.low
    positive, negative = tokens.advantage > 0, tokens.advantage < 0
    sides = [above & positive, above & negative, below & positive, below & negative]
    regions = pandas.Series(numpy.select(sides, ["HP", "HN", "LP", "LN"], "M"))
    columns = {name: tokens[name] for name in ("low", "high", "weight")} | {"region": regions}
    columns["event"] = events(tokens.advantage.where(tokens.counts, 0.0), regions, tokens.weight, tokens.ratio)
    return pandas.DataFrame(columns).add_prefix(f"{found.label}: ")
