"""The step that a finding or a change is dated at: changes planted at drawn places of made-up logs of 20 to 3000 steps,
with noise, and with a row for each step or for every tenth, are dated at the first logged step after them. Not covered:
slow falls (test_rules.py), what is found at all (test_rules.py, test_timeline.py).
"""

import numpy
import pandas
import pytest

from tests.messages import assert_names
from verl_clipx.analysis.diagnose.rules import HELD_OUT_FALLS, REWARD_COLLAPSE, RULES
from verl_clipx.analysis.diagnose.timeline import find_changes
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.statistics.collapse import collapse, level_steps

VALIDATION = "val-core/math/acc/mean@8"
NUMBERS_OF_ROWS = (20, 130, 300, 1000, 3000)
# From a rule to the change that meets it: from a metric to its value before the change and to that from it on.
CHANGE_OF_RULE = {
    REWARD_COLLAPSE: {keys.REWARD: (0.6, 0.02)},
    "reward decline": {keys.REWARD: (0.6, 0.35)},
    HELD_OUT_FALLS: {VALIDATION: (0.6, 0.35), keys.REWARD: (0.35, 0.6)},
    "entropy collapse": {keys.ENTROPY: (1.0, 0.01)},
    "entropy explosion": {keys.ENTROPY: (0.3, 9.0)},
    "gradient explosion": {keys.GRADIENT_NORM: (0.3, 90.0)},
    "responses cut at the limit": {keys.CUT: (0.02, 0.6)},
    "few prompts teach, because samples score alike": {keys.ALIKE: (0.3, 0.99)},
    "mismatch of rollout and training": {keys.MISMATCH: (0.005, 0.05)},
}


def plant_change(generator, values, rows: int, every: int, noise: float) -> tuple[pandas.DataFrame, int]:
    """Return a log, and the first logged step from which its values are changed.

    Args:
        generator: draws the change's place and the noise.
        values: from a metric to its value before the change and to that from it on.
        rows: how many the log has.
        every: the training steps between two rows; the change itself may lie between two.
        noise: the standard deviation, as a part of the change.
    """
    level = level_steps(rows)
    place = int(generator.integers(level + 3, rows - level))
    unlogged_steps_since = int(generator.integers(0, every))
    logged = every * numpy.arange(1, rows + 1)
    first_changed = logged[place]
    changed = logged >= first_changed - unlogged_steps_since
    columns = {}
    for key, (before, after) in values.items():
        spread = noise * min(abs(after - before), before, after * 2)
        columns[key] = numpy.where(changed, after, before) + spread * generator.standard_normal(rows)
    return pandas.DataFrame(columns, index=logged), int(first_changed)


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("name", CHANGE_OF_RULE)
def test_a_finding_is_dated_at_the_first_logged_step_after_the_change(name, noise):
    (rule,) = [rule for rule in RULES if rule.name == name]
    generator = numpy.random.default_rng(len(name))
    for rows in NUMBERS_OF_ROWS:
        for every in (1, 10):
            for _ in range(3):
                log, first_changed = plant_change(generator, CHANGE_OF_RULE[name], rows, every, noise)
                onset = rule.onset(Run("made-up", log))
                assert onset is not None and onset.step == first_changed, (rows, every)


@pytest.mark.parametrize(("noise", "exact", "tolerance"), [(0.1, 1.0, 0), (0.15, 0.97, 1), (0.25, 0.9, 4)])
def test_a_collapse_is_dated_well_in_spite_of_noise(noise, exact, tolerance):
    """Noise is a part of the fall; `exact` of the dates are; nine of ten are at most `tolerance` steps off."""
    generator = numpy.random.default_rng(0)
    errors = []
    for rows in NUMBERS_OF_ROWS:
        for _ in range(60):
            log, first_changed = plant_change(generator, {"reward": (0.6, 0.0)}, rows, 1, 0.0)
            rewards = log["reward"].to_numpy() + 0.6 * noise * generator.standard_normal(rows)
            place = collapse(numpy.clip(rewards, 0, None))
            if place is not None:
                errors.append(abs(place + 1 - first_changed))
    assert len(errors) > 0.95 * 60 * len(NUMBERS_OF_ROWS)
    assert numpy.mean(numpy.array(errors) == 0) >= exact
    assert numpy.mean(numpy.array(errors) <= tolerance) >= 0.9


def test_the_evidence_of_a_collapse_is_of_its_onset():
    """In the first window that has fallen a quarter of the steps are of before."""
    reward = numpy.where(numpy.arange(1, 3001) < 2001, 0.6, 0.01)
    (rule,) = [rule for rule in RULES if rule.name == REWARD_COLLAPSE]
    onset = rule.onset(Run("made-up", pandas.DataFrame({keys.REWARD: reward}, index=range(1, 3001))))
    assert onset.step == 2001
    assert_names(onset.evidence, "critic/score/mean 0.01", "on average over 300 steps", "at most 0.6 before")


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(("before", "after"), [(0.3, 4.5), (0.5, 0.02), (1e-7, 0.01)])
def test_a_jump_is_dated_at_the_first_logged_step_after_it(before, after, noise, every):
    generator = numpy.random.default_rng(0)
    for rows in NUMBERS_OF_ROWS[1:]:
        for _ in range(3):
            log, first_changed = plant_change(generator, {"x": (before, after)}, rows, every, noise)
            assert [change.step for change in find_changes(log) if change.stays] == [first_changed]
