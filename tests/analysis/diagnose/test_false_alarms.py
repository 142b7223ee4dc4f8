"""How often made-up sound logs meet the rules on data that asynchronous trainers drop, weigh and shorten. No kept log
has what these read. docs/dev/diagnosis_evidence.md has the counts. Not covered: real runs.
"""

import numpy
import pandas
import pytest

from verl_clipx.analysis.diagnose import rules
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.held_out import HeldOutReward
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import ROLLOUT_PROMPTS

LOGS, STEPS, PROMPTS = 300, 200, 64
EVERY = 10


def made_up(columns, held_out=()):
    log = pandas.DataFrame(columns, index=pandas.RangeIndex(1, STEPS + 1, name="step"))
    return Run("made-up", log, {ROLLOUT_PROMPTS: PROMPTS}, held_out=held_out)


def dropping(share):
    """Prompts are dropped at random, so many on average."""

    def make(draw):
        return made_up({keys.EVICTED: draw.poisson(share * PROMPTS, STEPS).astype(float)})

    return make


def weighted(draw):
    """Weights of tokens: a mean of about 1, worth most samples."""
    return made_up(
        {
            keys.WEIGHTS_MEAN: draw.normal(1.0, 0.05, STEPS),
            keys.WEIGHTS_SAMPLE_SIZE: draw.normal(0.85, 0.05, STEPS),
        }
    )


def lengthening(noise):
    """Answers grow up to threefold, and what is trained with what validation writes, each with noise of its own."""

    def make(draw):
        grows = numpy.geomspace(1, draw.uniform(0.7, 3), STEPS)
        trained = 300 * grows * draw.lognormal(0, noise, STEPS)
        written = 1000 * grows * draw.lognormal(0, noise, STEPS)
        held_out = [HeldOutReward(step, None, {}, length=written[step - 1]) for step in range(EVERY, STEPS + 1, EVERY)]
        return made_up({keys.LENGTH: trained}, held_out)

    return make


@pytest.mark.parametrize(
    ("find", "make", "at_most"),
    [
        (rules.find_dropped_prompts, dropping(0.02), 0),
        (rules.find_dropped_prompts, dropping(0.05), 0),
        (rules.find_collapsed_weights, weighted, 0),
        (rules.find_short_training, lengthening(0.05), 0),
        (rules.find_short_training, lengthening(0.1), 14),
    ],
    ids=["2 % dropped", "5 % dropped", "weights", "lengths to 5 %", "lengths to 10 %"],
)
def test_sound_logs_meet_a_rule_no_more_often_than_the_page_says(find, make, at_most):
    draw = numpy.random.default_rng(0)
    found = sum(find(make(draw)) is not None for _ in range(LOGS))
    assert found == at_most
