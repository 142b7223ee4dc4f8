"""The five regions of (ratio, advantage) that tell the methods apart."""

from torch import Tensor

from verl_clipx.losses.bounds import Bounds
from verl_clipx.masking import less, spread

# L and H: the ratio below the lower or above the upper bound; N and P: negative or positive advantage; M: the rest.
OUTER_REGIONS = ("LN", "HP", "LP", "HN")
REGIONS = (*OUTER_REGIONS, "M")


def region_members(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> dict[str, Tensor]:
    """The tokens of each region; every token is in exactly one.

    Args:
        ratio: (sequences, length).
        advantages: (sequences, length).
        bounds: bounds on the ratio.

    Returns:
        Each of `REGIONS` to bits as from `spread`, (sequences, length). A ratio equal to a bound and an advantage of 0
        belong to M.

    Source: DGPO, Eqs. 2-6; PPO clips LN and HP and leaves LP and HN alone.
    """
    low, high = less(ratio, bounds.low), less(bounds.high, ratio)
    negative, positive = less(advantages, 0.0), less(0.0, advantages)
    # A token may be on both sides of crossed bounds: LP or HN has it.
    members = {"LP": low & positive, "HN": high & negative}
    outside = low.bitwise_or_(high)
    positive &= outside
    negative &= outside
    members["HP"] = positive ^ members["LP"]
    members["LN"] = negative ^ members["HN"]
    members["M"] = positive.bitwise_or_(negative).bitwise_not_()
    return {region: spread(members[region]) for region in REGIONS}
