"""What is called a collapse: the stored runs that did, noise, low rewards and recoveries; and what means make of it.
Not covered: where it is printed (tests/analysis/diagnose/test_verdict.py, tests/papers/tables,
tests/papers/evaluation).
"""

import numpy as np
import pytest

from tests.common.statistics.example_rewards import (
    STORED_STEPS,
    draw_collapses_of_a_fifth,
    draw_drifts,
    draw_lasting_offsets,
    draw_walks,
)
from tests.messages import assert_names
from verl_clipx.common.statistics.collapse import COVERAGE, caution, collapse
from verl_clipx.common.statistics.comparison import compare_means


def collapsed_share(runs) -> float:
    return np.mean([collapse(rewards) is not None for rewards in runs])


def test_of_the_stored_runs_only_those_collapsed_of_which_the_page_says_so():
    places = {}
    for run, steps in STORED_STEPS.groupby(["preset", "seed"]):
        place = collapse(steps.reward.to_numpy())
        if place is not None:
            places[run] = place
    # Rewards 0.430, 0.000; 0.324, 0.090, 0.000; and 0.461, 0.172, 0.238, 0.008, 0.020.
    assert places == {("countdown_gppo_off", 1): 3, ("countdown_gppo_off", 2): 6, ("countdown_gppo_off", 3): 6}


# From the 80th step to the 120th.
SLOW_FALL = np.concatenate([np.full(80, 0.4), np.linspace(0.4, 0, 41), np.zeros(79)])


@pytest.mark.parametrize(
    ("rewards", "place"),
    [
        # Levels 0.4, 0.4, 0.267, 0.133, 0.0: the last is the first below 0.1, and begins where the reward falls.
        pytest.param([0.4] * 4 + [0.0] * 3, 4, id="to nothing"),
        pytest.param([0.4] * 4 + [0.11] * 3, None, id="to more than a quarter"),
        pytest.param([0.4, 0.4, 0.4, 0.0, 0.4, 0.4], None, id="one bad batch"),
        pytest.param([0.4, 0.0, 0.0], None, id="no level to fall from"),
        # A recovery does not undo it.
        pytest.param([0.4] * 4 + [0.0] * 3 + [0.5] * 9, 4, id="a recovery"),
        # Where rewards are negative, levels are above the lowest.
        pytest.param([-1.0, -0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5], None, id="a rise from negative rewards"),
        pytest.param([0.5, 0.5, 0.5, 0.5, -1.0, -1.0, -1.0], 4, id="to negative rewards"),
        # In a long run a level is over a tenth of its steps.
        pytest.param(np.repeat([0.4, 0.0, 0.4, 0.0], [100, 10, 80, 10]), None, id="less than a tenth of a long run"),
        pytest.param(np.repeat([0.4, 0.01, 0.4], [100, 20, 80]), 100, id="a tenth of a long run"),
        # What falls slowly is dated near the middle of its fall.
        pytest.param(SLOW_FALL, 97, id="a slow fall"),
    ],
)
def test_a_collapse_by_hand(rewards, place):
    assert collapse(rewards) == place


@pytest.mark.parametrize(("chance_to_be_right", "most"), [(0.01, 0.08), (0.05, 0.02), (0.2, 0.0)])
def test_noise_of_low_rewards_is_seldom_a_collapse(chance_to_be_right, most):
    """Of 64 answers a step one in a hundred is right: by chance, a level is a quarter of the best now and then."""
    for steps in (8, 40, 200):
        runs = np.random.default_rng(steps).binomial(64, chance_to_be_right, (400, steps)) / 64
        assert collapsed_share(runs) <= most


@pytest.mark.parametrize("draw", [draw_lasting_offsets, draw_walks, draw_drifts])
def test_in_made_up_logs_without_a_collapse_hardly_any_is_found(draw):
    assert collapsed_share(draw(1000, 40, np.random.default_rng(0))) < 0.01


def test_in_made_up_logs_collapses_are_found_where_they_were_put():
    # Of a fifth, those that fall in the first or the last four of 40 steps can't be seen.
    assert 0.14 < collapsed_share(draw_collapses_of_a_fifth(1000, 40, np.random.default_rng(0))) < 0.22


@pytest.mark.parametrize("seeds", COVERAGE)
def test_an_interval_of_means_holds_a_one_sided_collapse_as_often_as_the_caution_says(seeds):
    """Trainings differ by 2 points; a fifth of the second method's lie 30 points lower."""
    generator = np.random.default_rng(seeds)
    pairs = 600
    intervals_that_hold = 0
    for _ in range(pairs):
        first, second = 0.5 + 0.02 * generator.standard_normal((2, seeds))
        has_collapsed = generator.random(seeds) < 0.2
        comparison = compare_means(first, second - 0.3 * has_collapsed)
        if comparison.low <= -0.06 <= comparison.high:
            intervals_that_hold += 1
    expected = COVERAGE[seeds]
    standard_error = (expected * (100 - expected) / pairs) ** 0.5
    # Two standard errors, and one for rounding.
    assert abs(100 * intervals_that_hold / pairs - expected) < 2 * standard_error + 1


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_caution_names_a_number_of_seeds_that_was_tried(seeds):
    assert_names(caution(seeds), f"{seeds} seeds")


def test_the_caution_of_a_number_between_is_that_of_the_fewer_seeds():
    assert_names(caution(4), "3 seeds", "about 64 %")


@pytest.mark.parametrize("seeds", [2, 20])
def test_below_3_seeds_and_from_20_on_there_is_no_caution(seeds):
    assert caution(seeds) is None
