"""How far a run's sampler is from its trainer, by the age of the weights that sampled and by turn; needs no torch."""

from collections.abc import Sequence

import numpy
import pandas

from verl_clipx.common.sentences import percent
from verl_clipx.replay.of_run import is_counted

QUANTILES = (0.01, 0.99)
HEADINGS = ("tokens", "ESS", "log-ratio", *(f"{100 * q:g} %" for q in QUANTILES), "above 0", "clipped")
MEANINGS = (
    "log-ratio: the mean of log(recomputed / sampler's probability), in nats, and its quantiles; ESS: the effective "
    "share of the tokens under these ratios"
)


def sampler_by(group: str, tables: Sequence[pandas.DataFrame]) -> dict[str, dict[str, float]]:
    """Returns HEADINGS to their numbers for each value of a column; empty without the sampler's log-probabilities.

    Args:
        group: `age` or `turn`.
        tables: the traced tokens of each update of a step, fields as in `traces.SCHEMA`.
    """
    tokens = pandas.concat(tables, ignore_index=True)
    sampled = tokens.rollout_log_prob.astype(float)
    recomputed = tokens.old_log_prob
    if recomputed.eq(sampled).all():
        # In bypass mode the first update alone is of the weights that the step begins with.
        recomputed = tokens.log_prob.where(tokens["update"].eq(tokens["update"].min()))
    tokens = tokens.assign(log_ratio=recomputed - sampled)
    tokens = tokens[is_counted(tokens) & numpy.isfinite(tokens.log_ratio)]
    return {f"{value:g}": _numbers(rows) for value, rows in tokens.groupby(group) if len(rows)}


def _numbers(rows: pandas.DataFrame) -> dict[str, float]:
    ratio = numpy.exp(rows.log_ratio)
    ess = float(ratio.sum() ** 2 / (len(rows) * (ratio**2).sum()))
    quantiles = rows.log_ratio.quantile(list(QUANTILES))
    above, clipped = rows.log_ratio.gt(0).mean(), rows.region.isin(["LN", "HP"]).mean()
    values = (len(rows), ess, rows.log_ratio.mean(), *quantiles, above, clipped)
    return dict(zip(HEADINGS, map(float, values), strict=True))


def cells_of(numbers: dict[str, float]) -> list[str]:
    """The numbers of a group for the terminal."""
    tokens, ess, *ratios, above, clipped = numbers.values()
    return [f"{tokens:.0f}", percent(ess), *(f"{ratio:.2g}" for ratio in ratios), percent(above), percent(clipped)]
