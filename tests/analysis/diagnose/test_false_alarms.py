"""How often made-up sound logs meet the rules on data that asynchronous trainers drop, weigh and shorten. No kept log
has what these rules read. docs/dev/diagnosis_evidence.md has the same counts. Not covered: real runs.
"""

import numpy
import pandas
import pytest

from verl_clipx.analysis.diagnose import rules
from verl_clipx.analysis.runs import keys
from verl_clipx.analysis.runs.held_out import HeldOutReward
from verl_clipx.analysis.runs.run import Run
from verl_clipx.run.keys import ROLLOUT_PROMPTS

LOGS = 300
STEPS = 200
PROMPTS = 64
STEPS_BETWEEN_VALIDATIONS = 10


def make_run(columns, held_out=()):
    """Return a run with a column for each metric, and with the rewards of its validations."""
    log = pandas.DataFrame(columns, index=pandas.RangeIndex(1, STEPS + 1, name="step"))
    return Run("made-up", log, {ROLLOUT_PROMPTS: PROMPTS}, held_out=held_out)


def drop_prompts(generator, share):
    """Return a run in which this share of the prompts is dropped on average, at random."""
    return make_run({keys.EVICTED: generator.poisson(share * PROMPTS, STEPS).astype(float)})


def weigh_tokens(generator):
    """Return a run whose importance weights have a mean of about 1 and are worth most samples."""
    return make_run(
        {
            keys.WEIGHTS_MEAN: generator.normal(1.0, 0.05, STEPS),
            keys.WEIGHTS_SAMPLE_SIZE: generator.normal(0.85, 0.05, STEPS),
        }
    )


def lengthen_answers(generator, noise):
    """Return a run whose answers grow up to threefold or shrink a little, in training as in validations.

    Args:
        generator: draws the growth, and noise for training and for validations.
        noise: the standard deviation of a length's logarithm.
    """
    growth = numpy.geomspace(1, generator.uniform(0.7, 3), STEPS)
    tokens = 300 * growth * generator.lognormal(0, noise, STEPS)
    characters = 1000 * growth * generator.lognormal(0, noise, STEPS)
    held_out = []
    for step in range(STEPS_BETWEEN_VALIDATIONS, STEPS + 1, STEPS_BETWEEN_VALIDATIONS):
        held_out.append(HeldOutReward(step, None, {}, length=characters[step - 1]))
    return make_run({keys.LENGTH: tokens}, held_out)


@pytest.mark.parametrize(
    ("find_onset", "make_sound_run", "arguments", "alarms"),
    [
        pytest.param(rules.find_dropped_prompts, drop_prompts, {"share": 0.02}, 0, id="2 % dropped"),
        pytest.param(rules.find_dropped_prompts, drop_prompts, {"share": 0.05}, 0, id="5 % dropped"),
        pytest.param(rules.find_collapsed_weights, weigh_tokens, {}, 0, id="weights"),
        pytest.param(rules.find_short_training, lengthen_answers, {"noise": 0.05}, 0, id="lengths to 5 %"),
        pytest.param(rules.find_short_training, lengthen_answers, {"noise": 0.1}, 14, id="lengths to 10 %"),
    ],
)
def test_sound_logs_meet_a_rule_as_often_as_the_page_says(find_onset, make_sound_run, arguments, alarms):
    generator = numpy.random.default_rng(0)
    runs = [make_sound_run(generator, **arguments) for _ in range(LOGS)]
    assert sum(find_onset(run) is not None for run in runs) == alarms
