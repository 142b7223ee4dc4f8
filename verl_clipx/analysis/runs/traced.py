"""The traced tokens that a report shows: one update of one run of each setting, and what happened to each token."""

from dataclasses import dataclass

import numpy
import pandas

from verl_clipx.analysis.runs.run import Run
from verl_clipx.analysis.runs.settings import Setting
from verl_clipx.run.trace_format import read_shards, regions_of

# What happened to a token. Clipped: its gradient weight is 0 although its advantage is not. Out: a mask, a rejection or
# a selection took it out before any clip.
NONE, KEPT, ABOVE, BELOW, LOW, HIGH, OUT = EVENTS = ("none", "kept", "above", "below", "low", "high", "out")

# Fields that every figure of a token needs; bounds may be infinite, entropy and score may be missing.
FINITE = ("log_prob", "old_log_prob", "ratio", "bounded", "advantage", "weight")

# GRPO's bounds, the yardstick of every figure and of the token view.
GRPO_LOW = 0.8
GRPO_HIGH = 1.2


@dataclass(frozen=True)
class TracedUpdate:
    """The tokens of one optimizer update that a run traced.

    Args:
        setting: the setting whose traces the page shows.
        run: the first run of the setting that wrote traces.
        step, update: the training step, and the number of the update in it, from 0.
        tokens: a row for each token, with the fields of `run.trace_format.SCHEMA` and two of EVENTS: `event` is what
            happened to the token, `under_grpo` what would have happened at its ratio with the bounds 0.8 and 1.2.
        not_finite: how many further tokens have a ratio, probability, advantage or weight that is not finite.
    """

    setting: Setting
    run: Run
    step: int
    update: int
    tokens: pandas.DataFrame
    not_finite: int = 0


def traced_updates(settings: list[Setting]) -> list[TracedUpdate]:
    """Read an update of each setting: the last that all of them traced and in which each has tokens with an advantage.

    If there is no such update, the last one that all traced; if they share none, the last one of each setting. Settings
    without traces are left out.

    Raises:
        ValueError: a trace cannot be read.
    """
    traced_run_of_setting: list[tuple[Setting, Run]] = []
    for setting in settings:
        traced_runs = [run for run in setting.runs if run.shards]
        if traced_runs:
            traced_run_of_setting.append((setting, traced_runs[0]))
    common_place = _choose_common_place([run for _, run in traced_run_of_setting])
    updates: list[TracedUpdate] = []
    for setting, run in traced_run_of_setting:
        place = common_place or max(_places_of(run))
        update = _read_update(setting, run, place)
        if len(update.tokens):
            updates.append(update)
    return updates


Place = tuple[int, int]
"""A training step, and the number of an update in it."""


def _places_of(run: Run) -> set[Place]:
    """Return the updates that a run traced."""
    return {(shard.step, shard.update) for shard in run.shards}


def _choose_common_place(runs: list[Run]) -> Place | None:
    """Return the last update that all runs traced and in which each has tokens with an advantage.

    If there is none, it is the last that all traced; None if they share none.
    """
    if not runs:
        return None
    common = sorted(set.intersection(*[_places_of(run) for run in runs]))
    for place in reversed(common):
        if all(_has_advantage(run, place) for run in runs):
            return place
    return common[-1] if common else None


def _has_advantage(run: Run, place: Place) -> bool:
    """Return whether a traced token of an update has a finite advantage other than 0."""
    advantages = read_shards(run.traces, run.shards_at(*place)).column("advantage").to_numpy()
    return bool((numpy.isfinite(advantages) & (advantages != 0)).any())


def _read_update(setting: Setting, run: Run, place: Place) -> TracedUpdate:
    """Read a traced update: the tokens whose numbers are finite, with what happened to each, and how many others."""
    traced = read_shards(run.traces, run.shards_at(*place)).to_pandas()
    tokens = traced[numpy.isfinite(traced[list(FINITE)]).all(axis=1)].reset_index(drop=True)
    tokens["event"] = events(tokens.advantage, tokens.region, tokens.weight, tokens.ratio)
    is_taken_out = tokens.rejected.eq(True) | tokens.selected.eq(False)
    tokens.loc[is_taken_out & tokens.advantage.ne(0), "event"] = OUT
    tokens["under_grpo"] = under_grpo(tokens.ratio, tokens.advantage)
    step, update = place
    return TracedUpdate(
        setting=setting,
        run=run,
        step=step,
        update=update,
        tokens=tokens,
        not_finite=len(traced) - len(tokens),
    )


def events(
    advantages: pandas.Series, regions: pandas.Series, weights: pandas.Series, ratios: pandas.Series
) -> pandas.Series:
    """Say what happened to each token, one of EVENTS; the dual clip counts as clipped high."""
    clipped = weights == 0
    # The first condition that holds decides.
    event_of_condition = {
        NONE: advantages == 0,
        LOW: clipped & (regions != "HP") & (ratios < 1),
        HIGH: clipped,
        ABOVE: regions.isin(["HN", "HP"]),
        BELOW: regions.isin(["LN", "LP"]),
    }
    chosen = numpy.select([*event_of_condition.values()], [*event_of_condition], KEPT)
    return pandas.Series(chosen, index=advantages.index)


def under_grpo(ratios: pandas.Series, advantages: pandas.Series) -> pandas.Series:
    """Say what GRPO would do to each token at the same ratio with bounds 0.8 and 1.2, without dual clip."""
    regions = pandas.Series(regions_of(ratios, GRPO_LOW, GRPO_HIGH, advantages), index=ratios.index)
    weights = ratios.where(~regions.isin(["HP", "LN"]), 0.0)
    return events(advantages, regions, weights, ratios)


def unlike_grpo(tokens: pandas.DataFrame) -> pandas.Series:
    """Return, for each token, whether it has an advantage and another gradient weight than GRPO would give it."""
    clipped = tokens.under_grpo.isin([LOW, HIGH])
    correction = tokens.correction.astype(float).fillna(1.0)
    grpo_weight = tokens.ratio.mask(clipped, 0.0) * correction
    is_same = numpy.isclose(tokens.weight, grpo_weight, rtol=1e-3, atol=1e-6)
    return tokens.advantage.ne(0) & ~is_same


def has_bounds_on_ratio(tokens: pandas.DataFrame) -> bool:
    """Return whether the bounds act on the tokens' own ratios, not on a sequence's or on a difference."""
    return bool(numpy.isclose(tokens.bounded, tokens.ratio, rtol=1e-5, atol=1e-6).all())
