"""The numbers of a replay of one setting over the updates of a step, exact or with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import pandas
import torch

from verl_clipx.analysis.replay.loss import LossOnTokens, apply_to, is_run_loss, why_refused
from verl_clipx.analysis.replay.tokens import TokenBatch, TracedTokens
from verl_clipx.analysis.replay.traced_numbers import (
    HIGH,
    LOW,
    TracedNumber,
    is_counted,
    numbers_of_run,
    with_intervals,
)
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
    """What a setting does to the traced tokens of a step.

    Args:
        label: the setting's label.
        exact: whether the trace has every token of the step's updates.
        numbers: from a name to its number, as `combine_updates` returns them.
        tokens: a row for each token of all updates: what the setting does to it, whether it `counts`, and `change`,
            which is empty, REGAINED or LOST.
        against_run: for the run's own setting, the largest difference of a bound from the one that the run trained
            with, relative to it; None for others.
    """

    label: str
    exact: bool
    numbers: dict[str, TracedNumber]
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


def replay(label: str, settings: Settings, run_settings: Settings | None, updates: Sequence[TracedTokens]) -> Replay:
    """Apply a loss to the tokens of a step's updates.

    Args:
        label: what the replay is called.
        settings: the settings of the loss.
        run_settings: the settings that the run trained with; None if unknown.
        updates: the updates of one step, at least one.

    Raises:
        ValueError: the trace lacks what the loss needs; the message names it.
    """
    for update in updates:
        reason = why_refused(settings, run_settings, update)
        if reason:
            raise ValueError(f"{label}: {reason}")
    measured: list[dict[str, float]] = []
    tokens: list[pandas.DataFrame] = []
    for update in updates:
        loss = apply_to(settings, run_settings, update, update.batch)
        measured.append(measure_update(loss, update.batch))
        tokens.append(_add_effects(loss, update))
    sequences_by_prompt = [_find_sequences_by_prompt(update.batch) for update in updates]

    def measure(drawn_prompts: Sequence[numpy.ndarray]) -> dict[str, float]:
        """Return the numbers over drawn prompts; `drawn_prompts` has, for each update, the indices of its prompts.

        An index may occur several times.
        """
        measured: list[dict[str, float]] = []
        for update, sequences, prompts in zip(updates, sequences_by_prompt, drawn_prompts, strict=True):
            resample = update.batch.rows(torch.cat([sequences[prompt] for prompt in prompts]))
            loss = apply_to(settings, run_settings, update, resample)
            measured.append(measure_update(loss, resample))
        return combine_updates(measured)

    is_whole = all(update.whole for update in updates)
    # Without counts of prompts there are no intervals: the numbers are exact.
    prompt_counts = [] if is_whole else [len(sequences) for sequences in sequences_by_prompt]
    against_run = None
    if is_run_loss(settings, run_settings):
        differences = [_find_largest_difference(*pair) for pair in zip(tokens, updates, strict=True)]
        against_run = float(numpy.max(differences))
    return Replay(
        label=label,
        exact=is_whole,
        numbers=with_intervals(combine_updates(measured), prompt_counts, measure),
        tokens=pandas.concat(tokens, ignore_index=True),
        against_run=against_run,
    )


def _find_sequences_by_prompt(batch: TokenBatch) -> list[torch.Tensor]:
    """Return the indices of each prompt's sequences in a batch, int64, in the order of the prompts' numbers."""
    prompts = range(int(batch.prompt.max()) + 1)
    return [(batch.prompt == prompt).nonzero()[:, 0] for prompt in prompts]


def describe_run(updates: Sequence[TracedTokens]) -> Replay:
    """Return what the trace says of the run itself, in the form of a replay."""
    table = pandas.concat([update.table for update in updates], ignore_index=True)
    tokens = table.assign(change="", counts=is_counted(table))
    is_whole = all(update.whole for update in updates)
    numbers = numbers_of_run([update.table for update in updates], whole=is_whole)
    # These compare a setting with the run.
    numbers |= {"cosine": TracedNumber(1.0), "norm_ratio": TracedNumber(1.0)}
    return Replay(label="the run, as traced", exact=is_whole, numbers=numbers, tokens=tokens)


def measure_update(loss: LossOnTokens, batch: TokenBatch) -> dict[str, float]:
    """Return the metrics of a loss on an update, and the sums from which `combine_updates` computes further numbers.

    Args:
        loss: the loss, applied to the update's tokens.
        batch: these tokens, with what the run's own loss did to them.
    """
    weighted_by_loss = torch.where(loss.mask, loss.trace.weight * loss.trace.advantage, 0.0).to(torch.float64)
    weighted_by_run = batch.weighted.to(torch.float64)
    return {
        **loss.metrics,
        PRODUCT: float((weighted_by_loss * weighted_by_run).sum()),
        SQUARES_OF_LOSS: float(weighted_by_loss.square().sum()),
        SQUARES_OF_RUN: float(weighted_by_run.square().sum()),
    }


def combine_updates(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the numbers of several updates together.

    Args:
        measured: what `measure_update` returns of each update.

    Returns:
        The means of the metrics, as verl logs them; `clip_fraction` and `positive_share`; `cosine` and `norm_ratio` of
        F * A over all tokens against the run's.
    """
    means: dict[str, float] = {}
    for name in measured[0]:
        means[name] = float(numpy.mean([numbers[name] for numbers in measured]))
    # Means of sums are as good as sums here, since only their quotients count.
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


def _add_effects(loss: LossOnTokens, update: TracedTokens) -> pandas.DataFrame:
    """Return the traced tokens of an update, with what the loss does to each: the `tokens` of a `Replay`.

    They also have `trained`, which says whether the loss is over the token.
    """
    table = update.table[["step", "update", "prompt", "sample", "position", "text", "old_log_prob", "ratio"]].copy()
    batch = update.batch
    for name, values in loss.trace._asdict().items():
        if name in ("low", "high", "bounded", "weight", "advantage"):
            table[name] = values[batch.traced_mask].numpy()
    table["region"] = regions_of(table.bounded, table.low, table.high, table.advantage)
    is_trained = loss.mask[batch.traced_mask].numpy()
    # A token without an advantage has no gradient under any loss, so it counts as unchanged.
    has_gradient_in_run = (batch.weighted != 0)[batch.traced_mask].numpy()
    has_gradient = ((table.weight * table.advantage) != 0).to_numpy() & is_trained
    table["change"] = numpy.select(
        [has_gradient & ~has_gradient_in_run, has_gradient_in_run & ~has_gradient], [REGAINED, LOST], default=""
    )
    counted = batch.inputs.counted
    counts = loss.mask if counted is None else loss.mask & counted
    return table.assign(counts=counts[batch.traced_mask].numpy(), trained=is_trained)


def _find_largest_difference(tokens: pandas.DataFrame, update: TracedTokens) -> float:
    """Return the largest relative difference between a token's bounds in the replay and those that were traced.

    Args:
        tokens: from `_add_effects`. Those that the loss is not over don't count.
        update: the traced update.
    """
    trained = tokens.trained.to_numpy()
    replayed = tokens.loc[trained, ["low", "high"]].to_numpy(float)
    traced = update.table.loc[trained, ["low", "high"]].to_numpy(float)
    # Infinite bounds are equal, and their difference is not a number.
    apart = numpy.abs(numpy.where(replayed == traced, 0.0, replayed - traced))
    return float((apart / numpy.maximum(numpy.abs(traced), 1e-12)).max(initial=0.0))
