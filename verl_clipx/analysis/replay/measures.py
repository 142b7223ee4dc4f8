"""The numbers of a replay of one setting over the updates of a step, exact or with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import pandas
import torch

from verl_clipx.analysis.replay.loss import LossOnTokens, apply_to, is_run_loss, why_refused
from verl_clipx.analysis.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.analysis.replay.traced_numbers import HIGH, LOW, Number, is_counted, numbers_of_run, with_intervals
from verl_clipx.losses.base.shared_metrics import CONTRIBUTION
from verl_clipx.run.config import Settings
from verl_clipx.run.trace_format import regions_of

POSITIVE = CONTRIBUTION["positive"].key
NEGATIVE = CONTRIBUTION["negative"].key

# Sums over tokens, of F * A of a loss times that of the run, and of the squares of each.
PRODUCT = "sum/product"
SQUARES_OF_LOSS = "sum/squares_of_loss"
SQUARES_OF_RUN = "sum/squares_of_run"

# What becomes of a token's gradient, from the run to the replay.
REGAINED = "regained"
LOST = "lost"


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
        reason = why_refused(settings, own, update)
        if reason:
            raise ValueError(f"{label}: {reason}")
    losses = [apply_to(settings, own, update, update.batch) for update in updates]
    tokens = [_tokens(loss, update) for loss, update in zip(losses, updates, strict=True)]
    whole = all(update.whole for update in updates)
    batches = [update.batch for update in updates]
    numbers = over_updates(list(map(measures, losses, batches)))
    rows_by_prompt = [_rows_by_prompt(batch) for batch in batches]

    def measure(drawn: Sequence[numpy.ndarray]) -> dict[str, float]:
        """Return the numbers of the prompts that were drawn for each update."""
        of_updates = []
        for update, batch, rows, prompts in zip(updates, batches, rows_by_prompt, drawn, strict=True):
            resample = batch.rows(torch.cat([rows[prompt] for prompt in prompts]))
            loss = apply_to(settings, own, update, resample)
            of_updates.append(measures(loss, resample))
        return over_updates(of_updates)

    prompts = [] if whole else [len(rows) for rows in rows_by_prompt]
    against_run = None
    if is_run_loss(settings, own):
        against_run = float(numpy.max([*map(_against, tokens, updates)]))
    return Replay(
        label=label,
        exact=whole,
        numbers=with_intervals(numbers, prompts, measure),
        tokens=pandas.concat(tokens, ignore_index=True),
        against_run=against_run,
    )


def _rows_by_prompt(batch: TokenBatch) -> list[torch.Tensor]:
    """Returns the numbers of each prompt's sequences, int64, by the prompt's number."""
    prompts = range(int(batch.prompt.max()) + 1)
    return [(batch.prompt == prompt).nonzero()[:, 0] for prompt in prompts]


def describe_run(updates: Sequence[TracedTokens]) -> Replay:
    """Returns what the trace says of the run itself, in the form of a replay."""
    table = pandas.concat([update.table for update in updates], ignore_index=True)
    tokens = table.assign(change="", counts=is_counted(table))
    whole = all(update.whole for update in updates)
    numbers = numbers_of_run([update.table for update in updates], whole=whole)
    numbers |= {"cosine": Number(1.0), "norm_ratio": Number(1.0)}
    return Replay(label="the run, as traced", exact=whole, numbers=numbers, tokens=tokens)


def measures(loss: LossOnTokens, batch: TokenBatch) -> dict[str, float]:
    """Returns the metrics of a loss on an update, and the sums behind cosine and norm ratio."""
    weighted_by_loss = torch.where(loss.mask, loss.trace.weight * loss.trace.advantage, 0.0).to(torch.float64)
    weighted_by_run = batch.weighted.to(torch.float64)
    return {
        **loss.metrics,
        PRODUCT: float((weighted_by_loss * weighted_by_run).sum()),
        SQUARES_OF_LOSS: float(weighted_by_loss.square().sum()),
        SQUARES_OF_RUN: float(weighted_by_run.square().sum()),
    }


def over_updates(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the numbers of several updates together.

    Args:
        measured: what `measures` returns of each update.

    Returns:
        The means of the metrics, as verl logs them; `clip_fraction` and `positive_share`; `cosine` and `norm_ratio` of
        F * A over all tokens against the run's.
    """
    means = {name: float(numpy.mean([of_update[name] for of_update in measured])) for name in measured[0]}
    product = means.pop(PRODUCT)
    squares_of_loss = means.pop(SQUARES_OF_LOSS)
    squares_of_run = means.pop(SQUARES_OF_RUN)
    both_squares = squares_of_loss * squares_of_run
    mass = means[POSITIVE] + means[NEGATIVE]
    means["cosine"] = product / math.sqrt(both_squares) if both_squares > 0 else math.nan
    means["norm_ratio"] = math.sqrt(squares_of_loss / squares_of_run) if squares_of_run > 0 else math.nan
    means["clip_fraction"] = means[LOW] + means[HIGH]
    means["positive_share"] = means[POSITIVE] / mass if mass else math.nan
    return means


def _tokens(loss: LossOnTokens, update: TracedTokens) -> pandas.DataFrame:
    """Returns the traced tokens with what the loss does to each."""
    table = update.table[["step", "update", "prompt", "sample", "position", "text", "old_log_prob", "ratio"]].copy()
    batch = update.batch
    for name, values in loss.trace._asdict().items():
        if name in ("low", "high", "bounded", "weight", "advantage"):
            table[name] = values[batch.traced_mask].numpy()
    table["region"] = regions_of(table.bounded, table.low, table.high, table.advantage)
    # A token without an advantage has no gradient under any loss, so it counts as unchanged.
    before = (batch.weighted != 0)[batch.traced_mask].numpy()
    after = ((table.weight * table.advantage) != 0).to_numpy() & loss.mask[batch.traced_mask].numpy()
    table["change"] = numpy.select([after & ~before, before & ~after], [REGAINED, LOST], "")
    counted = batch.inputs.counted
    counts = loss.mask if counted is None else loss.mask & counted
    return table.assign(counts=counts[batch.traced_mask].numpy(), trained=loss.mask[batch.traced_mask].numpy())


def _against(tokens: pandas.DataFrame, update: TracedTokens) -> float:
    """Returns the largest relative difference of the bounds of a token that is trained on from the traced ones."""
    trained = tokens.trained.to_numpy()
    replayed = tokens.loc[trained, ["low", "high"]].to_numpy(float)
    traced = update.table.loc[trained, ["low", "high"]].to_numpy(float)
    # Infinite bounds are equal, and their difference is not a number.
    apart = numpy.abs(numpy.where(replayed == traced, 0.0, replayed - traced))
    return float((apart / numpy.maximum(numpy.abs(traced), 1e-12)).max(initial=0.0))
