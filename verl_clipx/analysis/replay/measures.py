"""The numbers of a replay of one setting over the updates of a step, exact or with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import pandas
import torch

from verl_clipx.analysis.replay.loss import LossOnTokens, apply_to, is_own, why_refused
from verl_clipx.analysis.replay.of_run import HIGH, LOW, Number, is_counted, numbers_of_run, with_intervals
from verl_clipx.analysis.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.losses.base.shared_metrics import CONTRIBUTION
from verl_clipx.run.config import Settings
from verl_clipx.run.trace_format import regions_of

POSITIVE, NEGATIVE = CONTRIBUTION["positive"].key, CONTRIBUTION["negative"].key

# What becomes of a token's gradient, from the run to the replay.
REGAINED, LOST = "regained", "lost"


@dataclass(frozen=True)
class Replay:
    """A setting on the traced tokens of a step.

    Args:
        label: the setting's.
        exact: whether the trace has every token of the step's updates.
        numbers: name to number: the metrics, means over the updates as training logs them; `clip_fraction` and
            `positive_share`; `cosine` and `norm_ratio` of F * A over all tokens against the run's.
        tokens: a row for each token of all updates: what the setting does to it, whether it `counts`, and `change`,
            which is empty, REGAINED or LOST.
        against_run: for the run's own setting, the largest difference of a bound from the one that the run trained
            with, relative to it; None for others.
    """

    label: str
    exact: bool
    numbers: dict[str, Number]
    tokens: pandas.DataFrame
    against_run: float | None = None

    @property
    def changes(self) -> dict[str, pandas.DataFrame]:
        """REGAINED to the tokens that have a gradient under the setting alone, LOST to those that lost theirs."""
        return {change: self.tokens[self.tokens.change == change] for change in (REGAINED, LOST)}

    @property
    def bounds(self) -> dict[str, tuple[float, float, float]]:
        """`low` and `high` to the least, the median and the greatest bound of a token."""
        ends = self.tokens[["low", "high"]].agg(["min", "median", "max"])
        return {side: tuple(map(float, ends[side])) for side in ends}


def replay(label: str, settings: Settings, own: Settings | None, updates: Sequence[TracedTokens]) -> Replay:
    """Applies a loss to the tokens of a step's updates.

    Args:
        own: the run's own settings, or None if unknown.
        updates: those of one step, at least one.

    Raises:
        ValueError: the trace lacks what the loss needs; names it.
    """
    for update in updates:
        if reason := why_refused(settings, own, update):
            raise ValueError(f"{label}: {reason}")
    losses = [apply_to(settings, own, update, update.batch) for update in updates]
    tokens = [_tokens(loss, update) for loss, update in zip(losses, updates, strict=True)]
    whole, batches = all(update.whole for update in updates), [update.batch for update in updates]
    numbers = over_updates(list(map(measures, losses, batches)))
    rows = [[(one.prompt == prompt).nonzero()[:, 0] for prompt in range(int(one.prompt.max()) + 1)] for one in batches]

    def measure(drawn: Sequence[numpy.ndarray]) -> dict[str, float]:
        chosen = [
            batch.rows(torch.cat([of_prompt[prompt] for prompt in prompts]))
            for batch, of_prompt, prompts in zip(batches, rows, drawn, strict=True)
        ]
        losses = [apply_to(settings, own, update, batch) for update, batch in zip(updates, chosen, strict=True)]
        return over_updates(list(map(measures, losses, chosen)))

    return Replay(
        label,
        whole,
        with_intervals(numbers, [] if whole else list(map(len, rows)), measure),
        pandas.concat(tokens, ignore_index=True),
        float(numpy.max([*map(_against, tokens, updates)])) if is_own(settings, own) else None,
    )


def of_run(updates: Sequence[TracedTokens]) -> Replay:
    """Returns what the trace says of the run itself, in the form of a replay."""
    table = pandas.concat([update.table for update in updates], ignore_index=True)
    tokens = table.assign(change="", counts=is_counted(table))
    whole = all(update.whole for update in updates)
    numbers = numbers_of_run([update.table for update in updates], whole=whole)
    numbers |= {"cosine": Number(1.0), "norm_ratio": Number(1.0)}
    return Replay("the run, as traced", whole, numbers, tokens)


def measures(loss: LossOnTokens, batch: TokenBatch) -> dict[str, float]:
    """Returns the metrics of an update, and the sums behind cosine and norm ratio, which begin with "sum/"."""
    mine = torch.where(loss.mask, loss.trace.weight * loss.trace.advantage, 0.0).to(torch.float64)
    of_run = batch.weighted.to(torch.float64)
    products = {"both": mine * of_run, "mine": mine.square(), "run": of_run.square()}
    return loss.metrics | {f"sum/{name}": float(values.sum()) for name, values in products.items()}


def over_updates(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the numbers of several updates: means of metrics, as verl logs them, and what is made of sums."""
    means = {name: float(numpy.mean([one[name] for one in measured])) for name in measured[0]}
    both, mine, run = (means.pop(f"sum/{name}") for name in ("both", "mine", "run"))
    means["cosine"] = both / math.sqrt(mine * run) if mine * run > 0 else math.nan
    means["norm_ratio"] = math.sqrt(mine / run) if run > 0 else math.nan
    positive, mass = means[POSITIVE], means[POSITIVE] + means[NEGATIVE]
    return means | {"clip_fraction": means[LOW] + means[HIGH], "positive_share": positive / mass if mass else math.nan}


def _tokens(loss: LossOnTokens, update: TracedTokens) -> pandas.DataFrame:
    """Returns the traced tokens with what the loss does to each."""
    table = update.table[["step", "update", "prompt", "sample", "position", "text", "old_log_prob", "ratio"]].copy()
    batch = update.batch
    for name, values in loss.trace._asdict().items():
        if name in ("low", "high", "bounded", "weight", "advantage"):
            table[name] = values[batch.whole].numpy()
    table["region"] = regions_of(table.bounded, table.low, table.high, table.advantage)
    # A token without an advantage has no gradient under any loss, so it counts as unchanged.
    before = (batch.weighted != 0)[batch.whole].numpy()
    after = ((table.weight * table.advantage) != 0).to_numpy() & loss.mask[batch.whole].numpy()
    table["change"] = numpy.select([after & ~before, before & ~after], [REGAINED, LOST], "")
    counted = batch.inputs.counted
    counts = loss.mask if counted is None else loss.mask & counted
    return table.assign(counts=counts[batch.whole].numpy(), trained=loss.mask[batch.whole].numpy())


def _against(tokens: pandas.DataFrame, update: TracedTokens) -> float:
    """Returns the largest relative difference of the bounds of a token that is trained on from the traced ones."""
    tables = (tokens, update.table)
    ours, traced = (table.loc[tokens.trained.to_numpy(), ["low", "high"]].to_numpy(float) for table in tables)
    apart = numpy.abs(numpy.where(ours == traced, 0.0, ours - traced))
    return float((apart / numpy.maximum(numpy.abs(traced), 1e-12)).max(initial=0.0))
