"""M2PO's buckets, bounds and weights by hand, and against sorting the tokens: both readings of the second moment, both
policies that ratios are taken to. Not covered: a run without rollout log-probabilities (tests/claims/test_groups.py).
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.methods.m2po import LARGEST, OCTAVES, M2po

from .against_verl import assert_gradient_of
from .hand_rows import apply_method, row, tokens_at

PUBLISHED = {
    "m2po": dict(threshold=0.04, moment="kept", behaviour="rollout", scope="mini_batch"),
    "m2po_reference": dict(threshold=0.04, moment="capped", behaviour="old", scope="micro_batch"),
}
VARIANTS = ({"moment": "capped"}, {"behaviour": "old"}, {"log_ratio_clamp": None})


def check_training(values):
    before = values("actor/clipx/second_moment_before")
    after = values("actor/clipx/second_moment_after")
    assert max(after) <= 0.04
    assert all(0 <= less <= more for less, more in zip(after, before, strict=True))


EDGES = OCTAVES.edges("cpu")


def make_tokens(log_ratio, advantages, *, mask=None, dtype=torch.float64):
    """Return tokens whose old policy is the current one, at these log-ratios to the policy that sampled."""
    x = row(*log_ratio, dtype=dtype)
    mask = None if mask is None else row(*mask, dtype=torch.bool)
    # In a float64 that float32 can hold, the difference of two log-probabilities would round.
    return tokens_at(torch.ones_like(x), row(*advantages, dtype=dtype), mask=mask, rollout_log_prob=-x)


def test_edges_are_sixty_fourths_of_octaves_and_exact_in_float32():
    assert EDGES.tolist() == [math.ldexp(64 + step % 64, step // 64 - 16) for step in range(1025)]
    assert EDGES[[0, 1, 64, -1]].tolist() == [2**-10, 65 * 2**-16, 2**-9, LARGEST]
    assert torch.equal(EDGES.float().double(), EDGES)


def test_statistics_by_hand():
    # Counted are those that PPO's clip acts on: 0.5 and 0.5 with A > 0, -0.25 with A < 0; the masked 0.5 is not.
    t = make_tokens(
        [0.5, 0.5, -0.25, -0.5, 0.25, 0.0, 3.0, 0.5],
        [1.0, 2.0, -1.0, 1.0, -1.0, 1.0, 0.0, 1.0],
        mask=[True] * 7 + [False],
    )
    method = M2po()
    statistics = method.statistics(t)
    assert len(statistics) == method.statistics_size == 2 * 1026
    counts, squares = statistics.view(2, -1)
    # A bucket contains its upper edge.
    quarter, half = 64 * 8, 64 * 9
    assert EDGES[[quarter, half]].tolist() == [0.25, 0.5]
    assert counts.nonzero().flatten().tolist() == [quarter, half]
    assert counts[[quarter, half]].tolist() == [1.0, 2.0]
    assert squares[[quarter, half]].tolist() == [0.0625, 0.5]


LOG_RATIO = [0.1, 0.3, 0.5, -0.2, -0.6, -3.0, 2.0, 5.0]
ADVANTAGES = [1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("moment", "bound"), [("kept", 0.3), ("capped", 0.05**0.5)])
def test_the_tokens_with_the_largest_log_ratios_are_masked(moment, bound, dtype):
    # Sorted squares 0.01, 0.04, 0.09, 0.25, 0.36: the first two have mean 0.025, the first three 0.0467. With the three
    # others as if at tau, (0.05 + 3 tau^2) / 5 is 0.04 where tau^2 is 0.05.
    method = M2po(moment=moment)
    t = make_tokens(LOG_RATIO, ADVANTAGES, dtype=dtype)
    statistics = method.statistics(t)
    decision = method.decide(statistics)
    tau, before, after, masked = decision.tolist()
    # The largest edge that is at most the bound.
    assert tau == EDGES[: torch.bucketize(bound, EDGES, right=True)][-1].item()
    mean = 0.025 if moment == "kept" else (0.05 + 3 * tau**2) / 5
    assert (before, after, masked) == pytest.approx((0.15, mean, 0.6), rel=1e-5)
    bounds = method.bounds(t, decision)
    assert (bounds.low.item(), bounds.high.item()) == (-tau, tau)
    kept = [0.1, None, None, -0.2, None, -3.0, 2.0, 5.0]
    expected = row(*(0.0 if x is None else math.exp(x) for x in kept), dtype=dtype)
    assert_close(method.gradient_weight(t, bounds), expected)
    assert_close(method.loss_value(t, bounds, expected), -expected * t.advantages)
    assert {key: value.item() for key, value in method.metrics(statistics, decision).items()} == {
        "log_ratio_bound": tau,
        "second_moment_before": before,
        "second_moment_after": after,
        "masked_share": masked,
    }


@pytest.mark.parametrize("moment", ["kept", "capped"])
@pytest.mark.parametrize(
    "log_ratio",
    [
        pytest.param([0.1, -0.1, 0.19], id="all near"),
        pytest.param([-1.0, 0.0, -1.0], id="none that the clip acts on"),
    ],
)
def test_nothing_may_be_masked(moment, log_ratio):
    method = M2po(moment=moment)
    t = make_tokens(log_ratio, [1.0, -1.0, 1.0])
    statistics = method.statistics(t)
    decision = method.decide(statistics)
    tau, _, _, masked = decision.tolist()
    assert (tau, masked) == (math.inf, 0)
    assert_close(method.gradient_weight(t, method.bounds(t, decision)), row(*log_ratio).exp())
    assert method.metrics(statistics, decision)["log_ratio_bound"] == LARGEST


@pytest.mark.parametrize("moment", ["kept", "capped"])
def test_all_may_be_masked(moment):
    method = M2po(moment=moment)
    t = make_tokens([1.0, 2.0, -1.5], [1.0, 1.0, -1.0])
    decision = method.decide(method.statistics(t))
    _, _, _, masked = decision.tolist()
    assert masked == 1
    assert method.gradient_weight(t, method.bounds(t, decision)).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("clamp", "expected"), [(2.0, [0.0, 0.0]), (None, [math.exp(3.0), math.exp(-3.0)])])
def test_tokens_beyond_the_clamp_get_no_gradient(clamp, expected):
    # Neither is one that PPO's clip acts on.
    t = make_tokens([3.0, -3.0], [-1.0, 1.0])
    assert_close(apply_method(M2po(log_ratio_clamp=clamp), t).weight, row(*expected))


@pytest.mark.parametrize("clamp", [2.0, None])
@pytest.mark.parametrize(
    ("behaviour", "expected_ratio", "asks_for"), [("old", 2.0, ()), ("rollout", 4.0, ("rollout_log_prob",))]
)
def test_the_ratio_is_to_the_behaviour_policy(behaviour, expected_ratio, asks_for, clamp):
    # Log-probabilities: current log 2, old 0, rollout -log 2.
    t = tokens_at(row(2.0), row(1.0), rollout_log_prob=row(math.log(0.5)))
    method = M2po(behaviour=behaviour, log_ratio_clamp=clamp)
    assert method.bounded(t).item() == pytest.approx(math.log(expected_ratio))
    assert method.asks_for == asks_for


@pytest.mark.parametrize("seed", range(5))
def test_against_sorting_and_autograd(seed):
    """The paper's objective: tokens sorted by their squared log-ratio, the largest masked until it fits."""
    # Few tokens, so that no two are in one bucket.
    batch = example(seed=seed)
    batch["response_mask"] = mask = batch.pop("mask")
    A = batch["advantages"]
    rollout = batch["rollout_log_prob"]
    squared_log_ratio = (batch["log_prob"] - rollout).square()
    clip_acts = mask & (A * (batch["log_prob"] - rollout) > 0)
    in_order = squared_log_ratio[clip_acts].sort().values
    running_mean = in_order.cumsum(0) / torch.arange(1, len(in_order) + 1)
    fitting = in_order[running_mean <= 0.04]
    largest_kept = fitting[-1] if len(fitting) else 0.0
    masked = clip_acts & (squared_log_ratio > largest_kept)
    assert masked.any()

    def objective(log_prob):
        return torch.where(masked, 0.0, A * (log_prob - rollout).exp())

    metrics = assert_gradient_of("m2po", batch, objective, rollout_log_prob=rollout)
    assert metrics["clipx/masked_share"] > 0
