"""Power before spending: against Miller's example, against simulation, and the search for a design.

Not covered: the command (tests/evaluation/test_compare.py).
"""

from functools import cache

import numpy as np
import pytest
from simulation import World

from verl_clipx.common.statistics.comparison import compare
from verl_clipx.common.statistics.power import Design, Parts, assumed_parts, measured_parts, needed, power_of


def test_millers_example():
    # arXiv 2411.00640, on power: a variance of 1/9 over questions, no sampling left: 3 points need 969 questions.
    parts = Parts(method=1 / 9, seed=0.0, interaction=0.0, sample=0.0)
    assert power_of(parts, 0.03, Design(969, 1, 1)) == pytest.approx(0.8, abs=0.01)
    assert needed(parts, 0.03, Design(2, 1, 1), "questions").questions == pytest.approx(969, rel=0.01)


@cache
def made_of(world: World) -> tuple[Parts, float]:
    """The variances of a world, from a large experiment, and its true difference."""
    first, second, _ = world.draw((300, 300), 1500, 10, np.random.default_rng(2))
    return Parts(**measured_parts(first, second, 10)), world.true_difference()


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "questions", "samples"), [(3, 256, 8), (5, 100, 4), (3, 500, 1), (1, 256, 2)])
def test_power_agrees_with_simulation(seeds, questions, samples):
    # With one seed the trainings are as they are.
    world = World(effect=0.4, seeds=(0.1, 0.1) if seeds > 1 else (0.0, 0.0))
    parts, difference = made_of(world)
    expected = power_of(parts, difference, Design(questions, samples, seeds))
    generator = np.random.default_rng(0)
    experiments = [world.draw((seeds, seeds), questions, samples, generator)[:2] for _ in range(500)]
    seen = [compare({"b": one}, {"b": other}).p_value < 0.05 for one, other in experiments]
    # Two standard errors of the share, and what the parts are not known to.
    assert 0.2 < expected < 0.999 and np.mean(seen) == pytest.approx(expected, abs=0.06)


def test_without_a_difference_the_chance_is_that_of_a_false_alarm():
    for design in (Design(100, 8, 3), Design(100, 8, 10), Design(100, 8, 1)):
        assert power_of(assumed_parts(0.5, 0.5, 0.9, 0.02), 0.0, design) == pytest.approx(0.05, abs=0.02)


def test_more_of_anything_helps_and_questions_alone_do_not_reach_everything():
    parts = assumed_parts(0.5, 0.5, 0.9, 0.02)
    chances = [
        power_of(parts, 0.05, Design(*numbers)) for numbers in ((100, 1, 3), (400, 1, 3), (400, 8, 3), (400, 8, 6))
    ]
    assert chances == sorted(chances) and chances[-1] > chances[0] + 0.3
    # Trainings that differ by 2 points: three of them cannot show 3 points, on however many questions.
    assert needed(parts, 0.03, Design(100, 8, 3), "questions") is None
    enough = needed(parts, 0.03, Design(500, 8, 3), "seeds")
    assert power_of(parts, 0.03, enough) >= 0.8 > power_of(parts, 0.03, Design(500, 8, enough.seeds - 1))


def test_assumed_parts_by_hand():
    # 0.4 * 0.6 = 0.24; a quarter between questions, of which a tenth is a training's own, half of that the method's.
    parts = assumed_parts(accuracy=0.4, spread=0.25, agreement=0.9, seed_deviation=0.02)
    assert parts.sample == pytest.approx(0.18) and parts.seed == pytest.approx(0.0004)
    # The difference of two methods has both methods' 0.003.
    assert parts.method == pytest.approx(0.006) and parts.interaction == pytest.approx(0.003)


def test_measured_parts_leave_out_what_they_cannot_tell():
    generator = np.random.default_rng(0)
    one, three = generator.random((1, 40)), generator.random((3, 40))
    assert set(measured_parts(one, None, 8)) == {"sample"}
    assert set(measured_parts(three, None, 8)) == {"seed", "interaction", "sample"}
    # Of one sample the interaction holds the samples' part, which more samples would shrink.
    assert set(measured_parts(three, None, 1)) == {"seed"}
    assert set(measured_parts(three, three, 8)) == {"seed", "interaction", "sample", "method"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.5, 0.9, 0.02), "--accuracy 0.0"),
        ((0.5, 1.5, 0.9, 0.02), "--spread 1.5"),
        ((0.5, 0.5, -0.1, 0.02), "--agreement -0.1"),
        ((0.5, 0.5, 0.9, -0.02), "--seed-deviation -2.0"),
        ((0.5, 0.5, float("nan"), 0.02), "--agreement nan"),
    ],
)
def test_assumptions_outside_their_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        assumed_parts(*arguments)


@pytest.mark.parametrize(
    ("numbers", "message"), [((1, 1, 3), "--questions 1"), ((2, 0, 3), "--samples 0"), ((2, 1, 2), "--seeds 2")]
)
def test_designs_that_cannot_be_compared_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        Design(*numbers)


def test_a_negative_variance_is_refused():
    with pytest.raises(ValueError, match="seed=-1"):
        Parts(0.0, -1.0, 0.0, 0.0)
