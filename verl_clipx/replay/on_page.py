"""Replays settings for the report's page: a table, and what each would do to the tokens that are shown one by one."""

from collections.abc import Sequence
from dataclasses import replace

import pandas

from verl_clipx.replay.command import own_settings, replay_settings
from verl_clipx.replay.measures import LOST, REGAINED, Replay, of_run
from verl_clipx.replay.output import HEADINGS, changes_of, heading_of, row_of
from verl_clipx.replay.tokens import traced_step
from verl_clipx.run.candidates import candidates_of
from verl_clipx.runs.traced import OUT, ReplayTable, TracedUpdate, events, has_bounds_on_ratio

# Which of HEADINGS fit the page beside the words of changed tokens.
COLUMNS = (0, 1, 2, 3, 5)


def with_replays(updates: Sequence[TracedUpdate], words: list[str]) -> list[TracedUpdate]:
    """Adds to the traced updates of a page what other settings would have done.

    Args:
        updates: one of each run with traces.
        words: as for `candidates_of`.

    Returns:
        The updates, each with a table of the settings over all updates of its step, and columns `LABEL: low`, `high`,
        `weight`, `region` and `event` for each.

    Raises:
        ValueError: no run has traces, a word or a setting is wrong, or a trace cannot be replayed; says which.
    """
    if not updates:
        raise ValueError("--replay: none of these runs has traces. Train with +clipx/trace=prompts.")
    return [_with_replays(update, words) for update in updates]


def _with_replays(update: TracedUpdate, words: list[str]) -> TracedUpdate:
    updates = traced_step(update.run, update.step)
    if update.not_finite or update.update not in {one.update for one in updates}:
        raise ValueError(f"--replay: {update.name} traced values that are not finite in step {update.step}.")
    replays = replay_settings(candidates_of(words), own_settings(update.run), updates)
    tokens = pandas.concat([update.tokens, *(_columns(one, update.update) for one in replays)], axis=1)
    rows = [(*(row_of(one)[column] for column in COLUMNS), *changes_of(one)) for one in (of_run(updates), *replays)]
    headings = (*(HEADINGS[column] for column in COLUMNS), REGAINED, LOST)
    table = ReplayTable(heading_of(update.name, updates), headings, rows)
    return replace(update, tokens=tokens, replayed=tuple(one.label for one in replays), replays=table)


def _columns(replay: Replay, update: int) -> pandas.DataFrame:
    tokens = replay.tokens[replay.tokens["update"] == update].reset_index(drop=True)
    event = events(tokens.advantage.where(tokens.counts, 0.0), tokens.region, tokens.weight, tokens.ratio)
    event = event.mask(~tokens.trained & tokens.advantage.ne(0), OUT)
    low = tokens.low.clip(lower=0) if has_bounds_on_ratio(tokens) else tokens.low
    return tokens[["low", "high", "weight", "region"]].assign(low=low, event=event).add_prefix(f"{replay.label}: ")
