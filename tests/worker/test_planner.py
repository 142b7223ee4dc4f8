"""Which statistics each scope decides from, what it costs, and what it remembers.

Covers: all scopes over two rollout batches of two updates with hand-made statistics; the closed form at ratio 1 and its
refusal; skipped steps; the exponential average; what waits for the next step; one all-reduce a step whatever is
combined; what is counted where rollout correction rejects; what half precision may differ by. Not covered: real passes
and ranks (tests/end_to_end/test_invariance.py).
"""

from types import SimpleNamespace

import pytest
import torch

from verl_clipx.base.shared_metrics import CLOSED_FORM_DIFFERENCE
from verl_clipx.base.tokens import Inputs
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.driver.config import build
from verl_clipx.loss.bounds import bounds_difference
from verl_clipx.loss.contract import example
from verl_clipx.loss.loss import token_statistics
from verl_clipx.modifiers import EntropySelection, Lopti
from verl_clipx.modifiers.entropy_selection import entropy_statistics
from verl_clipx.worker.layout import TokenPass
from verl_clipx.worker.planner import (
    TOLERATED_DIFFERENCE,
    TOLERATED_IN_HALF,
    MiniBatchStatistics,
    StepPlanner,
    tolerated_difference,
)

RANKS = 3


class Run:
    """A planner whose other ranks hold the same rows, and whose observation is the batch's own log-probabilities."""

    def __init__(self, method, *, rejects=False, **parameters):
        self.settings = build(method, **parameters)
        self.reductions = self.observations = 0
        self.planner = StepPlanner(
            self.settings,
            extra_pass=self.extra_pass,
            all_reduce=self.all_reduce,
            rejects=rejects,
        )

    def all_reduce(self, vector):
        self.reductions += 1
        return vector * RANKS

    def own(self, data):
        inputs = Inputs(*(data[key] for key in ("log_prob", "old_log_probs", "advantages", "response_mask")))
        return token_statistics(self.settings.method, self.settings.shaping, inputs)

    def extra_pass(self, data, step):
        self.observations += 1
        selected = torch.zeros(1, dtype=torch.float64)
        entropies = entropy_statistics(data["entropy"], data["response_mask"])
        return MiniBatchStatistics(self.own(data), entropies, selected)

    def step(self, data, position="update_0", *, moved=False, taken=True, token_pass=None):
        moved = None if moved is None else torch.tensor(moved)
        step = self.planner.plan(data, position=position, token_pass=token_pass, weights_moved=moved)
        if step.collect:
            step.collected = self.own(data)
        self.difference = self.planner.finish(step, taken=taken).get(CLOSED_FORM_DIFFERENCE.key)
        return step


def test_a_step_says_which_tokens_its_bounds_were_decided_from():
    first, moved = batch(), batch(seed=1)
    run = Run("acpo")
    assert run.step(first, moved=False).decided_from is DecidedFrom.RATIO_ONE
    assert run.step(moved, "update_1", moved=None).decided_from is DecidedFrom.MINI_BATCH
    assert Run("acpo").step(moved, moved=True).decided_from is DecidedFrom.MINI_BATCH
    lagged = Run("acpo", scope="lagged")
    assert [lagged.step(first, moved=None).decided_from for _ in range(2)] == [
        DecidedFrom.RATIO_ONE,
        DecidedFrom.LAGGED,
    ]
    for method, scope in (("acpo", "micro_batch"), ("grpo", "mini_batch")):
        assert Run(method, scope=scope).step(first, moved=None).decided_from is DecidedFrom.MICRO_BATCH


def batch(drift=1.0, seed=0):
    found = example(seed=seed)
    moved = found["old_log_prob"] + drift * (found["log_prob"] - found["old_log_prob"])
    return {
        "old_log_probs": found["old_log_prob"],
        "rollout_log_probs": found["old_log_prob"] - 1e-3,
        "log_prob": moved,
        "advantages": found["advantages"],
        "response_mask": found["mask"],
        "entropy": torch.rand(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),
    }


def epsilons(step):
    return step.decision[5:]


def test_mini_batch_has_an_extra_pass_before_all_but_the_first_update():
    run = Run("acpo")
    first = run.step(batch(drift=0))
    assert run.observations == 0 and (epsilons(first) == 0.2).all()
    assert run.difference == pytest.approx(0, abs=1e-12)
    second = run.step(batch(), "update_1", moved=None)
    assert run.observations == 1
    assert torch.equal(second.statistics, RANKS * run.own(batch()))
    assert epsilons(second).max() > 0.3
    assert run.reductions == 2


def test_the_closed_form_that_does_not_hold_is_reported_and_ends():
    run = Run("acpo")
    first = run.step(batch(drift=1.0))
    assert (epsilons(first) == 0.2).all() and run.difference > 1e-2 and run.observations == 0
    second = run.step(batch(drift=1.0))
    assert torch.equal(second.statistics, RANKS * run.own(batch(drift=1.0))) and run.difference is None
    run.reductions = 0
    run.step(batch(drift=0))
    assert run.observations == 2 and run.reductions == 1


def test_the_alarm_compares_bounds():
    # ACPO's statistics are sums of 25 tokens: a drift of 0.02 moves them by 0.009, below the threshold, but epsilon by
    # 3 times a sigma of 0.01 to 0.02, a sixth to a third of 0.2.
    run = Run("acpo")
    run.step(batch(drift=0.02))
    own, still = run.own(batch(drift=0.02)), run.own(batch(drift=0))
    assert float((own - still).abs().max() / own.abs().max()) < 1e-2
    epsilon = run.settings.method.decide(own)[5:]
    assert run.difference == pytest.approx(float((epsilon / 0.2 - 1).max()), rel=1e-9)
    assert run.difference > 0.05


def test_without_recomputed_old_log_probs_every_update_has_its_extra_pass():
    run = Run("acpo")
    step = run.step(batch(), moved=None)
    assert run.observations == 1 and step.assumed is None and run.difference is None


def test_old_log_probs_of_other_weights_are_noticed():
    run = Run("acpo")
    step = run.step(batch(), moved=True)
    assert run.observations == 1 and epsilons(step).max() > 0.3
    run.reductions = 0
    run.step(batch(), moved=False)
    assert run.observations == 2 and run.reductions == 1


def test_rollout_log_probs_in_the_place_of_the_old_ones_are_noticed():
    run = Run("acpo")
    data = batch()
    data["rollout_log_probs"] = data["old_log_probs"].clone()
    step = run.step(data)
    assert run.observations == 1 and epsilons(step).max() > 0.3
    run.reductions = 0
    run.step(batch())
    assert run.observations == 2 and run.reductions == 1


def test_lagged_uses_the_same_position_of_the_previous_rollout_batch_and_no_observation():
    run = Run("acpo", scope="lagged")
    old = [run.step(batch(drift=0), "update_0"), run.step(batch(seed=1), "update_1", moved=None)]
    assert all((epsilons(step) == 0.2).all() for step in old)
    new = [run.step(batch(drift=0, seed=2), "update_0"), run.step(batch(seed=3), "update_1", moved=None)]
    assert (epsilons(new[0]) == 0.2).all()
    assert torch.equal(new[1].statistics, RANKS * run.own(batch(seed=1)))
    assert epsilons(new[1]).max() > 0.3
    assert run.observations == 0 and run.reductions == 4


def test_lagged_with_one_update_uses_the_previous_step():
    run = Run("acpo", scope="lagged")
    run.step(batch(seed=1))
    step = run.step(batch(seed=2))
    assert torch.equal(step.statistics, RANKS * run.own(batch(seed=1)))


def test_lagged_averages_exponentially():
    run = Run("acpo", scope="lagged", lagged_average=0.75)
    for seed in (1, 2, 3):
        run.step(batch(seed=seed))
    step = run.step(batch(seed=4))
    first, second, third = (RANKS * run.own(batch(seed=seed)) for seed in (1, 2, 3))
    torch.testing.assert_close(step.statistics, 0.75 * (0.75 * first + 0.25 * second) + 0.25 * third)


def test_a_skipped_step_leaves_the_state_as_it_was():
    run = Run("acpo", scope="lagged")
    run.step(batch(seed=1), moved=None)
    run.planner.flush()
    (before,) = [vector.clone() for vector in run.planner.state.statistics.values()]
    run.step(batch(seed=2), moved=None, taken=False)
    run.planner.flush()
    assert run.planner.state.step == 1
    assert torch.equal(*run.planner.state.statistics.values(), before)


def test_only_lagged_bounds_remember_statistics():
    run = Run("acpo", scope="mini_batch")
    run.step(batch(seed=1), moved=None)
    run.planner.flush()
    assert run.planner.state.step == 1 and not run.planner.state.statistics


def test_flushing_before_a_checkpoint_changes_nothing_later():
    through, saved = Run("acpo", scope="lagged"), Run("acpo", scope="lagged")
    for seed in (1, 2):
        through.step(batch(seed=seed))
        saved.step(batch(seed=seed))
        saved.planner.flush()
    assert torch.equal(through.step(batch(seed=3)).statistics, saved.step(batch(seed=3)).statistics)


def test_a_restored_state_is_not_mixed_with_what_waited():
    run, kept = Run("acpo", scope="lagged"), Run("acpo", scope="lagged")
    kept.step(batch(seed=1))
    kept.planner.flush()
    run.step(batch(seed=2))
    run.planner.restore(kept.planner.state)
    assert torch.equal(run.step(batch(seed=3)).statistics, RANKS * run.own(batch(seed=1)))


def test_micro_batch_and_fixed_bounds_cost_nothing():
    for run in (Run("acpo", scope="micro_batch"), Run("grpo")):
        step = run.step(batch())
        assert (run.observations, run.reductions) == (0, 0)
        assert step.statistics is None and step.decision is None and not step.collect


@pytest.mark.parametrize("scope", ["mini_batch", "lagged", "micro_batch"])
@pytest.mark.parametrize("over", ["sequence", "mini_batch"])
def test_everything_combined_needs_one_all_reduce_a_step(scope, over):
    select, update = EntropySelection(over=over, ratio=0.3), Lopti(eta=0.25)
    run = Run("bapo", scope=scope, select=select, update=update)
    for rollout in range(2):
        for group in ("low", "high"):
            for update in range(2):
                run.step(
                    batch(seed=rollout),
                    f"{group}/update_{update}",
                    moved=False if group == "low" and update == 0 else None,
                    token_pass=TokenPass(group, 0.25, True),
                )
    assert run.reductions == 8
    expected = {("mini_batch", "sequence"): 6, ("mini_batch", "mini_batch"): 8, ("lagged", "mini_batch"): 8}
    # BAPO under mini_batch: all but the first update of each rollout batch's first pass.
    assert run.observations == expected.get((scope, over), 8 if over == "mini_batch" else 0)


def test_token_counts_are_over_all_ranks():
    run = Run("grpo", select=EntropySelection(ratio=0.5), update=Lopti(eta=0.25))
    data = batch()
    step = run.step(data, token_pass=TokenPass("low", 0.25, True))
    low = (data["old_log_probs"].exp() <= 0.25) & data["response_mask"]
    assert step.counted_tokens == RANKS * int(low.sum())
    # Half of 9, 7, 5, 3, 1 and no tokens.
    assert float(step.selected_tokens) == RANKS * (4 + 3 + 2 + 1 + 1 + 0)


def test_the_threshold_over_the_mini_batch_selects_the_share_asked_for():
    run = Run("grpo", select=EntropySelection(over="mini_batch", ratio=0.4))
    step = run.step(batch())
    assert run.observations == 1
    assert float(step.selected_tokens) == RANKS * 10
    assert step.decision is None


def test_loptis_threshold_at_a_quantile():
    run = Run("grpo", update=Lopti(quantile=0.4))
    low, high = run.planner.passes(batch())
    share = low.tokens(batch()).sum() / batch()["response_mask"].sum()
    assert float(share) == pytest.approx(0.4, abs=1 / 25)
    assert not (low.tokens(batch()) & high.tokens(batch())).any()


def test_loptis_first_pass_alone_leaves_the_other_tokens_out():
    run = Run("grpo", update=Lopti(eta=0.25, order="low_only"))
    (low,) = run.planner.passes(batch())
    assert torch.equal(low.tokens(batch()), (batch()["old_log_probs"].exp() <= 0.25) & batch()["response_mask"])


def test_bounds_difference():
    acpo, bapo, m2po = (build(name).method for name in ("acpo", "bapo", "m2po"))
    # Five bins of 100 tokens without deviation; in the middle one sigma is 0.002, so epsilon 0.206 instead of 0.2.
    still = torch.cat([torch.full((5,), 100.0), torch.zeros(10)]).double()
    moved = still.clone()
    moved[12] = 100 * 0.002**2
    assert bounds_difference(acpo, still, moved) == pytest.approx(0.03)
    assert bounds_difference(acpo, still, still) == 0
    moved[12] = torch.nan
    assert bounds_difference(acpo, still, moved) == float("inf")
    # No bound at all, and one: infinitely far apart.
    nothing = torch.zeros(m2po.statistics_size, dtype=torch.float64)
    everything = torch.full_like(nothing, 1e6)
    everything.view(2, -1)[1, 0] = 0
    assert bounds_difference(m2po, nothing, nothing) == 0
    assert bounds_difference(m2po, nothing, everything) == float("inf")
    assert bounds_difference(bapo, *torch.zeros(2, bapo.statistics_size, dtype=torch.float64)) == 0


@pytest.mark.parametrize("method", ["grpo", "acpo"])
def test_rejected_tokens_are_not_counted_and_counting_costs_no_reduction_more(method):
    data = batch()
    tokens = int(data["response_mask"].sum())
    data["response_mask"] = data["response_mask"].clone()
    data["response_mask"][0] = False
    left = int(data["response_mask"].sum())
    assert left < tokens
    run = Run(method, rejects=True)
    assert run.step(data).counted_tokens == RANKS * left
    assert run.reductions == 1
    assert Run(method).step(data).counted_tokens is None


def spread(deviation):
    """A mini-batch at probability 0.5 whose ratios deviate from 1 by as much, up and down."""
    ratio = 1 + deviation * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(6, 5)
    data = {key: value.clone() for key, value in batch(drift=0).items()}
    data |= {key: torch.full((6, 10), 0.5, dtype=torch.float64).log() for key in ("old_log_probs", "log_prob")}
    data["log_prob"] += ratio.log()
    data["rollout_log_probs"] = data["old_log_probs"] - 1e-3
    return data | {"advantages": torch.ones(6, 10), "response_mask": torch.ones(6, 10, dtype=torch.bool)}


@pytest.mark.parametrize(("difference", "alarms"), [(0.59, False), (1.35, True)], ids=["rounding", "epsilon of 0.47"])
def test_in_half_precision_rounding_is_no_alarm_and_ratios_that_spread_are_one(difference, alarms):
    run = Run("acpo")
    run.planner.tolerated = tolerated_difference(SimpleNamespace(mixed_precision={"param_dtype": "bf16"}))
    run.step(spread(0.2 * difference / 3))
    assert run.difference == pytest.approx(difference, rel=1e-6) and run.observations == 0
    second = run.step(spread(0.09))
    assert (run.observations == 1) == alarms
    assert float(epsilons(second).max()) == pytest.approx(0.47 if alarms else 0.2)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, TOLERATED_IN_HALF),
        ({}, TOLERATED_IN_HALF),
        ({"param_dtype": "bf16"}, TOLERATED_IN_HALF),
        ({"param_dtype": "fp32"}, TOLERATED_DIFFERENCE),
        (False, TOLERATED_IN_HALF),
    ],
)
def test_half_precision_is_no_alarm(precision, expected):
    assert tolerated_difference(SimpleNamespace(mixed_precision=precision)) == expected
    run = Run("acpo")
    run.planner.tolerated = expected
    # The ratios spread as two packings in bfloat16 do.
    for _ in range(2):
        run.step(batch(drift=0.02))
    assert (run.observations == 0) == (expected == TOLERATED_IN_HALF)
