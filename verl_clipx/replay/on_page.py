"""Replays settings for the report's page: a table, and what each would do to the tokens that are shown one by one."""

from collections.abc import Sequence
from dataclasses import replace

import pandas

from verl_clipx.common.sentences import Finding
from verl_clipx.replay.command import own_settings, replay_settings
from verl_clipx.replay.measures import HIGH, LOST, LOW, REGAINED, Replay, of_run
from verl_clipx.replay.of_run import how_exact, percent
from verl_clipx.replay.output import HEADINGS, changes_of, heading_of, row_of, words_of
from verl_clipx.replay.tokens import traced_step
from verl_clipx.run.candidates import candidates_of
from verl_clipx.runs.traced import OUT, ReplayTable, TracedUpdate, events, has_bounds_on_ratio

# Which of HEADINGS fit the page beside the words of changed tokens.
COLUMNS = (0, 1, 2, 3, 5)


def with_replays(updates: Sequence[TracedUpdate], words: list[str]) -> tuple[list[TracedUpdate], list[Finding]]:
    """Adds to the traced updates of a page what other settings would have done.

    Args:
        updates: one of each run with traces.
        words: as for `candidates_of`.

    Returns:
        The updates, each with a table of the settings over all updates of its step, and columns `LABEL: low`, `high`,
        `weight`, `region` and `event` for each; and what they would have done, in sentences.

    Raises:
        ValueError: no run has traces, a word or a setting is wrong, or a trace cannot be replayed; says which.
    """
    if not updates:
        raise ValueError("--replay: none of these runs has traces. Train with +clipx/trace=prompts.")
    replayed, sentences = zip(*(_with_replays(update, words) for update in updates), strict=True)
    return list(replayed), [finding for of_update in sentences for finding in of_update]


def _with_replays(update: TracedUpdate, words: list[str]) -> tuple[TracedUpdate, list[Finding]]:
    updates = traced_step(update.run, update.step)
    if update.not_finite or update.update not in {one.update for one in updates}:
        raise ValueError(f"--replay: {update.name} traced values that are not finite in step {update.step}.")
    of_this = of_run(updates)
    replays = replay_settings(candidates_of(words), own_settings(update.run), updates)
    sentences = [_say_what_is_kept(one, of_this, update) for one in replays]
    tokens = pandas.concat([update.tokens, *(_columns(one, update.update) for one in replays)], axis=1)
    rows = [(*(row_of(one)[column] for column in COLUMNS), *changes_of(one)) for one in (of_this, *replays)]
    headings = (*(HEADINGS[column] for column in COLUMNS), REGAINED, LOST)
    table = ReplayTable(heading_of(update.name, updates), headings, rows)
    labels = tuple(one.label for one in replays)
    return replace(update, tokens=tokens, replayed=labels, replays=table), sentences


def _say_what_is_kept(one: Replay, of_this: Replay, update: TracedUpdate) -> Finding:
    """How many tokens that the run clipped keep a gradient under a setting, which ones, and what that would clip."""
    regained = one.changed[one.changed.change == REGAINED]
    without = int(((of_this.tokens.weight == 0) & (of_this.tokens.advantage != 0)).sum())
    clipped = f"It would clip {percent(one.numbers[LOW])} low and {percent(one.numbers[HIGH])} high"
    words = f"Most frequent: {words_of(regained)}. " if len(regained) else ""
    return Finding(
        f"{one.label} would have given a gradient to {len(regained)} of the {without} traced tokens that "
        f"{update.name} left without one in step {update.step}.",
        f"{words}{clipped}. {how_exact(one.numbers[LOW], whole=one.exact)}",
    )


def _columns(replay: Replay, update: int) -> pandas.DataFrame:
    tokens = replay.tokens[replay.tokens["update"] == update].reset_index(drop=True)
    event = events(tokens.advantage.where(tokens.counts, 0.0), tokens.region, tokens.weight, tokens.ratio)
    event = event.mask(~tokens.trained & tokens.advantage.ne(0), OUT)
    low = tokens.low.clip(lower=0) if has_bounds_on_ratio(tokens) else tokens.low
    return tokens[["low", "high", "weight", "region"]].assign(low=low, event=event).add_prefix(f"{replay.label}: ")
