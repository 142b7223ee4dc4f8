"""Metrics that are not means over tokens, but functions of such means over a whole optimizer mini-batch."""

import numpy

# The number of equal bins of the old policy's probability in which the spread of the ratio is measured.
SPREAD_BINS = 8

# A standard deviation of the ratio below this is only rounding.
LEAST_SPREAD = 1e-6

# A line needs at least three bins, because any two lie on one.
LEAST_BINS = 3


def effective_sample_size(ratio: float, squared_ratio: float) -> float:
    """Kish's effective sample size of tokens that are weighted by their ratios, as a share of the tokens.

    Args:
        ratio, squared_ratio: means over tokens.

    Returns:
        (sum r)^2 / (n sum r^2), in [0, 1]; 0 without tokens.
    """
    return ratio**2 / squared_ratio if squared_ratio != 0 else 0.0


def entropy_clip_estimate(ratio: float, ratio_log_prob: float, weighted: float, weighted_log_prob: float) -> float:
    """The change of entropy that an update causes per unit of learning rate.

    It is minus the covariance, under the current policy, of the log-probability and A X, where X is 0 if PPO clips the
    token and otherwise 1. With the ratio as the weight of each sample, PPO's F is r X, so F A replaces r A X in every
    method.

    Args:
        ratio, ratio_log_prob, weighted, weighted_log_prob: means over tokens of r, r log pi, F A and F A log pi.

    Returns:
        In nats; 0 without tokens.

    Source: BAPO, Eq. 6 (Entropy-Clip Rule). There the covariance is over the next tokens of a prefix, here it is over
    the tokens of the mini-batch.
    """
    if ratio == 0:
        return 0.0
    return ratio_log_prob * weighted / ratio**2 - weighted_log_prob / ratio


def lemma_1(
    count: numpy.ndarray, deviation: numpy.ndarray, squared_deviation: numpy.ndarray, fourth_power: numpy.ndarray
) -> tuple[float, float] | None:
    """Fits a line of log sigma over log(1 - p): sigma is the ratio's standard deviation at old probability p.

    Args:
        count: the number of tokens in each bin of probability, or a number in proportion to it, (bins,).
        deviation, squared_deviation, fourth_power: sums of r - 1, (r - 1)^2 and (1 - p)^4 over the bin's tokens, or in
            the same proportion.

    Returns:
        The slope, which is 2 by the lemma, and R^2 of a line through the bins, weighted by their tokens. None with
        fewer than three bins in which the ratio varies.

    Source: ACPO, Lemma 1: sigma^2 = kappa^2 (1 - p)^4. For the tokens of a bin, the mean of (1 - p)^4 is used.
    """
    n = numpy.maximum(count, numpy.finfo(float).tiny)
    variance = squared_deviation / n - (deviation / n) ** 2
    used = (count > 0) & (variance > LEAST_SPREAD**2) & (fourth_power > 0)
    if used.sum() < LEAST_BINS:
        return None
    distance, sigma = numpy.log(fourth_power[used] / n[used]) / 4, numpy.log(variance[used]) / 2
    (of_distance, of_both), (_, of_sigma) = numpy.cov(distance, sigma, aweights=count[used])
    if of_sigma == 0:
        return 0.0, 0.0
    return float(of_both / of_distance), float(of_both**2 / (of_distance * of_sigma))


def lemma_1_slope(*sums: float) -> float | None:
    """The slope from `lemma_1`, whose four sums are given one after the other, each over all bins."""
    fit = lemma_1(*numpy.reshape(sums, (-1, SPREAD_BINS)))
    return None if fit is None else fit[0]


def lemma_1_r_squared(*sums: float) -> float | None:
    """R^2 from `lemma_1`, whose four sums are given one after the other, each over all bins."""
    fit = lemma_1(*numpy.reshape(sums, (-1, SPREAD_BINS)))
    return None if fit is None else fit[1]
