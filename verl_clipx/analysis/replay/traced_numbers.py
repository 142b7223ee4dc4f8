"""Numbers of a run from a step's traced tokens: what it clipped, its sampler against its trainer; needs no torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
import pandas

from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.sentences import percent
from verl_clipx.common.statistics.bootstrap import FEWEST_UNITS, percentile_interval, resamples
from verl_clipx.losses.base.shared_metrics import CLIP_FRACTION_HIGH, CLIP_FRACTION_LOW
from verl_clipx.run.trace_format import Shard, UpdateFacts, has_all_updates, is_whole, read_facts, read_shards

# How often the prompts are drawn anew. The outer 5 % of 200 values are ten.
REPLICATES = 200

LOW = CLIP_FRACTION_LOW.key
HIGH = CLIP_FRACTION_HIGH.key
# The share of the gradient's mass that the clipped tokens would have with the weight r of the other tokens.
TAKEN = "clipped_mass"


class TracedNumber(NamedTuple):
    """A number and the ends of its interval, which are None where the number is exact or too little is traced."""

    value: float
    low: float | None = None
    high: float | None = None


def numbers_of_run(tables: Sequence[pandas.DataFrame], *, whole: bool) -> dict[str, TracedNumber]:
    """Return the shares of clipped tokens and of gradient mass in a step.

    A share of clipped tokens is the mean over the step's updates; a share of the mass is over all tokens of the step.

    Args:
        tables: the traced tokens of each update, with fields as in `run.trace_format.SCHEMA`.
        whole: whether these are all tokens; if not, numbers have intervals, provided each update has five prompts.
    """
    sums_of_updates = [_sum_by_prompt(table[is_counted(table)]) for table in tables]

    def measure(drawn_prompts: Sequence[numpy.ndarray]) -> dict[str, float]:
        """Return the numbers over drawn prompts; `drawn_prompts` has, for each update, the indices of its prompts."""
        drawn_sums = []
        for sums, prompts in zip(sums_of_updates, drawn_prompts, strict=True):
            drawn_sums.append(sums[prompts].sum(0))
        return _compute_shares(drawn_sums)

    numbers = measure([numpy.arange(len(sums)) for sums in sums_of_updates])
    prompt_counts = [] if whole else [len(sums) for sums in sums_of_updates]
    return with_intervals(numbers, prompt_counts, measure)


def with_intervals(
    numbers: Mapping[str, float],
    prompt_counts: Sequence[int],
    measure: Callable[[Sequence[numpy.ndarray]], Mapping[str, float]],
) -> dict[str, TracedNumber]:
    """Return numbers with their 95 % intervals, by a bootstrap over prompts.

    The prompts of each update are drawn anew by themselves, REPLICATES times, the same ones in each call.

    Args:
        numbers: the numbers of all prompts, by name.
        prompt_counts: how many prompts each update has. There are no intervals if it is empty, as for numbers that are
            exact, or if an update has fewer than FEWEST_UNITS.
        measure: computes the numbers anew from drawn prompts. It takes an array of the prompts' indices for each
            update, in which an index may occur several times.
    """
    fewest_prompts = min(prompt_counts, default=0)
    if fewest_prompts < FEWEST_UNITS:
        return {name: TracedNumber(value) for name, value in numbers.items()}
    # For each update (replicates, prompts). Each has its own seed, so that updates are drawn independently.
    drawn_of_updates = [resamples(count, REPLICATES, seed) for seed, count in enumerate(prompt_counts)]
    replicates: list[Mapping[str, float]] = []
    for index in range(REPLICATES):
        replicates.append(measure([drawn[index] for drawn in drawn_of_updates]))
    with_ends: dict[str, TracedNumber] = {}
    for name, value in numbers.items():
        interval = percentile_interval([replicate[name] for replicate in replicates])
        if interval is None:
            with_ends[name] = TracedNumber(value)
        else:
            low, high = interval
            with_ends[name] = TracedNumber(value, low=low, high=high)
    return with_ends


@dataclass(frozen=True)
class TracedTable:
    """One traced update.

    Args:
        step, update: the training step, and the number of the update in it, from 0.
        table: a row for each token, with fields as in `run.trace_format.SCHEMA`.
        shards, facts: the files of its traces, and what each of them says of the update as a whole.
        whole: whether the trace has every token of the update, and every update of its step.
    """

    step: int
    update: int
    table: pandas.DataFrame
    shards: Sequence[Shard]
    facts: Sequence[UpdateFacts]
    whole: bool

    def is_finite(self, fields: Sequence[str]) -> bool:
        """Return whether these fields of its tokens are finite."""
        return bool(numpy.isfinite(self.table[[*fields]]).all(axis=None))


def tables_at(run: Run, step: int) -> list[TracedTable]:
    """Read the traced updates of a step, in their order; raise ValueError if a file can't be read."""
    shards_of_step = run.shards_at(step)
    tables: list[TracedTable] = []
    has_every_update = has_all_updates(shards_of_step, run.schedule.updates_a_step)
    for update in sorted({shard.update for shard in shards_of_step}):
        shards = run.shards_at(step, update)
        table = read_shards(run.traces, shards).to_pandas()
        facts = [read_facts(run.traces, shard) for shard in shards]
        tables.append(
            TracedTable(
                step=step,
                update=update,
                table=table,
                shards=shards,
                facts=facts,
                whole=has_every_update and is_whole(shards, facts),
            )
        )
    return tables


def numbers_of_step(run: Run, step: int) -> tuple[dict[str, TracedNumber], bool] | None:
    """Return `numbers_of_run` of a traced step, and whether every token is traced; None if numbers are not finite."""
    updates = tables_at(run, step)
    tables = [update.table for update in updates if len(update.table)]
    whole = all(update.whole for update in updates)
    if not tables or not all(update.is_finite(("ratio", "weight", "advantage")) for update in updates):
        return None
    return numbers_of_run(tables, whole=whole), whole


def is_counted(tokens: pandas.DataFrame) -> pandas.Series:
    """Return whether each traced token counts.

    A token does not count if a mask or rejection sampling took it out, or if one of Lopti's passes leaves it to the
    other pass.
    """
    return ~tokens.rejected.eq(True) & ~tokens.counted.eq(False)


# The columns of the sums over a prompt's tokens. First come numbers of tokens: all, those in region LN, those in HP.
TOKENS = 0
LN = 1
HP = 2
# Then come masses of the gradient: of the tokens with A > 0, of those with A < 0, and what the clip took away.
POSITIVE = 3
NEGATIVE = 4
CLIPPED = 5


def _sum_by_prompt(table: pandas.DataFrame) -> numpy.ndarray:
    """Return the sums over each prompt's tokens, (prompts, 6), with the columns that are numbered above.

    Args:
        table: a row for each token that counts.
    """
    mass = (table.weight * table.advantage).abs()
    advantage = table.advantage
    # The clip took the gradient of a token without a weight where PPO clips, unless a selection left the token out.
    is_taken = table.region.isin(["LN", "HP"]) & (table.weight == 0) & ~table.selected.eq(False)
    columns = [
        pandas.Series(1.0, index=table.index),
        table.region.eq("LN"),
        table.region.eq("HP"),
        mass.where(advantage > 0, 0.0),
        mass.where(advantage < 0, 0.0),
        (table.ratio * advantage * table.correction.fillna(1.0)).abs().where(is_taken, 0.0),
    ]
    values = pandas.concat(columns, axis=1).astype(float)
    return values.groupby(table.prompt.to_numpy(), sort=False).sum().to_numpy()


def _compute_shares(sums_of_updates: Sequence[numpy.ndarray]) -> dict[str, float]:
    """Return the numbers of `numbers_of_run`; NaN for a share of no mass.

    Args:
        sums_of_updates: for each update the sums over its prompts, (6,).
    """
    total = numpy.sum(sums_of_updates, axis=0)
    kept = total[POSITIVE] + total[NEGATIVE]
    without_clip = kept + total[CLIPPED]
    return {
        LOW: float(numpy.mean([sums[LN] / sums[TOKENS] for sums in sums_of_updates])),
        HIGH: float(numpy.mean([sums[HP] / sums[TOKENS] for sums in sums_of_updates])),
        "positive_share": float(total[POSITIVE] / kept) if kept > 0 else math.nan,
        TAKEN: float(total[CLIPPED] / without_clip) if without_clip > 0 else math.nan,
    }


# The names of the numbers that compare the sampler with the trainer, as lists and JSON have them.
NUMBER_OF_TOKENS = "tokens"
EFFECTIVE_SHARE = "ESS"
MEAN_LOG_RATIO = "log-ratio"
LOW_QUANTILE = "1 %"
HIGH_QUANTILE = "99 %"
SHARE_ABOVE_0 = "above 0"
CLIPPED_SHARE = "clipped"
SAMPLER_HEADINGS = (
    NUMBER_OF_TOKENS,
    EFFECTIVE_SHARE,
    MEAN_LOG_RATIO,
    LOW_QUANTILE,
    HIGH_QUANTILE,
    SHARE_ABOVE_0,
    CLIPPED_SHARE,
)
# What a list says of these names.
MEANING_OF_HEADINGS = (
    "log-ratio: the mean of log(recomputed / sampler's probability), in nats, and its quantiles; ESS: the effective "
    "share of the tokens under these ratios"
)


def compare_sampler_by(column: str, updates: Sequence[TracedTable]) -> dict[str, dict[str, float]]:
    """Return how far the sampler is from the trainer, for each group of tokens with the same value in a column.

    Args:
        column: the column, `age` or `turn`.
        updates: the traced updates of a step.

    Returns:
        From a value of the column, as text, to the numbers of `_compare_sampler`. It is empty if the trace has no
        log-probabilities of the sampler.
    """
    tokens = pandas.concat([update.table for update in updates], ignore_index=True)
    sampled = tokens.rollout_log_prob.astype(float)
    recomputed = tokens.old_log_prob
    if recomputed.eq(sampled).all():
        # In bypass mode old_log_prob is the sampler's own. The first update starts from the weights that the step
        # begins with, so that its log_prob is what recomputing would give; the later updates have none.
        recomputed = tokens.log_prob.where(tokens["update"].eq(tokens["update"].min()))
    tokens = tokens.assign(log_ratio=recomputed - sampled)
    tokens = tokens[is_counted(tokens) & numpy.isfinite(tokens.log_ratio)]
    return {f"{value:g}": _compare_sampler(group) for value, group in tokens.groupby(column) if len(group)}


def _compare_sampler(tokens: pandas.DataFrame) -> dict[str, float]:
    """Compare the sampler with the trainer over some tokens.

    Args:
        tokens: a row for each token, at least one, with the columns `log_ratio`, log(recomputed / sampler's
            probability), and `region`.

    Returns:
        From each of SAMPLER_HEADINGS to its number: the log-ratio's mean and quantiles are in nats, the others, but the
        number of tokens, are shares of the tokens.
    """
    log_ratio = tokens.log_ratio
    ratio = numpy.exp(log_ratio)
    number_of_tokens = len(tokens)
    # Kish's effective sample size as a share of the sample.
    effective_share = ratio.sum() ** 2 / (number_of_tokens * (ratio**2).sum())
    return {
        NUMBER_OF_TOKENS: float(number_of_tokens),
        EFFECTIVE_SHARE: float(effective_share),
        MEAN_LOG_RATIO: float(log_ratio.mean()),
        LOW_QUANTILE: float(log_ratio.quantile(0.01)),
        HIGH_QUANTILE: float(log_ratio.quantile(0.99)),
        SHARE_ABOVE_0: float(log_ratio.gt(0).mean()),
        CLIPPED_SHARE: float(tokens.region.isin(["LN", "HP"]).mean()),
    }


def format_comparison(numbers: Mapping[str, float]) -> list[str]:
    """Return the numbers of a comparison with the sampler as texts for the terminal, in the order of SAMPLER_HEADINGS.

    Args:
        numbers: from each of SAMPLER_HEADINGS to its number.
    """
    return [
        f"{numbers[NUMBER_OF_TOKENS]:.0f}",
        percent(numbers[EFFECTIVE_SHARE]),
        f"{numbers[MEAN_LOG_RATIO]:.2g}",
        f"{numbers[LOW_QUANTILE]:.2g}",
        f"{numbers[HIGH_QUANTILE]:.2g}",
        percent(numbers[SHARE_ABOVE_0]),
        percent(numbers[CLIPPED_SHARE]),
    ]
