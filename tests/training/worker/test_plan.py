"""What lagged bounds decide from and remember, over hand-made rollout batches. Not covered: what each scope costs
(tests/run/test_schedule.py), whose statistics a pass finds (test_rejection.py), real ranks (tests/end_to_end).
"""

import math
from types import SimpleNamespace

import pytest
import torch

from verl_clipx.losses.applying.loss import token_statistics
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.contract.contract import example
from verl_clipx.run.config import build
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.handover import Handover
from verl_clipx.run.keys import MINI_BATCH, ROLLOUT_PROMPTS, TRAINER_MODE
from verl_clipx.run.record import RunRecord
from verl_clipx.run.schedule import schedule_of
from verl_clipx.training.worker.plan import plan_step
from verl_clipx.training.worker.state import ControllerState
from verl_clipx.training.worker.step import RolloutBatch

RANKS = 3


class RunOfTwoUpdates:
    """A training run with two updates on a rollout batch, on RANKS ranks that all hold the same rows.

    It counts its extra passes in `passes` and its all-reduces in `reductions`.
    """

    def __init__(self, method: str, **settings):
        self.settings = build(method, **settings)
        # Two prompts in mini-batches of one make two updates.
        values = {TRAINER_MODE: "sync", ROLLOUT_PROMPTS: 2, MINI_BATCH: 1}
        record = RunRecord(schedule=schedule_of(values, self.settings))
        # What `plan_step` reads of verl's PolicyLossConfig.
        self.policy_loss = SimpleNamespace(clipx=self.settings, run=Handover(record))
        self.state = ControllerState()
        self.reductions = 0
        self.passes = 0

    def all_reduce(self, vector):
        self.reductions += 1
        return vector * RANKS

    def statistics_of(self, data):
        inputs = Inputs(
            log_prob=data["log_prob"],
            old_log_prob=data["old_log_probs"],
            advantages=data["advantages"],
            mask=data["response_mask"],
        )
        return token_statistics(self.settings.method, self.settings.shaping, inputs)

    def extra_pass(self, data, step, seen):
        self.passes += 1
        return {"statistics": self.statistics_of(data)}

    def step(self, data, update=0, *, taken=True):
        batch = RolloutBatch(update=update)
        step = plan_step(
            self.policy_loss, self.state, batch, data, extra_pass=self.extra_pass, all_reduce=self.all_reduce
        )
        if step.collected is not None:
            step.collected.append(self.statistics_of(data))
        step.gradient_norm = 1.0 if taken else math.nan
        self.state.end_step(step, batch.position)
        return step

    def save(self):
        """What a checkpoint does first."""
        if self.state.waiting is not None:
            self.state.keep_waiting(self.all_reduce(self.state.waiting.of_this_rank))


def make_batch(drift=1.0, seed=0):
    """The example with some share of its distance from ratio 1."""
    batch = example(seed=seed)
    return {
        "old_log_probs": batch["old_log_prob"],
        "log_prob": batch["old_log_prob"] + drift * (batch["log_prob"] - batch["old_log_prob"]),
        "advantages": batch["advantages"],
        "response_mask": batch["mask"],
    }


def epsilons(run, step):
    """Return epsilon of each of ACPO's bins: its decision is sigma of each bin, then epsilon of each."""
    return step.decision[run.settings.method.bins :]


def test_lagged_uses_the_same_position_of_the_rollout_batches_before_and_no_observation():
    run = RunOfTwoUpdates("acpo", scope="lagged")
    first_batch = [run.step(make_batch(drift=0), 0), run.step(make_batch(seed=1), 1)]
    second_batch = [run.step(make_batch(drift=0, seed=2), 0), run.step(make_batch(seed=3), 1)]
    assert {step.decided_from for step in first_batch} == {DecidedFrom.RATIO_ONE}
    # Whatever the update will find.
    assert torch.equal(first_batch[1].statistics, RANKS * run.statistics_of(make_batch(drift=0, seed=1)))
    assert {step.decided_from for step in second_batch} == {DecidedFrom.LAGGED}
    # At ratio 1 no ratio varies, and every bin has ACPO's smallest epsilon.
    for step in (*first_batch, second_batch[0]):
        assert (epsilons(run, step) == run.settings.method.epsilon_base).all()
    # The second update of the batch before, whose bounds these are, had ratios that vary.
    assert epsilons(run, second_batch[1]).max() > run.settings.method.epsilon_base + 0.1
    assert torch.equal(second_batch[1].statistics, RANKS * run.statistics_of(make_batch(seed=1)))
    assert run.passes == 0 and run.reductions == 4


@pytest.mark.parametrize("scope", ["lagged", "mini_batch"])
def test_only_lagged_bounds_remember_statistics_and_none_of_a_skipped_step(scope):
    run = RunOfTwoUpdates("acpo", scope=scope)
    for seed, taken in ((1, True), (2, False)):
        run.step(make_batch(seed=seed), taken=taken)
        run.save()
    remembered = [RANKS * run.statistics_of(make_batch(seed=1))] if scope == "lagged" else []
    assert run.state.step == 1 and all(map(torch.equal, run.state.statistics.values(), remembered))
    assert len(run.state.statistics) == len(remembered)


def test_a_checkpoint_changes_nothing_later_and_what_waited_is_not_mixed_with_a_restored_state():
    uninterrupted = RunOfTwoUpdates("acpo", scope="lagged")
    saved = RunOfTwoUpdates("acpo", scope="lagged")
    restored = RunOfTwoUpdates("acpo", scope="lagged")
    for seed in (1, 2):
        uninterrupted.step(make_batch(seed=seed))
        saved.step(make_batch(seed=seed))
        saved.save()
    restored.step(make_batch(seed=7))
    restored.state = saved.state
    steps = [run.step(make_batch(seed=3)) for run in (uninterrupted, saved)]
    assert all(torch.equal(step.statistics, RANKS * uninterrupted.statistics_of(make_batch(seed=2))) for step in steps)
    assert torch.equal(
        restored.step(make_batch(seed=4)).statistics, RANKS * uninterrupted.statistics_of(make_batch(seed=3))
    )
