"""What is called a collapse: the stored runs that did, noise, low rewards and recoveries; and what means make of it.
Not covered: where it is printed (tests/analysis/diagnose/test_verdict.py, tests/papers/tables,
tests/papers/evaluation).
"""

from pathlib import Path

import numpy as np
import pandas
import pytest

from tests.common.statistics.test_no_difference import LOGS
from verl_clipx.common.statistics.collapse import COVERAGE, caution, collapse
from verl_clipx.common.statistics.comparison import compare_means

STORED = pandas.read_csv(Path(__file__).parents[3] / "docs" / "results" / "cpu_small_steps.csv")


def test_of_the_stored_runs_only_those_collapsed_of_which_the_page_says_so():
    runs = {run: collapse(steps.reward.to_numpy()) for run, steps in STORED.groupby(["preset", "seed"])}
    found = {run: at for run, at in runs.items() if at is not None}
    # Rewards 0.430, 0.000; 0.324, 0.090, 0.000; and 0.461, 0.172, 0.238, 0.008, 0.020.
    assert found == {("countdown_gppo_off", 1): 3, ("countdown_gppo_off", 2): 6, ("countdown_gppo_off", 3): 6}


@pytest.mark.parametrize(
    ("rewards", "at"),
    [
        # Levels 0.4, 0.4, 0.267, 0.133, 0.0: the last is the first below 0.1, and begins where the reward falls.
        ([0.4] * 4 + [0.0] * 3, 4),
        ([0.4] * 4 + [0.11] * 3, None),
        # One bad batch is none, and neither is a run that ends before there is a level to fall from.
        ([0.4, 0.4, 0.4, 0.0, 0.4, 0.4], None),
        ([0.4, 0.0, 0.0], None),
        # A recovery does not undo it.
        ([0.4] * 4 + [0.0] * 3 + [0.5] * 9, 4),
        # Where rewards are negative, levels are above the lowest.
        ([-1.0, -0.5, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5], None),
        ([0.5, 0.5, 0.5, 0.5, -1.0, -1.0, -1.0], 4),
        # Of a long run a level is a tenth.
        (np.repeat([0.4, 0.0, 0.4, 0.0], [100, 10, 80, 10]), None),
        (np.repeat([0.4, 0.01, 0.4], [100, 20, 80]), 100),
        # What falls slowly, from the 80th step to the 120th, is dated near the middle.
        (np.concatenate([np.full(80, 0.4), np.linspace(0.4, 0, 41), np.zeros(79)]), 97),
    ],
)
def test_a_collapse_by_hand(rewards, at):
    assert collapse(rewards) == at


@pytest.mark.parametrize(("right", "most"), [(0.01, 0.08), (0.05, 0.02), (0.2, 0.0)])
def test_noise_of_low_rewards_is_seldom_one(right, most):
    """Of 64 answers a step one in a hundred is right: a level is at times a quarter of the best by chance."""
    for steps in (8, 40, 200):
        runs = np.random.default_rng(steps).binomial(64, right, (400, steps)) / 64
        assert np.mean([collapse(run) is not None for run in runs]) <= most


@pytest.mark.parametrize("name", LOGS)
def test_in_made_up_logs_it_is_found_where_it_was_put(name):
    # Of a fifth, those that fall in the first or the last four of 40 steps can't be seen.
    found = [collapse(run) is not None for run in LOGS[name](1000, 40, np.random.default_rng(0))]
    assert 0.14 < np.mean(found) < 0.22 if name == "collapses of a fifth" else np.mean(found) < 0.01


@pytest.mark.parametrize("seeds", COVERAGE)
def test_what_a_one_sided_collapse_leaves_of_an_interval(seeds):
    """Trainings differ by 2 points; a fifth of the second method's lie 30 points lower."""
    draw = np.random.default_rng(seeds)
    pairs = (0.5 + 0.02 * draw.standard_normal((2, seeds)) for _ in range(600))
    found = [compare_means(first, second - 0.3 * (draw.random(seeds) < 0.2)) for first, second in pairs]
    held = 100 * np.mean([one.low <= -0.06 <= one.high for one in found])
    # Two standard errors, and one for rounding.
    assert abs(held - COVERAGE[seeds]) < 2 * (COVERAGE[seeds] * (100 - COVERAGE[seeds]) / 600) ** 0.5 + 1


def test_the_caution_is_of_the_fewest_seeds_that_were_tried():
    assert [f"of {seeds} seeds" in caution(seeds) for seeds in (3, 5, 10)] == [True] * 3
    assert "3 seeds" in caution(4) and "about 64 %" in caution(4) and caution(2) is caution(20) is None
