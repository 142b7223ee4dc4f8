"""BAPO's candidates, weights and ends by hand, and its vectorised search against the papers' loops, written plainly:
Algorithm 1 (upper bound first, full steps) and the release's (lower bound first, last step clipped to the stop). Not
covered: the golden vectors (tests/training/worker/test_golden.py), contributions so small that BAPO's units round them.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.golden.settings import UNCLAMPED, Setup
from verl_clipx.losses.methods.bapo import Bapo

from .hand_rows import row, tokens_at

PUBLISHED = {
    "bapo": dict(
        target=0.4,
        contribution="share",
        counted="surrogate",
        weight="old",
        first="upper",
        last_step="full",
        lower_start=0.6,
        lower_stop=0.9,
        lower_step=0.02,
        upper_start=1.2,
        upper_stop=3.0,
        upper_step=0.05,
        dual_clip=None,
        scope="mini_batch",
    ),
    "bapo_reference": dict(
        target=0.5,
        contribution="ratio",
        weight="none",
        first="lower",
        last_step="clipped",
        lower_start=0.8,
        lower_stop=0.95,
        lower_step=0.05,
        upper_start=1.2,
        upper_stop=2.0,
        upper_step=0.1,
        epsilon=1e-8,
        dual_clip=3.0,
        scope="micro_batch",
    ),
}
VARIANTS = ({"weight": "rollout", "counted": "gradient", "contribution": "net"}, {"counted": "gradient"})
GOLDEN = {
    "bapo": Setup(
        "bapo_reference",
        dict(
            target="adv_ratio_target",
            lower_start="ratio_lower_start",
            lower_stop="ratio_lower_max",
            lower_step="ratio_lower_step",
            upper_start="ratio_upper_start",
            upper_stop="ratio_upper_max",
            upper_step="ratio_upper_step",
            epsilon="eps",
            dual_clip="clip_ratio_c",
        ),
    ),
    # pi_rollout weighs, and the vectors have the old policy for it: the group's weight=old.
    "paper_bapo": Setup(
        "bapo",
        dict(
            target="rho0",
            contribution="denominator",
            first=("order", lambda order: order.removesuffix("_first")),
            lower_start="a_minus",
            lower_stop="b_minus",
            lower_step="delta2",
            upper_start="a_plus",
            upper_stop="b_plus",
            upper_step="delta1",
            dual_clip="dual_clip",
        ),
        UNCLAMPED,
    ),
}
VALUES_BESIDE_AN_END = {
    ("target", 10): {"contribution": "ratio"},
    ("lower_start", 1): {"lower_stop": 1},
    ("lower_stop", 0): {"lower_start": 0},
    ("lower_step", 1): {"lower_start": 0, "lower_stop": 1},
    ("upper_start", 20): {"upper_stop": 20},
    ("upper_stop", 1): {"upper_start": 1},
}
REFUSED_INSTEAD = {"lower_stop": ["lower_start"], "upper_stop": ["upper_start"]}
# With this all upper ends train.
ALL_AT_AN_END = {1: {"contribution": "ratio"}}
OVERRIDES_IN_TRAINING = ("clipx.target=0.7",)


def check_training(values):
    highs = values("actor/clipx/c_high")
    assert sum(highs) / len(highs) > 1.2
    assert all(0 <= share <= 1 for share in values("actor/clipx/positive_share_after"))


def decide_on_sequence(method, ratio, advantages, *, mask=None, dtype=torch.float64, **log_probs):
    """Return what a method decides from one sequence: lower bound, upper bound, positive share before and after."""
    mask = None if mask is None else row(*mask, dtype=torch.bool)
    log_probs = {name: row(*values, dtype=dtype) for name, values in log_probs.items()}
    t = tokens_at(row(*ratio, dtype=dtype), row(*advantages, dtype=dtype), mask=mask, **log_probs)
    return method.decide(method.statistics(t)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "sides",
    [
        {},
        {"lower_step": 0.07, "upper_step": 0.7, "last_step": "clipped"},
        {"lower_step": 0.2999999, "upper_start": 1.0, "upper_step": 0.001, "last_step": "clipped"},
        {"lower_start": 0.0, "lower_step": 0.001, "upper_start": 10.0, "upper_stop": 20.0, "upper_step": 0.001},
        {"lower_start": 0.9, "upper_start": 3.0},
    ],
)
@pytest.mark.parametrize("side", ["upper", "lower"])
def test_tokens_are_counted_by_the_candidates_that_they_passed(side, sides, dtype):
    method = Bapo(weight="none", **sides)
    candidates = method._candidates(side).to(dtype)
    just_above = candidates.nextafter(torch.full_like(candidates, torch.inf))
    just_below = candidates.nextafter(torch.full_like(candidates, -torch.inf))
    between = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=dtype) * 4
    extremes = torch.tensor([1e-8, 1e8], dtype=dtype)
    ratio = torch.cat([candidates, just_above, just_below, between, extremes]).clamp(min=1e-8)[None]
    # Positive tokens pass an upper candidate above it, negative ones a lower candidate at it and above.
    passed = torch.bucketize(ratio, candidates, right=side == "lower")
    expected_counts = torch.bincount(passed[0], minlength=len(candidates) + 1)
    statistics = method.statistics(tokens_at(ratio, torch.full_like(ratio, 1.0 if side == "upper" else -1.0)))
    # Of each side, counts and then contributions; the upper side first.
    start = 0 if side == "upper" else 2 * (len(method._candidates("upper")) + 1)
    counts = statistics[start : start + len(candidates) + 1]
    assert counts.tolist() == expected_counts.tolist()


@pytest.mark.parametrize(("weight", "share"), [("old", 0.2), ("rollout", 0.8), ("none", 0.5)])
def test_contributions_are_weighted_by_the_chosen_probability(weight, share):
    method = Bapo(weight=weight, target=0.01)
    unlikely, likely = math.log(0.2), math.log(0.8)
    _, _, positive_share, _ = decide_on_sequence(
        method,
        [1.0, 1.0],
        [1.0, -1.0],
        old_log_prob=[unlikely, likely],
        rollout_log_prob=[likely, unlikely],
    )
    assert positive_share == pytest.approx(share)
    assert method.asks_for == (("rollout_log_prob",) if weight == "rollout" else ())


@pytest.mark.parametrize("contribution", ["share", "net", "ratio"])
@pytest.mark.parametrize("counted", ["surrogate", "gradient"])
@pytest.mark.parametrize("first", ["upper", "lower"])
def test_tokens_of_one_sign_or_none(contribution, counted, first):
    method = Bapo(contribution=contribution, counted=counted, first=first)
    highest_target = replace(method, target=1.0 if contribution == "share" else 10.0)
    lower, upper, _, _ = decide_on_sequence(highest_target, [1.0, 0.1, 9.0], [1.0, 1.0, 1.0])
    assert (lower, upper) == (0.6, 1.2), "positive tokens alone meet every target at the start"
    assert decide_on_sequence(method, [1.0, 2.0], [-1.0, -1.0]) == [0.9, 3.0, 0.0, 0.0]
    for dtype in (torch.float32, torch.float64):
        outside_mask = decide_on_sequence(method, [1.0, 2.0], [-1.0, 1.0], mask=[False, False], dtype=dtype)
        assert outside_mask == [0.6, 1.2, 0.0, 0.0]
        without_advantage = decide_on_sequence(method, [1.0, 2.0], [0.0, 0.0], dtype=dtype)
        assert without_advantage == [0.6, 1.2, 0.0, 0.0]


def test_neither_the_order_of_tokens_nor_micro_batches_matter_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages, old_log_prob = torch.randn(3, 4, 300, dtype=torch.float64, generator=generator)
    t = tokens_at(log_ratio.exp(), advantages, old_log_prob=-old_log_prob.abs())
    statistics = Bapo().statistics(t)

    def statistics_of(*index):
        selected = type(t)(*(None if tensor is None else tensor[index] for tensor in t))
        return Bapo().statistics(selected)

    order = torch.randperm(300, generator=generator)
    assert torch.equal(statistics_of(slice(None), order), statistics)
    assert torch.equal(sum(statistics_of(slice(k, k + 1)) for k in range(4)), statistics)


def test_a_huge_ratio_leaves_the_sums_of_the_other_sign_as_they_are():
    ratio = [1.1, 1.3, 0.7, 0.8]
    advantages = [0.3, 0.7, -0.3, -0.7]
    without = Bapo().statistics(tokens_at(row(*ratio), row(*advantages)))
    with_huge_ratio = Bapo().statistics(tokens_at(row(*ratio, 1e8), row(*advantages, -0.9)))
    # All but the 2 * 17 sums of negative tokens. Those are counted in larger units, still tiny parts of their total.
    assert torch.equal(with_huge_ratio[:-34], without[:-34])
    added = torch.tensor([0] * 16 + [0.9] + [0] * 16 + [0.9e8])
    assert_close(with_huge_ratio[-34:], without[-34:] + added, rtol=0, atol=1e-2)


# A contribution is rounded to 2^-36 of the largest possible one: with these, at most 3e-8 of itself.
ADVANTAGES = st.just(0.0) | st.floats(0.1, 3.0) | st.floats(-3.0, -0.1)
ROUNDING = 1e-7
# Between candidates and on them.
RATIOS = st.floats(0.05, 6.0) | st.integers(10, 65).map(lambda k: round(0.05 * k, 2))
# Each a ratio and an advantage.
TOKENS = st.lists(st.tuples(RATIOS, ADVANTAGES), min_size=1, max_size=14)
# A share is at most 1.
CONTRIBUTION_AND_TARGET = st.tuples(st.just("share"), st.floats(0.02, 1.0)) | st.tuples(
    st.sampled_from(["net", "ratio"]), st.floats(0.02, 3.0)
)


def add_contributions(tokens, c_low, c_high, method):
    """Return what positive and what negative tokens contribute."""
    if method.counted == "surrogate":
        return (
            math.fsum(a * min(r, c_high) for r, a in tokens if a > 0),
            math.fsum(-a * max(r, c_low) for r, a in tokens if a < 0),
        )
    return (
        math.fsum(a * r for r, a in tokens if a > 0 and r <= c_high),
        math.fsum(-a * r for r, a in tokens if a < 0 and r >= c_low),
    )


def compute_criterion(tokens, c_low, c_high, method):
    positive, negative = add_contributions(tokens, c_low, c_high, method)
    if negative == 0:
        return math.inf
    if method.contribution == "share":
        return positive / (positive + negative)
    if method.contribution == "net":
        return positive / abs(positive - negative) if positive != negative else math.inf
    return positive / (negative + method.epsilon)


def search_by_loops(tokens, method, target):
    """Move the first bound while the criterion is missed and there is room, then the other; return both."""
    bounds = {"lower": method.lower_start, "upper": method.upper_start}
    sides = ("upper", "lower") if method.first == "upper" else ("lower", "upper")
    for side in sides:
        candidates = list_candidates(method, side)
        while candidates and compute_criterion(tokens, bounds["lower"], bounds["upper"], method) < target:
            bounds[side] = candidates.pop(0)
    return bounds["lower"], bounds["upper"]


def list_candidates(method, side):
    """Return the bounds of a side after its start."""
    start = getattr(method, f"{side}_start")
    stop = getattr(method, f"{side}_stop")
    step = getattr(method, f"{side}_step")
    # In whole steps from start, so that 0.6 + 15 * 0.02 is 0.9.
    after_steps = [round(start + k * step, 12) for k in range(1, 100)]
    candidates = [bound for bound in after_steps if bound <= stop]
    last = candidates[-1] if candidates else start
    if method.last_step == "clipped" and last < stop:
        candidates.append(stop)
    return candidates


@given(
    tokens=TOKENS,
    contribution_and_target=CONTRIBUTION_AND_TARGET,
    counted=st.sampled_from(["surrogate", "gradient"]),
    first=st.sampled_from(["upper", "lower"]),
    last_step=st.sampled_from(["full", "clipped"]),
    epsilon=st.sampled_from([1e-8, 1.0]),
    lower_stop=st.sampled_from([0.6, 0.9]),
    upper_step=st.sampled_from([0.05, 0.7]),
)
@settings(max_examples=400, deadline=None)
def test_the_search_is_that_of_the_loops_of_the_paper_and_of_the_release(tokens, contribution_and_target, **parameters):
    contribution, target = contribution_and_target
    method = Bapo(target=target, contribution=contribution, weight="none", **parameters)
    expected_bounds = search_by_loops(tokens, method, target)
    # Where the rounding of the sums decides, either answer is right.
    assume(search_by_loops(tokens, method, target * (1 - ROUNDING)) == expected_bounds)
    assume(search_by_loops(tokens, method, target * (1 + ROUNDING)) == expected_bounds)
    ratio, advantages = zip(*tokens, strict=True)
    lower, upper, share_before, share_after = decide_on_sequence(method, ratio, advantages)
    assert (lower, upper) == expected_bounds
    expected_share_before = compute_share(tokens, method.lower_start, method.upper_start, method)
    assert share_before == pytest.approx(expected_share_before, abs=1e-6)
    assert share_after == pytest.approx(compute_share(tokens, lower, upper, method), abs=1e-6)


def compute_share(tokens, c_low, c_high, method):
    """Return the positive tokens' share of all contributions, 0 without any."""
    positive, negative = add_contributions(tokens, c_low, c_high, method)
    return positive / (positive + negative) if positive + negative else 0.0
