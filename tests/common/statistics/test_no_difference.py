"""False claims without a difference (A/A), counted: settings of three to ten seeds, logs of 8 to 2,000 steps. Not
covered: how often a difference is found. docs/evaluation.md has more counts.
"""

from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from tests.common.statistics.example_rewards import (
    DRAWS,
    STORED_STEPS,
    draw_collapses_of_a_fifth,
    draw_walks,
)
from verl_clipx.common.statistics.collapse import collapse
from verl_clipx.common.statistics.comparison import ALIKE, compare_means, compare_shares

PAIRS = 400


def highest_share_by_chance(pairs: int) -> float:
    """Return the share that claims in 5 % of the cases exceed once in a thousand times."""
    return stats.binom.ppf(0.999, pairs, 0.05) / pairs


# The rewards of the stored runs of each setting, (seeds, steps).
REWARDS_OF_STORED_SETTINGS = [
    steps.pivot(index="seed", columns="step", values="reward").to_numpy() for _, steps in STORED_STEPS.groupby("preset")
]


def draw_like_stored_runs(seeds, steps, generator):
    """Draw rewards that have the deviations of the stored ones from their setting's mean; `steps` is not used.

    Each training is of another setting, since the deviations of one setting add up to 0; of three seeds a deviation has
    2/3 of the variance.
    """
    number = len(REWARDS_OF_STORED_SETTINGS)
    rewards = []
    settings = [
        REWARDS_OF_STORED_SETTINGS[index] for index in generator.choice(number, seeds, replace=seeds > number // 2)
    ]
    for of_setting in settings:
        deviations = of_setting - of_setting.mean(axis=0)
        rewards.append(0.5 + np.sqrt(1.5) * deviations[generator.integers(len(of_setting))])
    return np.stack(rewards)


def tells_rewards_apart(first, second) -> bool:
    """Return whether a page tells the training rewards of two settings apart, each (seeds, steps)."""
    return compare_means(first.mean(axis=1), second.mean(axis=1)).verdict not in (None, ALIKE)


def tells_collapses_apart(first, second) -> bool:
    """Return whether it tells the shares of trainings that collapsed apart."""
    collapsed_of_first = [collapse(rewards) is not None for rewards in first]
    collapsed_of_second = [collapse(rewards) is not None for rewards in second]
    return compare_shares(collapsed_of_first, collapsed_of_second).verdict not in (None, ALIKE)


def share_of_claims(draw, steps, seeds, pairs, tells_apart=tells_rewards_apart) -> float:
    """Return the share of pairs of settings without a difference that are told apart."""
    generator = np.random.default_rng(0)
    claims = 0
    for _ in range(pairs):
        first = draw(seeds[0], steps, generator)
        second = draw(seeds[1], steps, generator)
        claims += tells_apart(first, second)
    return claims / pairs


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(3, 3), (3, 10)])
def test_at_most_5_percent_of_equal_settings_are_told_apart(seeds):
    shares = {"stored runs": share_of_claims(draw_like_stored_runs, 20, seeds, PAIRS)}
    for draw in DRAWS:
        for steps in (8, 40, 200, 2000):
            shares[f"{draw.__name__}, {steps} steps"] = share_of_claims(draw, steps, seeds, PAIRS)
    too_high = {name: share for name, share in shares.items() if share > highest_share_by_chance(PAIRS)}
    assert too_high == {}
    if seeds == (3, 3):
        # Over so many pairs a true share of 5.5 % would be seen.
        assert 0 < np.mean([*shares.values()]) <= 0.05


def test_two_seeds_of_one_stored_setting_are_never_told_apart():
    pairs = [pair for rewards in REWARDS_OF_STORED_SETTINGS for pair in combinations(rewards, 2)]
    assert len(pairs) == 78
    for first, second in pairs:
        assert not tells_rewards_apart(first[None], second[None])
        assert not tells_collapses_apart(first[None], second[None])


def test_at_most_5_percent_of_equal_shares_of_collapses_are_told_apart():
    share = share_of_claims(draw_collapses_of_a_fifth, 40, (5, 5), 60, tells_collapses_apart)
    assert share <= highest_share_by_chance(60)


def test_a_difference_is_a_claim():
    """Else no count of claims would say anything."""
    generator = np.random.default_rng(0)
    lower = draw_walks(3, 40, generator)
    higher = draw_walks(3, 40, generator) + 0.5
    assert tells_rewards_apart(lower, higher)
    collapsed = np.where(np.arange(40) < 20, lower, 0.0)
    assert tells_collapses_apart(lower, collapsed)
