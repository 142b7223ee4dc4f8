"""Metrics that are not means over tokens but functions of means over a whole optimizer mini-batch."""

import numpy

# Equal bins of the old policy's probability, for the spread of the ratio.
SPREAD_BINS = 8

# A standard deviation of the ratio below this is rounding.
LEAST_SPREAD = 1e-6

# Two bins lie on a line whatever they are.
LEAST_BINS = 3


def effective_sample_size(ratio: float, squared_ratio: float) -> float:
    """Of how many equally weighted samples the ratios, as weights, are worth, as a share of the tokens (Kish).

    Args:
        ratio, squared_ratio: means over tokens.

    Returns:
        (sum r)^2 / (n sum r^2), in [0, 1]; 0 without tokens.
    """
    return ratio**2 / squared_ratio if squared_ratio != 0 else 0.0


def entropy_clip_estimate(ratio: float, ratio_log_prob: float, weighted: float, weighted_log_prob: float) -> float:
    """The change of entropy that an update makes per unit of learning rate.

    Minus the covariance under the current policy of its log-probability and A X, X = 0 where PPO clips. With the ratio
    as the weight of each sample, PPO's F is r X, and F A takes the place of r A X in every method.

    Args:
        ratio, ratio_log_prob, weighted, weighted_log_prob: means over tokens of r, r log pi, F A and F A log pi.

    Returns:
        In nats; 0 without tokens.

    Source: BAPO, Eq. 6 (Entropy-Clip Rule), its covariance over a prefix's next tokens taken over the mini-batch's.
    """
    if ratio == 0:
        return 0.0
    return ratio_log_prob * weighted / ratio**2 - weighted_log_prob / ratio


def lemma_1(
    count: numpy.ndarray, deviation: numpy.ndarray, squared_deviation: numpy.ndarray, fourth_power: numpy.ndarray
) -> tuple[float, float] | None:
    """How the ratio's standard deviation goes with the old policy's probability p: log sigma over log(1 - p).

    Args:
        count: tokens of each bin of probability, or in proportion to them, (bins,).
        deviation, squared_deviation, fourth_power: sums of r - 1, (r - 1)^2 and (1 - p)^4 over the bin's tokens, or in
            the same proportion.

    Returns:
        The slope, 2 by the lemma, and R^2 of a line through the bins, weighted by their tokens; None with fewer than
        three bins in which the ratio is spread.

    Source: ACPO, Lemma 1: sigma^2 = kappa^2 (1 - p)^4; of a bin's tokens together, with the mean of (1 - p)^4.
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
    """The first of what `lemma_1` returns, of its four sums over each bin in turn."""
    fit = lemma_1(*numpy.reshape(sums, (-1, SPREAD_BINS)))
    return None if fit is None else fit[0]


def lemma_1_r_squared(*sums: float) -> float | None:
    """The second of what `lemma_1` returns, of its four sums over each bin in turn."""
    fit = lemma_1(*numpy.reshape(sums, (-1, SPREAD_BINS)))
    return None if fit is None else fit[1]
