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
        run: the first run of the setting that wrote traces.
        step, update: which update.
        tokens: a row for each token with the fields of `traces.SCHEMA`; besides `event`, what happened to it, and
            `under_grpo`, what would have happened at its ratio with the bounds 0.8 and 1.2; both of EVENTS.
        not_finite: how many further tokens have a ratio, probability, advantage or weight that is not finite.
    """

    setting: Setting
    run: Run
    step: int
    update: int
    tokens: pandas.DataFrame
    not_finite: int = 0


def traced_updates(settings: list[Setting]) -> list[TracedUpdate]:
    """Reads an update of each setting: the last that all of them traced and in which each has tokens with an advantage.

    If there is no such update, the last one that all traced; if they share none, the last one of each setting. Settings
    without traces are left out.

    Raises:
        ValueError: a trace cannot be read.
    """
    chosen = [
        (setting, run) for setting in settings if (run := next((run for run in setting.runs if run.shards), None))
    ]
    places = [{(shard.step, shard.update) for shard in run.shards} for _, run in chosen]
    shared = sorted(set.intersection(*places)) if places else []
    learning = (place for place in reversed(shared) if all(_learns(run, place) for _, run in chosen))
    place = next(learning, shared[-1] if shared else None)
    updates = []
    for setting, run in chosen:
        step, update = place or max((shard.step, shard.update) for shard in run.shards)
        updates.append(TracedUpdate(setting, run, step, update, *_tokens(run, (step, update))))
    return [update for update in updates if len(update.tokens)]


def _learns(run: Run, place: tuple[int, int]) -> bool:
    advantages = read_shards(run.traces, run.shards_at(*place)).column("advantage").to_numpy()
    return bool((numpy.isfinite(advantages) & (advantages != 0)).any())


def _tokens(run: Run, place: tuple[int, int]) -> tuple[pandas.DataFrame, int]:
    """Returns the tokens whose numbers are finite, judged, and how many others there are."""
    traced = read_shards(run.traces, run.shards_at(*place)).to_pandas()
    tokens = traced[numpy.isfinite(traced[list(FINITE)]).all(axis=1)].reset_index(drop=True)
    tokens["event"] = events(tokens.advantage, tokens.region, tokens.weight, tokens.ratio)
    out = tokens.rejected.eq(True) | tokens.selected.eq(False)
    tokens.loc[out & tokens.advantage.ne(0), "event"] = OUT
    tokens["under_grpo"] = under_grpo(tokens.ratio, tokens.advantage)
    return tokens, len(traced) - len(tokens)


def events(
    advantages: pandas.Series, regions: pandas.Series, weights: pandas.Series, ratios: pandas.Series
) -> pandas.Series:
    """Says what happened to each token, one of EVENTS; the dual clip counts as clipped high."""
    clipped = weights == 0
    conditions = [
        advantages == 0,
        clipped & (regions != "HP") & (ratios < 1),
        clipped,
        regions.isin(["HN", "HP"]),
        regions.isin(["LN", "LP"]),
    ]
    return pandas.Series(numpy.select(conditions, [NONE, LOW, HIGH, ABOVE, BELOW], KEPT), index=advantages.index)


def under_grpo(ratios: pandas.Series, advantages: pandas.Series) -> pandas.Series:
    """Says what GRPO would do to each token at the same ratio with bounds 0.8 and 1.2, without dual clip."""
    regions = pandas.Series(regions_of(ratios, GRPO_LOW, GRPO_HIGH, advantages), index=ratios.index)
    return events(advantages, regions, ratios.where(~regions.isin(["HP", "LN"]), 0.0), ratios)


def unlike_grpo(tokens: pandas.DataFrame) -> pandas.Series:
    """Returns where a token with an advantage has another gradient weight than GRPO would give it at its ratio."""
    clipped = tokens.under_grpo.isin([LOW, HIGH])
    factor = tokens.correction.astype(float).fillna(1.0)
    same = numpy.isclose(tokens.weight, tokens.ratio.mask(clipped, 0.0) * factor, rtol=1e-3, atol=1e-6)
    return tokens.advantage.ne(0) & ~same


def has_bounds_on_ratio(tokens: pandas.DataFrame) -> bool:
    """Returns whether the bounds act on the tokens' own ratios, not on a sequence's or on a difference."""
    return bool(numpy.isclose(tokens.bounded, tokens.ratio, rtol=1e-5, atol=1e-6).all())
