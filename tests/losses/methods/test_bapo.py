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

from .at import row, tokens_at

PUBLISHED = {
    "bapo": dict(
        **dict(target=0.4, contribution="share", counted="surrogate", weight="old", first="upper", last_step="full"),
        **dict(lower_start=0.6, lower_stop=0.9, lower_step=0.02, upper_start=1.2, upper_stop=3.0, upper_step=0.05),
        **dict(dual_clip=None, scope="mini_batch"),
    ),
    "bapo_reference": dict(
        **dict(target=0.5, contribution="ratio", weight="none", first="lower", last_step="clipped"),
        **dict(lower_start=0.8, lower_stop=0.95, lower_step=0.05, upper_start=1.2, upper_stop=2.0, upper_step=0.1),
        **dict(epsilon=1e-8, dual_clip=3.0, scope="micro_batch"),
    ),
}
VARIANTS = ({"weight": "rollout", "counted": "gradient", "contribution": "net"}, {"counted": "gradient"})
STEPS = [f"{side}_{part}" for side in ("lower", "upper") for part in ("start", "stop", "step")]
# The release's names and the paper's, in this order.
RELEASED = [f"ratio_{side}_{part}" for side in ("lower", "upper") for part in ("start", "max", "step")]
PAPERS = ("a_minus", "b_minus", "delta2", "a_plus", "b_plus", "delta1")
GOLDEN = {
    "bapo": Setup(
        "bapo_reference",
        dict(zip(STEPS, RELEASED, strict=True))
        | dict(target="adv_ratio_target", epsilon="eps", dual_clip="clip_ratio_c"),
    ),
    # pi_rollout weighs, and the vectors have the old policy for it: the group's weight=old.
    "paper_bapo": Setup(
        "bapo",
        dict(zip(STEPS, PAPERS, strict=True))
        | {"first": ("order", lambda order: order.removesuffix("_first")), "contribution": "denominator"}
        | dict(target="rho0", dual_clip="dual_clip"),
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


# Upper candidates 1, 2, 3 and lower ones 0.25, 0.5, 0.75.
SMALL = {"lower_start": 0.25, "lower_stop": 0.75, "lower_step": 0.25, "upper_start": 1.0, "upper_stop": 3.0}
SMALL |= {"upper_step": 1.0, "weight": "none"}


def decided(method, ratio, advantages, *, mask=None, dtype=torch.float64, **log_probs):
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
def test_candidates_passed_are_bucketize_at_between_and_beside_candidates(sides, dtype):
    # What the statistics ask: of positive tokens (value > candidate), then of negative ones (value >= candidate).
    method = Bapo(weight="none", **sides)
    for side, sign, right in (("upper", 1.0, False), ("lower", -1.0, True)):
        edges = method._candidates(side).to(dtype)
        beside = [edges.nextafter(torch.full_like(edges, end)) for end in (torch.inf, -torch.inf)]
        drawn = torch.rand(2000, generator=torch.Generator().manual_seed(0), dtype=dtype) * 4
        ratio = torch.cat([edges, *beside, drawn, torch.tensor([1e-8, 1e8], dtype=dtype)]).clamp(min=1e-8)[None]
        passed = torch.bucketize(ratio, edges, right=right)
        statistics = method.statistics(tokens_at(ratio, torch.full_like(ratio, sign)))
        upper = 2 * (len(method._candidates("upper")) + 1)
        found = statistics[:upper] if side == "upper" else statistics[upper:]
        assert found[: len(edges) + 1].tolist() == torch.bincount(passed[0], minlength=len(edges) + 1).tolist()


@pytest.mark.parametrize(("weight", "share"), [("old", 0.2), ("rollout", 0.8), ("none", 0.5)])
def test_weights(weight, share):
    method, low, high = Bapo(weight=weight, target=0.01), math.log(0.2), math.log(0.8)
    found = decided(method, [1.0, 1.0], [1.0, -1.0], old_log_prob=[low, high], rollout_log_prob=[high, low])
    assert found[2] == pytest.approx(share)
    assert method.asks_for == (("rollout_log_prob",) if weight == "rollout" else ())


@pytest.mark.parametrize("contribution", ["share", "net", "ratio"])
@pytest.mark.parametrize("counted", ["surrogate", "gradient"])
@pytest.mark.parametrize("first", ["upper", "lower"])
def test_tokens_of_one_sign_or_none(contribution, counted, first):
    method = Bapo(contribution=contribution, counted=counted, first=first)
    most = replace(method, target=1.0 if contribution == "share" else 10.0)
    assert decided(most, [1.0, 0.1, 9.0], [1.0, 1.0, 1.0])[:2] == [0.6, 1.2]
    assert decided(method, [1.0, 2.0], [-1.0, -1.0]) == [0.9, 3.0, 0.0, 0.0]
    for dtype in (torch.float32, torch.float64):
        for advantages, mask in (([-1.0, 1.0], [False, False]), ([0.0, 0.0], [True, True])):
            assert decided(method, [1.0, 2.0], advantages, mask=mask, dtype=dtype) == [0.6, 1.2, 0.0, 0.0]


def test_neither_the_order_of_tokens_nor_micro_batches_matter_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages, old_log_prob = torch.randn(3, 4, 300, dtype=torch.float64, generator=generator)
    t = tokens_at(log_ratio.exp(), advantages, old_log_prob=-old_log_prob.abs())
    order, whole = torch.randperm(300, generator=generator), Bapo().statistics(t)

    def part(*index):
        return Bapo().statistics(type(t)(*(None if tensor is None else tensor[index] for tensor in t)))

    assert torch.equal(part(slice(None), order), whole)
    assert torch.equal(sum(part(slice(k, k + 1)) for k in range(4)), whole)


def test_a_huge_ratio_leaves_the_sums_of_the_other_sign_as_they_are():
    ratio, advantages = [1.1, 1.3, 0.7, 0.8], [0.3, 0.7, -0.3, -0.7]
    one, other = (
        Bapo().statistics(tokens_at(row(*ratio, *more), row(*advantages, *[-0.9] * len(more)))) for more in ([], [1e8])
    )
    # All but the 2 * 17 sums of negative tokens. Those are counted in larger units, still tiny parts of their total.
    assert torch.equal(other[:-34], one[:-34])
    assert_close(other[-34:], one[-34:] + torch.tensor([0] * 16 + [0.9] + [0] * 16 + [0.9e8]), rtol=0, atol=1e-2)


# A contribution is rounded to 2^-36 of the largest possible one: with these, at most 3e-8 of itself.
ADVANTAGES = st.just(0.0) | st.floats(0.1, 3.0) | st.floats(-3.0, -0.1)
ROUNDING = 1e-7
# Between candidates and on them.
RATIOS = st.floats(0.05, 6.0) | st.integers(10, 65).map(lambda k: round(0.05 * k, 2))
TOKENS = st.lists(st.tuples(RATIOS, ADVANTAGES), min_size=1, max_size=14)
# A share is at most 1.
CRITERIA = st.tuples(st.just("share"), st.floats(0.02, 1.0)) | st.tuples(
    st.sampled_from(["net", "ratio"]), st.floats(0.02, 3.0)
)
COUNTED, FIRST = st.sampled_from(["surrogate", "gradient"]), st.sampled_from(["upper", "lower"])


def contributions(tokens, c_low, c_high, method):
    """What positive and negative tokens contribute."""
    if method.counted == "surrogate":
        return (
            math.fsum(a * min(r, c_high) for r, a in tokens if a > 0),
            math.fsum(-a * max(r, c_low) for r, a in tokens if a < 0),
        )
    return (
        math.fsum(a * r for r, a in tokens if a > 0 and r <= c_high),
        math.fsum(-a * r for r, a in tokens if a < 0 and r >= c_low),
    )


def criterion(tokens, c_low, c_high, method):
    positive, negative = contributions(tokens, c_low, c_high, method)
    if negative == 0:
        return math.inf
    if method.contribution == "share":
        return positive / (positive + negative)
    if method.contribution == "net":
        return positive / abs(positive - negative) if positive != negative else math.inf
    return positive / (negative + method.epsilon)


def loop(tokens, method, target):
    """Move the first bound while the criterion is missed and there is room, then the other."""
    bounds = {"lower": method.lower_start, "upper": method.upper_start}
    for side in ("upper", "lower") if method.first == "upper" else ("lower", "upper"):
        start, stop, step = (getattr(method, f"{side}_{part}") for part in ("start", "stop", "step"))
        # In whole steps from start, so that 0.6 + 15 * 0.02 is 0.9.
        further = [round(start + k * step, 12) for k in range(1, 100) if round(start + k * step, 12) <= stop]
        if method.last_step == "clipped" and [start, *further][-1] < stop:
            further.append(stop)
        while further and criterion(tokens, bounds["lower"], bounds["upper"], method) < target:
            bounds[side] = further.pop(0)
    return bounds["lower"], bounds["upper"]


@given(
    tokens=TOKENS,
    criteria=CRITERIA,
    counted=COUNTED,
    first=FIRST,
    last_step=st.sampled_from(["full", "clipped"]),
    epsilon=st.sampled_from([1e-8, 1.0]),
    lower_stop=st.sampled_from([0.6, 0.9]),
    upper_step=st.sampled_from([0.05, 0.7]),
)
@settings(max_examples=400, deadline=None)
def test_the_loops_of_the_paper_and_of_the_release(tokens, criteria, **further):
    contribution, target = criteria
    method = Bapo(target=target, contribution=contribution, weight="none", **further)
    # Where the rounding of the sums decides, either answer is right.
    answers = [loop(tokens, method, target * (1 + shift)) for shift in (-ROUNDING, 0.0, ROUNDING)]
    assume(answers[0] == answers[1] == answers[2])
    ratio, advantages = zip(*tokens, strict=True)
    *bounds, before, after = decided(method, ratio, advantages)
    assert tuple(bounds) == answers[1]
    for share, at in ((before, (method.lower_start, method.upper_start)), (after, bounds)):
        positive, negative = contributions(tokens, *at, method)
        assert share == pytest.approx(positive / (positive + negative) if positive + negative else 0.0, abs=1e-6)
