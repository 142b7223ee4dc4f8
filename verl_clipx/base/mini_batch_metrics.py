"""Metrics that are not means over tokens, but functions of such means over a whole optimizer mini-batch."""


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
