"""DGPO: a power law in the probability takes the place of the hard clip, decoupled on the two sides."""

from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ratio import followed_ratio
from verl_clipx.masking import choose, less, spread


def gradient_weight(
    ratio: Tensor,
    advantages: Tensor,
    bounds: Bounds,
    *,
    n: float,
    m: float,
    log_ratio_clamp: float | None = None,
) -> Tensor:
    """ratio^(n+1) / low^n in region LN, high^(1/m) ratio^(1-1/m) in HP, else the ratio.

    The weight is continuous at both bounds. m = 1 gives GPPO's constant upper bound in HP.

    Args:
        ratio: (sequences, length), saturated but not clamped; the power laws are not cut off by log_ratio_clamp.
        advantages: (sequences, length).
        bounds: bounds on the ratio.
        n: decay exponent below the lower bound, above 0.
        m: decay exponent's inverse above the upper bound, above 0.
        log_ratio_clamp: where the weight is the ratio, no gradient beyond a log-ratio of +-this; None for no limit.

    Returns:
        F, (sequences, length), in the ratio's dtype.

    Source: DGPO, Eqs. 9-10 and App. A.2.
    """
    low = spread(less(advantages, 0.0) & less(ratio, bounds.low))
    high = spread(less(0.0, advantages) & less(bounds.high, ratio))
    # Written as ratio * (a fraction below 1)^power, which cannot overflow for any n and m; the fraction is 1 on the
    # tokens that take the other branch, so a bound of 0 or inf is harmless.
    fraction_low = choose(low, ratio / bounds.low, 1.0)
    fraction_high = choose(high, bounds.high / ratio, 1.0)
    weight = choose(low | high, ratio, followed_ratio(ratio, log_ratio_clamp))
    return weight * fraction_low.pow_(n) * fraction_high.pow_(1 / m)
