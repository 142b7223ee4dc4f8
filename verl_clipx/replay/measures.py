"""The numbers of a replay of one setting over the updates of a step, exact or with an interval."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
import pandas
import torch

from verl_clipx.base.shared_metrics import QUARTILES
from verl_clipx.common.statistics.bootstrap import FEWEST_UNITS, percentile_interval, resamples
from verl_clipx.replay.loss import LossOnTokens, is_own, refused, replayed
from verl_clipx.replay.numbers import Number
from verl_clipx.replay.of_run import HIGH, LOW, REPLICATES, numbers_of_run
from verl_clipx.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.run.config import Settings

POSITIVE, NEGATIVE = "clipx/contribution/positive", "clipx/contribution/negative"

# What --match can aim at, from a setting's numbers.
QUANTITIES: dict[str, Callable[[Mapping[str, float]], float]] = {
    "clip_fraction": lambda found: found[LOW] + found[HIGH],
    "positive_share": lambda found: _share(found[POSITIVE], found[NEGATIVE]),
    "entropy_clip_estimate": lambda found: found["clipx/entropy_clip_estimate"],
}

# What becomes of a token's gradient, from the run to the replay.
REGAINED, LOST = "regained", "lost"


@dataclass(frozen=True)
class Replay:
    """A setting on the traced tokens of a step.

    Args:
        label: the setting's.
        exact: whether the trace has every token of the step's updates.
        numbers: name to number: the metrics, means over the updates as training logs them; of QUANTITIES; `cosine` and
            `norm_ratio` of F * A over all tokens against the run's.
        by_update: update to the same numbers, without intervals.
        bounds: `low` and `high` to the least, the median and the greatest bound of a token.
        clipped_by_probability: for each quarter of the old probability's range, the shares of tokens in LN and HP.
        tokens: a row for each token of all updates: what the setting does to it, and `change`, which is empty, REGAINED
            or LOST.
        against_run: for the run's own setting, the largest difference of a bound from the one that the run trained
            with, relative to it; None for others.
    """

    label: str
    exact: bool
    numbers: dict[str, Number]
    by_update: dict[int, dict[str, float]]
    bounds: dict[str, tuple[float, float, float]]
    clipped_by_probability: list[tuple[float, float]]
    tokens: pandas.DataFrame
    against_run: float | None = None

    @property
    def changed(self) -> pandas.DataFrame:
        """The tokens that have a gradient either in the run or under the setting, but not in both."""
        return self.tokens[self.tokens.change != ""]


def replay(label: str, settings: Settings, own: Settings | None, updates: Sequence[TracedTokens]) -> Replay:
    """Applies a loss to the tokens of a step's updates.

    Args:
        label: what to call the setting.
        settings: the loss.
        own: the run's own settings, or None if unknown.
        updates: those of one step, at least one.

    Raises:
        ValueError: the trace lacks what the loss needs; names it.
    """
    for update in updates:
        if reason := refused(settings, own, update):
            raise ValueError(f"{label}: {reason}")
    losses = [replayed(settings, own, update, update.batch) for update in updates]
    measured = [measures(loss, update.batch) for loss, update in zip(losses, updates, strict=True)]
    exact, together = all(update.whole for update in updates), over_updates(measured)
    intervals = {} if exact else _intervals(settings, own, updates)
    # A token's fields, over all updates.
    tokens = pandas.concat(
        [_tokens(loss, update) for loss, update in zip(losses, updates, strict=True)], ignore_index=True
    )
    return Replay(
        label,
        exact,
        {name: Number(value, *intervals.get(name, (None, None))) for name, value in together.items()},
        {update.update: over_updates([found]) for update, found in zip(updates, measured, strict=True)},
        _ends(tokens),
        _by_probability(tokens),
        tokens,
        _against(tokens, updates) if is_own(settings, own) else None,
    )


def of_run(updates: Sequence[TracedTokens]) -> Replay:
    """What the trace says of the run itself, in the form of a replay."""
    tokens = pandas.concat([_as_traced(update) for update in updates], ignore_index=True)
    whole = all(update.whole for update in updates)
    numbers = numbers_of_run([update.table for update in updates], whole=whole)
    return Replay(
        "the run, as traced",
        whole,
        numbers | {"cosine": Number(1.0), "norm_ratio": Number(1.0)},
        {},
        _ends(tokens),
        _by_probability(tokens),
        tokens,
    )


def measures(loss: LossOnTokens, batch: TokenBatch) -> dict[str, float]:
    """The metrics of an update, and the sums behind cosine and norm ratio, which begin with "sum/"."""
    mine = torch.where(batch.inputs.mask, loss.trace.weight * loss.trace.advantage, 0.0).to(torch.float64)
    of_run = batch.weighted.to(torch.float64)
    products = {"both": mine * of_run, "mine": mine.square(), "run": of_run.square()}
    return loss.metrics | {f"sum/{name}": float(values.sum()) for name, values in products.items()}


def over_updates(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The numbers of several updates together: means of metrics, as verl logs them, and what is made of sums."""
    found = {name: float(numpy.mean([one[name] for one in measured])) for name in measured[0]}
    both, mine, run = (found.pop(f"sum/{name}") for name in ("both", "mine", "run"))
    found["cosine"] = both / math.sqrt(mine * run) if mine * run > 0 else math.nan
    found["norm_ratio"] = math.sqrt(mine / run) if run > 0 else math.nan
    return found | {name: of(found) for name, of in QUANTITIES.items() if name not in found}


def resampled(updates: Sequence[TracedTokens]) -> Iterator[list[TokenBatch]]:
    """The updates' tokens with prompts drawn anew, for each update by itself; nothing with too few prompts."""
    units = [int(update.batch.prompt.max()) + 1 for update in updates]
    if min(units) < FEWEST_UNITS:
        return
    of_prompt = [
        [(update.batch.prompt == unit).nonzero()[:, 0] for unit in range(n)]
        for update, n in zip(updates, units, strict=True)
    ]
    drawn = [resamples(n, REPLICATES, seed) for seed, n in enumerate(units)]
    for replicate in range(REPLICATES):
        yield [
            update.batch.rows(torch.cat([rows[unit] for unit in units_drawn[replicate]]))
            for update, rows, units_drawn in zip(updates, of_prompt, drawn, strict=True)
        ]


def _intervals(settings: Settings, own: Settings | None, updates: Sequence[TracedTokens]) -> dict[str, tuple]:
    """The interval of each number over resamples of the prompts; empty with too few."""
    found: dict[str, list[float]] = {}
    for batches in resampled(updates):
        measured = [
            measures(replayed(settings, own, update, batch), batch)
            for update, batch in zip(updates, batches, strict=True)
        ]
        for name, value in over_updates(measured).items():
            found.setdefault(name, []).append(value)
    return {name: interval for name, values in found.items() if (interval := percentile_interval(values))}


def _tokens(loss: LossOnTokens, update: TracedTokens) -> pandas.DataFrame:
    """The traced tokens with what the loss does to each."""
    table = update.table[["step", "update", "prompt", "sample", "position", "text", "old_log_prob", "ratio"]].copy()
    batch = update.batch
    for name, values in loss.trace._asdict().items():
        if name in ("low", "high", "bounded", "weight", "advantage"):
            table[name] = values[batch.whole].numpy()
    table["run_weight"] = update.table.weight
    # A token without an advantage has no gradient under any loss, so it counts as unchanged.
    before = (batch.weighted != 0)[batch.whole].numpy()
    after = (table.weight * table.advantage).to_numpy() != 0
    after &= batch.inputs.mask[batch.whole].numpy()
    table["change"] = numpy.select([after & ~before, before & ~after], [REGAINED, LOST], "")
    table["counts"] = (batch.inputs.mask if batch.inputs.counted is None else batch.inputs.mask & batch.inputs.counted)[
        batch.whole
    ].numpy()
    return table


def _as_traced(update: TracedTokens) -> pandas.DataFrame:
    return update.table.assign(change="", counts=~update.table.rejected.eq(True) & ~update.table.counted.eq(False))


def _ends(tokens: pandas.DataFrame) -> dict[str, tuple[float, float, float]]:
    """The least, the median and the greatest value of each bound."""
    return {
        name: (float(tokens[name].min()), float(tokens[name].median()), float(tokens[name].max()))
        for name in ("low", "high")
    }


def _against(tokens: pandas.DataFrame, updates: Sequence[TracedTokens]) -> float:
    """The largest relative difference of a token's bounds from the traced ones."""
    traced = pandas.concat([update.table[["low", "high"]] for update in updates], ignore_index=True)
    found, expected = tokens[["low", "high"]].to_numpy(dtype=float), traced.to_numpy(dtype=float)
    apart = numpy.abs(numpy.where(found == expected, 0.0, found - expected))
    return float((apart / numpy.maximum(numpy.abs(expected), 1e-12)).max())


def _by_probability(tokens: pandas.DataFrame) -> list[tuple[float, float]]:
    quarter = (numpy.exp(tokens.old_log_prob.clip(upper=0)) * QUARTILES).astype(int).clip(0, QUARTILES - 1)
    above, below = tokens.bounded > tokens.high, tokens.bounded < tokens.low
    clipped = {
        "LN": tokens.counts & below & ~above & (tokens.advantage < 0),
        "HP": tokens.counts & above & (tokens.advantage > 0),
    }
    of_quarter = [tokens.counts & (quarter == one) for one in range(QUARTILES)]
    return [
        tuple(float((flags & members).sum() / max(members.sum(), 1)) for flags in clipped.values())
        for members in of_quarter
    ]


def _share(positive: float, negative: float) -> float:
    return positive / (positive + negative) if positive + negative > 0 else math.nan
