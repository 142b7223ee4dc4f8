"""Which statistics each scope decides from, what it costs and what it remembers, over hand-made rollout batches. Not
covered: what costs nothing (tests/run/test_schedule.py), real passes and ranks (tests/end_to_end/test_invariance.py).
"""

import math
from types import SimpleNamespace

import pytest
import torch

from verl_clipx.base.tokens import Inputs
from verl_clipx.check.contract import example
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.loss.loss import token_statistics
from verl_clipx.modifiers import EntropySelection, Lopti
from verl_clipx.modifiers.entropy_selection import entropy_statistics
from verl_clipx.run.config import build
from verl_clipx.run.keys import MINI_BATCH, ROLLOUT_PROMPTS, ROLLOUT_RS, TRAINER_MODE
from verl_clipx.run.schedule import schedule_of
from verl_clipx.worker.layout import TokenPass
from verl_clipx.worker.plan import finish_step, plan_step, token_passes
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import RolloutBatch

RANKS = 3
LOW = TokenPass("low", 0.25, True)


class Run:
    """A run whose other ranks hold the same rows, and whose extra pass finds the batch's own log-probabilities."""

    def __init__(self, method, *, rejects=False, one_update=False, **parameters):
        self.settings = build(method, **parameters)
        values = {TRAINER_MODE: "sync", ROLLOUT_PROMPTS: 1 if one_update else 2, MINI_BATCH: 1}
        values |= {ROLLOUT_RS: "token_k1"} if rejects else {}
        run = SimpleNamespace(schedule=schedule_of(values, self.settings))
        self.policy_loss = SimpleNamespace(clipx=self.settings, run=run)
        self.state = ControllerState()
        self.reductions = self.passes = 0

    def all_reduce(self, vector):
        self.reductions += 1
        return vector * RANKS

    def own(self, data):
        inputs = Inputs(*(data[key] for key in ("log_prob", "old_log_probs", "advantages", "response_mask")))
        return token_statistics(self.settings.method, self.settings.shaping, inputs)

    def extra_pass(self, data, step, seen):
        self.passes += 1
        sums = {"statistics": self.own(data)} if step.decided_from is DecidedFrom.MINI_BATCH else {}
        if self.settings.selects_over_mini_batch:
            sums["entropies"] = entropy_statistics(data["entropy"], data["response_mask"])
        return sums

    def step(self, data, update=0, *, taken=True, token_pass=None):
        at = RolloutBatch(token_pass=token_pass, update=update)
        step = plan_step(self.policy_loss, self.state, at, data, extra_pass=self.extra_pass, all_reduce=self.all_reduce)
        if step.collected is not None:
            step.collected.append(self.own(data))
        step.gradient_norm = 1.0 if taken else math.nan
        finish_step(self.settings, self.state, step, at.position)
        return step

    def save(self):
        """What a checkpoint does first."""
        if self.state.waiting is not None:
            self.state.remember(self.all_reduce(self.state.waiting[1]))


def batch(drift=1.0, seed=0):
    found = example(seed=seed)
    return {
        "old_log_probs": found["old_log_prob"],
        "log_prob": found["old_log_prob"] + drift * (found["log_prob"] - found["old_log_prob"]),
        "advantages": found["advantages"],
        "response_mask": found["mask"],
        "entropy": torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),
    }


def epsilons(step):
    return step.decision[5:]


def test_mini_batch_has_an_extra_pass_before_every_update():
    run = Run("acpo")
    first, second = run.step(batch(drift=0)), run.step(batch(), 1)
    assert run.passes == run.reductions == 2
    assert (epsilons(first) == 0.2).all() and epsilons(second).max() > 0.3
    assert torch.equal(second.statistics, RANKS * run.own(batch()))
    assert first.decided_from is second.decided_from is DecidedFrom.MINI_BATCH


def test_with_one_update_a_rollout_batch_the_statistics_are_those_at_ratio_1():
    run = Run("acpo", one_update=True)
    # Whatever the update will find: its ratio is 1 by the configuration.
    step = run.step(batch())
    assert run.passes == 0 and run.reductions == 1 and step.decided_from is DecidedFrom.RATIO_ONE
    assert (epsilons(step) == 0.2).all() and torch.equal(step.statistics, RANKS * run.own(batch(drift=0)))
    # verl's v1 trainer fills up a rollout batch to whole mini-batches of the actor and the critic.
    assert run.step(batch(), 1).decided_from is DecidedFrom.MINI_BATCH and run.passes == 1
    # A pass that is made anyway, or weights that moved before, give the mini-batch's.
    for further, token_pass in (
        ({"select": EntropySelection(over="mini_batch")}, None),
        ({"update": Lopti(eta=0.25)}, TokenPass("high", 0.25, True)),
    ):
        run = Run("acpo", one_update=True, **further)
        assert run.step(batch(), token_pass=token_pass).decided_from is DecidedFrom.MINI_BATCH and run.passes == 1


def test_lagged_uses_the_same_position_of_the_rollout_batches_before_and_no_observation():
    run = Run("acpo", scope="lagged")
    old = [run.step(batch(drift=0), 0), run.step(batch(seed=1), 1)]
    new = [run.step(batch(drift=0, seed=2), 0), run.step(batch(seed=3), 1)]
    assert {step.decided_from for step in old} == {DecidedFrom.RATIO_ONE}
    assert {step.decided_from for step in new} == {DecidedFrom.LAGGED}
    assert all((epsilons(step) == 0.2).all() for step in (*old, new[0])) and epsilons(new[1]).max() > 0.3
    assert torch.equal(new[1].statistics, RANKS * run.own(batch(seed=1)))
    assert run.passes == 0 and run.reductions == 4


@pytest.mark.parametrize("scope", ["lagged", "mini_batch"])
def test_only_lagged_bounds_remember_statistics_and_none_of_a_skipped_step(scope):
    run = Run("acpo", scope=scope)
    for seed, taken in ((1, True), (2, False)):
        run.step(batch(seed=seed), taken=taken)
        run.save()
    remembered = [RANKS * run.own(batch(seed=1))] if scope == "lagged" else []
    assert run.state.step == 1 and all(map(torch.equal, run.state.statistics.values(), remembered))
    assert len(run.state.statistics) == len(remembered)


def test_a_checkpoint_changes_nothing_later_and_what_waited_is_not_mixed_with_a_restored_state():
    through, saved, restored = (Run("acpo", scope="lagged") for _ in range(3))
    for seed in (1, 2):
        through.step(batch(seed=seed))
        saved.step(batch(seed=seed))
        saved.save()
    restored.step(batch(seed=7))
    restored.state = saved.state
    steps = [run.step(batch(seed=3)) for run in (through, saved)]
    assert all(torch.equal(step.statistics, RANKS * through.own(batch(seed=2))) for step in steps)
    assert torch.equal(restored.step(batch(seed=4)).statistics, RANKS * through.own(batch(seed=3)))


def test_token_counts_are_over_all_ranks_and_the_threshold_selects_the_share_asked_for():
    data = batch()
    step = Run("grpo", select=EntropySelection(ratio=0.5), update=Lopti(eta=0.25)).step(data, token_pass=LOW)
    low = (data["old_log_probs"].exp() <= 0.25) & data["response_mask"]
    assert step.counted_tokens == RANKS * int(low.sum())
    # Half of 9, 7, 5, 3, 1 and no tokens.
    assert float(step.selected_tokens) == RANKS * (4 + 3 + 2 + 1 + 1 + 0)
    run = Run("grpo", select=EntropySelection(over="mini_batch", ratio=0.4))
    step = run.step(data)
    assert run.passes == 1 and float(step.selected_tokens) == RANKS * 10 and step.decision is None


def test_loptis_first_pass_alone():
    data, run = batch(), Run("grpo", update=Lopti(eta=0.25, order="low_only"))
    (low,) = token_passes(run.policy_loss)
    assert torch.equal(low.tokens(data), (data["old_log_probs"].exp() <= 0.25) & data["response_mask"])


@pytest.mark.parametrize("method", ["grpo", "acpo"])
def test_rejected_tokens_are_not_counted_and_counting_costs_no_reduction_more(method):
    data, run = batch(), Run(method, rejects=True)
    data["response_mask"] = data["response_mask"].clone()
    data["response_mask"][0] = False
    assert run.step(data).counted_tokens == RANKS * int(data["response_mask"].sum()) > 0
    assert run.reductions == 1 and Run(method).step(data).counted_tokens is None
