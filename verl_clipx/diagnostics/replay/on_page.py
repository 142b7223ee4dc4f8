"""Settings replayed for the report's page: a table, and what each would do to the tokens that are shown one by one."""

from collections.abc import Sequence
from dataclasses import replace

import numpy
import pandas

from verl_clipx.diagnostics.replay.command import own_settings
from verl_clipx.diagnostics.replay.measures import Replay, of_run, replay
from verl_clipx.diagnostics.replay.output import HEADINGS, heading_of, row_of
from verl_clipx.diagnostics.replay.tokens import traced_step
from verl_clipx.diagnostics.traced import ReplayTable, TracedUpdate, events
from verl_clipx.driver.candidates import candidates_of

# Of HEADINGS, those that fit the page.
COLUMNS = (0, 1, 2, 3, 5, 7, 8)


def with_replays(update: TracedUpdate, words: list[str]) -> TracedUpdate:
    """Adds to a traced update what other settings would have done.

    Args:
        update: the page's of a run.
        words: as for `candidates_of`.

    Returns:
        With a table of the settings over all updates of the step, and columns `LABEL: low`, `high`, `weight`, `region`
        and `event` for each.

    Raises:
        ValueError: a word or a setting is wrong, or the trace can't be replayed; says so.
    """
    updates = traced_step(update.run, update.step)
    if update.not_finite or update.update not in {one.update for one in updates}:
        raise ValueError(f"--replay: {update.run.name} traced values that are not finite in step {update.step}.")
    own = own_settings(update.run)
    found = [
        replay(label, settings, own, updates)
        for candidate in candidates_of(words)
        for label, settings in candidate.each()
    ]
    tokens = pandas.concat([update.tokens, *(_columns(one, update.update) for one in found)], axis=1)
    rows = [tuple(row_of(one)[column] for column in COLUMNS) for one in (of_run(updates), *found)]
    table = ReplayTable(heading_of(update.run.name, updates), tuple(HEADINGS[column] for column in COLUMNS), rows)
    return replace(update, tokens=tokens, replayed=tuple(one.label for one in found), replays=table)


def _columns(found: Replay, update: int) -> pandas.DataFrame:
    tokens = found.tokens[found.tokens["update"] == update].reset_index(drop=True)
    above, below = tokens.bounded > tokens.high, tokens.bounded < tokens.low
    positive, negative = tokens.advantage > 0, tokens.advantage < 0
    sides = [above & positive, above & negative, below & positive, below & negative]
    regions = pandas.Series(numpy.select(sides, ["HP", "HN", "LP", "LN"], "M"))
    columns = {name: tokens[name] for name in ("low", "high", "weight")} | {"region": regions}
    columns["event"] = events(tokens.advantage.where(tokens.counts, 0.0), regions, tokens.weight, tokens.ratio)
    return pandas.DataFrame(columns).add_prefix(f"{found.label}: ")


def replayed_all(updates: Sequence[TracedUpdate], words: list[str]) -> list[TracedUpdate]:
    """`with_replays` of each update.

    Raises:
        ValueError: as `with_replays`; or no run has traces.
    """
    if not updates:
        raise ValueError("--replay: none of these runs has traces. Train with +clipx/trace=prompts.")
    return [with_replays(update, words) for update in updates]
