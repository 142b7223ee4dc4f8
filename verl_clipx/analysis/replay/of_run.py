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

# The outer 5 % of 200 resamples are ten values.
REPLICATES = 200

LOW = CLIP_FRACTION_LOW.key
HIGH = CLIP_FRACTION_HIGH.key
# The share of the gradient's mass that the clipped tokens would have with the weight r of the other tokens.
TAKEN = "clipped_mass"


class Number(NamedTuple):
    """A number and the ends of its interval, None where it is exact or has none."""

    value: float
    low: float | None = None
    high: float | None = None


def numbers_of_run(tables: Sequence[pandas.DataFrame], *, whole: bool) -> dict[str, Number]:
    """Shares of clipped tokens, means over a step's updates, and of gradient mass, over all its tokens.

    Args:
        tables: the traced tokens of each update, fields as in `traces.SCHEMA`.
        whole: whether these are all tokens; if not, numbers have intervals, provided each update has five prompts.
    """
    sums = [_by_prompt(table[is_counted(table)]) for table in tables]

    def measure(drawn: Sequence[numpy.ndarray]) -> dict[str, float]:
        """Return the numbers of the prompts that were drawn for each update."""
        return _numbers([of_update[prompts].sum(0) for of_update, prompts in zip(sums, drawn, strict=True)])

    numbers = measure([numpy.arange(len(of_update)) for of_update in sums])
    prompts = [] if whole else [len(of_update) for of_update in sums]
    return with_intervals(numbers, prompts, measure)


def with_intervals(
    numbers: Mapping[str, float],
    prompts: Sequence[int],
    measure: Callable[[Sequence[numpy.ndarray]], Mapping[str, float]],
) -> dict[str, Number]:
    """Adds the intervals of numbers over prompts, which are drawn anew for each update by itself.

    Args:
        numbers: those of all prompts, by name.
        prompts: how many each update has; without any, or with too few, there are no intervals.
        measure: returns the numbers of the prompts that were drawn for each update.
    """
    if min(prompts, default=0) < FEWEST_UNITS:
        return {name: Number(value) for name, value in numbers.items()}
    # The prompts of all replicates, by update.
    drawn = [resamples(count, REPLICATES, seed) for seed, count in enumerate(prompts)]
    replicates = []
    for index in range(REPLICATES):
        replicates.append(measure([of_update[index] for of_update in drawn]))
    with_ends = {}
    for name, value in numbers.items():
        ends = percentile_interval([replicate[name] for replicate in replicates])
        with_ends[name] = Number(value) if ends is None else Number(value, *ends)
    return with_ends


@dataclass(frozen=True)
class TracedTable:
    """One traced update.

    Args:
        step, update: which.
        table: a row for each token, as `traces.SCHEMA` says.
        shards, facts: its files, and what each says.
        whole: whether the trace has every token of the update, and every update of its step.
    """

    step: int
    update: int
    table: pandas.DataFrame
    shards: Sequence[Shard]
    facts: Sequence[UpdateFacts]
    whole: bool

    def is_finite(self, fields: Sequence[str]) -> bool:
        """Returns whether these fields of its tokens are finite."""
        return bool(numpy.isfinite(self.table[[*fields]]).all(axis=None))


def tables_at(run: Run, step: int) -> list[TracedTable]:
    """Reads the updates of a step of which tokens were traced; raises ValueError if a file can't be read."""
    of_step = run.shards_at(step)
    tables = []
    complete = has_all_updates(of_step, run.schedule.updates_a_step)
    for update in sorted({shard.update for shard in of_step}):
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
                whole=complete and is_whole(shards, facts),
            )
        )
    return tables


def numbers_of_step(run: Run, step: int) -> tuple[dict[str, Number], bool] | None:
    """Returns `numbers_of_run` of a traced step, and whether every token is traced; None if numbers are not finite."""
    updates = tables_at(run, step)
    tables = [update.table for update in updates if len(update.table)]
    whole = all(update.whole for update in updates)
    if not tables or not all(update.is_finite(("ratio", "weight", "advantage")) for update in updates):
        return None
    return numbers_of_run(tables, whole=whole), whole


def is_counted(tokens: pandas.DataFrame) -> pandas.Series:
    """Returns whether each traced token counts: not masked, not rejected, and in the pass of Lopti's that it is in."""
    return ~tokens.rejected.eq(True) & ~tokens.counted.eq(False)


# The columns of a prompt's sums: all tokens, those in LN and in HP, mass by sign, mass that the clip took.
TOKENS, LN, HP, POSITIVE, NEGATIVE, CLIPPED = range(6)


def _by_prompt(table: pandas.DataFrame) -> numpy.ndarray:
    """Returns a row for each prompt, (n, 6)."""
    mass = (table.weight * table.advantage).abs()
    advantage = table.advantage
    of_clip = table.region.isin(["LN", "HP"]) & (table.weight == 0) & ~table.selected.eq(False)
    columns = [
        pandas.Series(1.0, index=table.index),
        table.region.eq("LN"),
        table.region.eq("HP"),
        mass.where(advantage > 0, 0.0),
        mass.where(advantage < 0, 0.0),
        (table.ratio * advantage * table.correction.fillna(1.0)).abs().where(of_clip, 0.0),
    ]
    return pandas.concat(columns, axis=1).astype(float).groupby(table.prompt.to_numpy(), sort=False).sum().to_numpy()


def _numbers(sums: Sequence[numpy.ndarray]) -> dict[str, float]:
    """Returns the shares, from the sums of each update."""
    total = numpy.sum(sums, axis=0)
    kept = total[POSITIVE] + total[NEGATIVE]
    without_clip = kept + total[CLIPPED]
    return {
        LOW: float(numpy.mean([of_update[LN] / of_update[TOKENS] for of_update in sums])),
        HIGH: float(numpy.mean([of_update[HP] / of_update[TOKENS] for of_update in sums])),
        "positive_share": float(total[POSITIVE] / kept) if kept > 0 else math.nan,
        TAKEN: float(total[CLIPPED] / without_clip) if without_clip > 0 else math.nan,
    }


QUANTILES = (0.01, 0.99)
OF_SAMPLER = ("tokens", "ESS", "log-ratio", *(f"{100 * q:g} %" for q in QUANTILES), "above 0", "clipped")
OF_RATIOS = (
    "log-ratio: the mean of log(recomputed / sampler's probability), in nats, and its quantiles; ESS: the effective "
    "share of the tokens under these ratios"
)


def sampler_by(group: str, updates: Sequence[TracedTable]) -> dict[str, dict[str, float]]:
    """Returns OF_SAMPLER to their numbers for each value of a column; empty without the sampler's log-probabilities.

    Args:
        group: `age` or `turn`.
        updates: those of a step.
    """
    tokens = pandas.concat([update.table for update in updates], ignore_index=True)
    sampled = tokens.rollout_log_prob.astype(float)
    recomputed = tokens.old_log_prob
    if recomputed.eq(sampled).all():
        # In bypass mode the first update alone is of the weights that the step begins with.
        recomputed = tokens.log_prob.where(tokens["update"].eq(tokens["update"].min()))
    tokens = tokens.assign(log_ratio=recomputed - sampled)
    tokens = tokens[is_counted(tokens) & numpy.isfinite(tokens.log_ratio)]
    return {f"{value:g}": _ratios(rows) for value, rows in tokens.groupby(group) if len(rows)}


def _ratios(rows: pandas.DataFrame) -> dict[str, float]:
    """Returns the numbers of `OF_SAMPLER` of some tokens, each by its name."""
    ratio = numpy.exp(rows.log_ratio)
    ess = float(ratio.sum() ** 2 / (len(rows) * (ratio**2).sum()))
    quantiles = rows.log_ratio.quantile(list(QUANTILES))
    above = rows.log_ratio.gt(0).mean()
    clipped = rows.region.isin(["LN", "HP"]).mean()
    values = (len(rows), ess, rows.log_ratio.mean(), *quantiles, above, clipped)
    return dict(zip(OF_SAMPLER, map(float, values), strict=True))


def cells_of(numbers: dict[str, float]) -> list[str]:
    """Returns the numbers of a group for the terminal."""
    tokens, ess, *ratios, above, clipped = numbers.values()
    return [f"{tokens:.0f}", percent(ess), *(f"{ratio:.2g}" for ratio in ratios), percent(above), percent(clipped)]
