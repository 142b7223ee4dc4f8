"""False claims without a difference (A/A), counted: settings of three to ten seeds, logs of 8 to 2,000 steps. Not
covered: how often a difference is found. benchmarks/no_difference.py counts more, for docs/dev.
"""

from itertools import combinations

import no_difference as counted
import numpy as np
import pytest
from scipy import stats

REPEATS = 400
MOST = stats.binom.ppf(0.999, REPEATS, 0.05) / REPEATS
"""With claims in 5 % of the cases a count of 400 exceeds this once in a thousand."""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(3, 3), (3, 10)])
def test_at_most_5_percent_of_equal_settings_are_told_apart(seeds):
    shares = {name: counted.false_claims(draw, seeds, REPEATS) for name, draw in counted.worlds().items()}
    assert {name: share for name, share in shares.items() if share > MOST} == {}
    # Over so many pairs a true share of 5.5 % would be seen.
    assert 0 < np.mean([*shares.values()]) <= 0.05 or seeds == (3, 10)


def test_two_seeds_of_one_stored_setting_are_never_told_apart():
    pairs = [pair for runs in counted.stored_runs().values() for pair in combinations(runs, 2)]
    assert len(pairs) == 78
    for first, second in pairs:
        assert not any(counted.is_claim(judged(first[None], second[None])) for judged in counted.JUDGES)


def test_at_most_5_percent_of_equal_shares_of_collapses_are_told_apart():
    draw = counted.worlds()["collapses of a fifth", 40]
    assert counted.false_claims(draw, (5, 5), 60, counted.of_collapses) <= stats.binom.ppf(0.999, 60, 0.05) / 60


def test_a_difference_is_a_claim():
    """Else no count of claims would say anything."""
    draw = np.random.default_rng(0)
    first, second = (counted.LOGS["walks"](3, 40, draw) + shift for shift in (0.0, 0.5))
    assert counted.is_claim(counted.of_rewards(first, second))
    fallen = np.where(np.arange(40) < 20, first, 0.0)
    assert counted.is_claim(counted.of_collapses(first, fallen))
