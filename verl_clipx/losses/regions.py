"""The five regions of (ratio, advantage) that tell the methods apart."""

import torch
from torch import Tensor

from verl_clipx.losses.bounds import Bounds

# L and H: the ratio below the lower or above the upper bound; N and P: negative or positive advantage; M: the rest.
REGIONS = ("LN", "HP", "LP", "HN", "M")


def region_codes(ratio: Tensor, advantages: Tensor, bounds: Bounds) -> Tensor:
    """The region of each token, as its index in `REGIONS`.

    Args:
        ratio: (sequences, length).
        advantages: (sequences, length).
        bounds: bounds on the ratio.

    Returns:
        (sequences, length), int8. A ratio equal to a bound and an advantage of 0 belong to M.

    Source: DGPO, Eqs. 2-6; PPO clips LN and HP and leaves LP and HN alone.
    """
    below, above = ratio < bounds.low, ratio > bounds.high
    negative, positive = advantages < 0, advantages > 0
    codes = torch.full_like(ratio, REGIONS.index("M"), dtype=torch.int8)
    for region, member in (
        ("LN", below & negative),
        ("HP", above & positive),
        ("LP", below & positive),
        ("HN", above & negative),
    ):
        codes = codes.masked_fill(member, REGIONS.index(region))
    return codes
