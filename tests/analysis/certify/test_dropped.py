"""`clipx certify` on arms of which one dropped prompts for their age, in verl's asynchronous trainers."""

import pytest

from .example_arms import SOUND, both_runs, certify_arms

DROPPED_ALIKE = "as many prompts were dropped for their age"
ASYNCHRONOUS = {"trainer.v1.trainer_mode": "separate_async"}


def dropping(prompts):
    """Return an arm whose runs drop prompts in every step after the first, beside 16 that they train on.

    Args:
        prompts: how many are dropped in a step. If it is 0, the metric is missing, since verl logs no 0.
    """

    def edit(line):
        line["data"]["training/off_policy/trajectory_staleness/mean"] = 1.0
        if prompts and line["step"] > 1:
            line["data"]["training/off_policy/evicted_samples"] = prompts
        return line

    return both_runs(overrides=ASYNCHRONOUS, edit_line=edit)


@pytest.mark.parametrize(
    ("first", "second", "verdict", "facts"),
    [
        # 5 a step in 4 of 5 steps are 20 prompts, beside 5 * 16 = 80 that are trained on: 20 of 100.
        pytest.param(dropping(5.0), dropping(0), "failed", ["20.0 % and 0.00 %"], id="one arm drops a fifth"),
        pytest.param(
            dropping(5.0), dropping(5.0), "passed", ["20.0 % and 20.0 %", "prompts"], id="both arms drop a fifth"
        ),
        # 2 of 82.
        pytest.param(dropping(0.5), dropping(0), "passed", ["2.4 % and 0.00 %"], id="one arm drops a few"),
        # What samples in step with the training drops none.
        pytest.param(SOUND, SOUND, "passed", ["0.00"], id="synchronous trainers"),
        # A log without verl's metrics of staleness says nothing.
        pytest.param(
            dropping(5.0),
            both_runs(overrides=ASYNCHRONOUS),
            "not recorded",
            ["dropped", "acpo-seed1"],
            id="no metrics of staleness",
        ),
    ],
)
def test_arms_that_dropped_another_share_did_not_train_on_the_same_data(tmp_path, first, second, verdict, facts):
    certify_arms(tmp_path, first=first, second=second, code=None).assert_verdict(DROPPED_ALIKE, verdict, *facts)
