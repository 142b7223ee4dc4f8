"""`clipx certify` on arms of which one dropped prompts for their age, in verl's asynchronous trainers."""

import pytest

from .example_arms import certified
from .test_certify import changed

QUESTION = "as many prompts were dropped for their age"
ASYNC = {"trainer.v1.trainer_mode": "separate_async"}
EVICTED, AGE = "training__off_policy__evicted_samples", "training__off_policy__trajectory_staleness__mean"


def dropping(prompts, kind=ASYNC, **further):
    """A run that drops prompts in every step after the first, beside 16 that it trains on; verl logs no 0."""

    def keep(line):
        line = changed(**{AGE: 1.0})["keep"](line)
        return changed(**{EVICTED: prompts})["keep"](line) if prompts and line["step"] > 1 else line

    return {"change": kind, "keep": keep, **further}


@pytest.mark.parametrize(
    ("first", "second", "verdict", "evidence"),
    [
        # 20 of 100 prompts.
        (dropping(5.0), dropping(0), "failed", "20.0 % and 0.0"),
        (dropping(5.0), dropping(5.0), "passed", "20.0 % and 20.0 % of the prompts"),
        (dropping(0.5), dropping(0), "passed", "of the prompts"),
        # What samples in step with the training drops none.
        ({}, {}, "passed", "0.0"),
        # A log without verl's metrics of staleness says nothing.
        (dropping(5.0), {"change": ASYNC}, "not recorded", "dropped prompts in acpo-seed1"),
    ],
)
def test_arms_that_dropped_another_share_did_not_train_on_the_same_data(tmp_path, first, second, verdict, evidence):
    line = certified(tmp_path, first=(first,) * 2, second=(second,) * 2, code=None)[QUESTION]
    assert line.startswith(f"{verdict}: ") and evidence in line, line
