"""What is made of the sums of an observed loss.

Covers: each region's share of the gradient mass. Not covered: the sums themselves, which are held against verl's losses
and against the plugin's own (tests/training/test_observe.py).
"""

import math

from verl_clipx.metrics import REGIONS
from verl_clipx.observed import gradient_shares


def test_shares_are_of_the_whole_mini_batch_s_mass():
    masses = {"LN": [1.0, 0.0], "HP": [0.0, 0.0], "LP": [2.0, 0.0], "HN": [0.0, 0.0], "M": [1.0, 0.0]}
    shares = gradient_shares({f"clipx/gradient_mass/{region}": values for region, values in masses.items()})
    assert shares == {
        f"clipx/gradient_share/{region}": values
        for region, values in zip(REGIONS, ([0.25, 0], [0, 0], [0.5, 0], [0, 0], [0.25, 0]), strict=True)
    }
    assert gradient_shares({"actor/ppo_kl": [1.0]}) == {}
    broken = gradient_shares({f"clipx/gradient_mass/{region}": [math.nan] for region in REGIONS})
    assert all(math.isnan(value) for (value,) in broken.values())
