"""What the figure of traced tokens shows: the ratio by probability, with bounds and clipped tokens."""

from dataclasses import dataclass

import numpy
import pandas

from verl_clipx.analysis.runs.traced import ABOVE, BELOW, HIGH, LOW, TracedUpdate, has_bounds_on_ratio

# How many probability bins the figure has.
BINS = 5
# How many tokens are drawn at most, and how many of them may be clipped ones.
MOST_DOTS = 1000
MOST_CLIPPED = 500
# A share of fewer tokens than this says little.
FEW = 20
# The axis reaches at least to this quantile of the ratios. Larger ratios are drawn on its edge.
REACH = 0.998


@dataclass(frozen=True)
class TokenSpread:
    """The tokens of one traced update by ratio and probability.

    Args:
        title: the setting, and how many of its tokens are drawn.
        label, colour: of the setting.
        drawn: a row for each drawn token: `ratio`, `event`, and `bin`, its probability bin from 0 to BINS - 1.
        bounds: a row for each bin with tokens: the median bounds `low` and `high`; None if the bounds are not on the
            tokens' own ratios.
        reach: the ratio up to which the axis should reach.
        clipped_high, clipped_low, outside: how many tokens of the whole update are clipped at each bound, and how many
            are outside the bounds with a gradient.
    """

    title: str
    label: str
    colour: str
    drawn: pandas.DataFrame
    bounds: pandas.DataFrame | None
    reach: float
    clipped_high: int
    clipped_low: int
    outside: int


def spread_tokens(update: TracedUpdate) -> TokenSpread:
    """Return what the figure shows of an update."""
    tokens = update.tokens
    drawn = choose_tokens(tokens)
    bounds = find_median_bounds(tokens) if has_bounds_on_ratio(tokens) else None
    ends = [tokens.ratio.quantile(REACH)]
    if bounds is not None:
        ends.extend(bounds.high)
    return TokenSpread(
        title=_title(update, len(drawn)),
        label=update.setting.label,
        colour=update.setting.colour,
        drawn=drawn[["ratio", "event"]].assign(bin=find_bins(drawn)),
        bounds=bounds,
        reach=max((end for end in ends if numpy.isfinite(end)), default=0.0),
        clipped_high=_count(tokens, HIGH),
        clipped_low=_count(tokens, LOW),
        outside=_count(tokens, ABOVE, BELOW),
    )


def _title(update: TracedUpdate, drawn: int) -> str:
    """Return the title of the figure; `drawn` is how many tokens it shows."""
    total = len(update.tokens)
    count = f"{total} tokens" if drawn == total else f"{drawn} of {total} tokens"
    left_out = f", {update.not_finite} not finite left out" if update.not_finite else ""
    return f"{update.setting.label}, {count}{left_out}"


def _count(tokens: pandas.DataFrame, *events: str) -> int:
    """Return how many tokens had one of these events."""
    return int(tokens.event.isin(events).sum())


def is_clipped(tokens: pandas.DataFrame) -> pandas.Series:
    """Return whether each token is clipped, by the rule that the run trained with."""
    return tokens.event.isin([LOW, HIGH])


def choose_tokens(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Return at most MOST_DOTS tokens: clipped ones before others, evenly spaced in the order of the trace."""
    clipped = _thin(tokens[is_clipped(tokens)], MOST_CLIPPED)
    others = _thin(tokens[~is_clipped(tokens)], MOST_DOTS - len(clipped))
    return pandas.concat([others, clipped]).sort_index()


def _thin(rows: pandas.DataFrame, most: int) -> pandas.DataFrame:
    """Return at most `most` of the rows, evenly spaced."""
    if len(rows) <= most:
        return rows
    return rows.iloc[numpy.linspace(0, len(rows) - 1, most).astype(int)]


def old_probabilities(tokens: pandas.DataFrame) -> pandas.Series:
    """Return the probability of each token under the old policy."""
    return numpy.exp(tokens.old_log_prob).clip(0, 1)


def find_bins(tokens: pandas.DataFrame) -> pandas.Series:
    """Return the probability bin of each token: BINS of equal width, the last one closed."""
    return (old_probabilities(tokens) * BINS).astype(int).clip(0, BINS - 1)


def find_median_bounds(tokens: pandas.DataFrame) -> pandas.DataFrame:
    """Return the median bounds of each probability bin with tokens, columns low and high."""
    return tokens.groupby(find_bins(tokens))[["low", "high"]].median()
