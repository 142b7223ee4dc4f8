"""BAPO's candidates, contributions and search by hand.

Does not cover the golden vectors (tests/worker/test_golden.py), the search against a plain loop
(test_bapo_search.py), additivity or host syncs (test_properties.py).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.methods.bapo import Bapo
from verl_clipx.methods.grpo import Grpo

from .at import row, tokens_at, weight_and_value

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def decided(method, ratio, advantages, *, mask=None, dtype=torch.float64, **log_probs):
    mask = None if mask is None else row(*mask, dtype=torch.bool)
    log_probs = {name: row(*values, dtype=dtype) for name, values in log_probs.items()}
    t = tokens_at(row(*ratio, dtype=dtype), row(*advantages, dtype=dtype), mask=mask, **log_probs)
    return method.decide(method.statistics(t)).tolist()


def candidates(start, stop, step, last_step):
    method = Bapo(upper_start=start, upper_stop=stop, upper_step=step, last_step=last_step, lower_stop=0.6)
    # Beside those of the upper bound there is one candidate of the lower one.
    assert method.statistics_size == 2 * (len(method._candidates("upper")) + 1) + 2 * 2
    return method._candidates("upper").tolist()


def test_with_bounds_that_cannot_move_the_loss_is_grpos():
    bapo = Bapo(lower_start=0.8, lower_stop=0.8, upper_start=1.2, upper_stop=1.2)
    ratio = row(0.5, 0.79, 0.8, 0.81, 1.0, 1.19, 1.2, 1.21, 3.0, dtype=torch.float32).repeat(2, 1)
    advantages = torch.tensor([[1.5], [-0.5]]).expand_as(ratio)
    t = tokens_at(ratio, advantages)
    bounds = bapo.bounds(t, bapo.decide(bapo.statistics(t)))
    assert [float(bounds.low), float(bounds.high)] == pytest.approx([0.8, 1.2])
    for found, expected in zip(
        weight_and_value(bapo, ratio, advantages, bounds),
        weight_and_value(Grpo(clip_low=0.8, clip_high=1.2, dual_clip=None), ratio, advantages),
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_published_ranges_reach_their_ends():
    assert Bapo()._candidates("lower").tolist() == [round(0.6 + 0.02 * k, 2) for k in range(16)]
    assert Bapo()._candidates("upper").tolist() == [round(1.2 + 0.05 * k, 2) for k in range(37)]
    # 16 lower and 37 upper candidates make 17 and 38 intervals of two sums each.
    assert Bapo().statistics_size == 2 * (17 + 38)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1.2, 2.0, 0.3, "full"), [1.2, 1.5, 1.8]),
        ((1.2, 2.0, 0.3, "clipped"), [1.2, 1.5, 1.8, 2.0]),
        ((1.2, 1.8, 0.3, "clipped"), [1.2, 1.5, 1.8]),
        ((1.2, 1.3, 0.3, "clipped"), [1.2, 1.3]),
        ((1.8, 1.8, 0.1, "clipped"), [1.8]),
    ],
)
def test_candidates_by_hand(arguments, expected):
    assert candidates(*arguments) == expected


@given(
    start=st.integers(0, 400), steps=st.integers(0, 30), step=st.integers(1, 50), decimals=st.sampled_from([100, 1000])
)
@settings(deadline=None)
def test_whole_numbers_of_decimal_steps_reach_the_stop_whatever_last_step_is(start, steps, step, decimals):
    start += decimals
    stop = (start + steps * step) / decimals
    for last_step in ("full", "clipped"):
        found = candidates(start / decimals, stop, step / decimals, last_step)
        assert found == [(start + k * step) / decimals for k in range(steps + 1)]


@FLOATS
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


# Upper candidates 1, 2, 3 and lower ones 0.25, 0.5, 0.75 in the tests by hand.
SMALL = {"lower_start": 0.25, "lower_stop": 0.75, "lower_step": 0.25, "upper_start": 1.0, "upper_stop": 3.0}
SMALL |= {"upper_step": 1.0, "weight": "none"}


@pytest.mark.parametrize(("target", "c_low", "c_high"), [(0.4, 0.25, 1.0), (0.5, 0.25, 2.0), (0.7, 0.75, 3.0)])
def test_surrogate_share_by_hand(target, c_low, c_high):
    # P = min(r, c_high), N = 2 max(0.125, c_low) + 1: at 1, 2, 3 with c_low = 0.25, P / (P + N) = 1/2.5, 2/3.5, 3/4.5.
    ratio, advantages = [4.0, 0.125, 1.0], [1.0, -2.0, -1.0]
    assert decided(Bapo(target=target, **SMALL), ratio, advantages)[:2] == [c_low, c_high]
    before, after = decided(Bapo(target=0.6, **SMALL), ratio, advantages)[2:]
    assert before == pytest.approx(1 / 2.5)
    assert after == pytest.approx(3 / 4.5)


@pytest.mark.parametrize(
    ("contribution", "reached", "c_high", "missed"),
    [
        # P = 1, 2, 3 and N = 1.5: shares 0.4, 0.571, 0.667; nets 2, 4, 2; ratios 0.667, 1.333, 2.
        ("share", 3 / 4.5, 3.0, 0.67),
        ("net", 4.0, 2.0, 4.01),
        ("ratio", 1.99, 3.0, 2.01),
    ],
)
def test_contributions_by_hand(contribution, reached, c_high, missed):
    for target, expected in ((reached, [0.25, c_high]), (missed, [0.75, 3.0])):
        method = Bapo(contribution=contribution, target=target, **SMALL)
        assert decided(method, [4.0, 0.125, 1.0], [1.0, -2.0, -1.0])[:2] == expected


@pytest.mark.parametrize(("contribution", "target", "c_high"), [("ratio", 1.0, 2.0), ("share", 0.5, 1.0)])
def test_epsilon_is_added_to_the_negatives_of_ratio_only(contribution, target, c_high):
    # P = min(4, c_high), N = 1: with epsilon = 1, P / 2 reaches 1 at c_high = 2; the shares 1/2, 2/3 reach 0.5 at 1.
    method = Bapo(contribution=contribution, target=target, epsilon=1.0, **SMALL)
    assert decided(method, [4.0, 1.0], [1.0, -1.0])[:2] == [0.25, c_high]


def test_counted_gradient_can_stop_c_low_strictly_between():
    # Negatives at 0.3 and 0.6 leave one by one as c_low passes them: N = 6.9, then 3.9 from 0.5 on, then 3 at 0.75.
    ratio, advantages = [1.0, 1.0, 0.3, 0.6], [3.0, -3.0, -10.0, -1.5]
    target = 3 / (3 + 3.9) - 0.01
    assert decided(Bapo(counted="gradient", target=target, **SMALL), ratio, advantages)[0] == 0.5
    assert decided(Bapo(target=target, **SMALL), ratio, advantages)[0] == 0.75


def test_counted_gradient_drops_positive_tokens_above_c_high():
    # P = 1 until c_high reaches 2.5, then 3.5.
    method = Bapo(counted="gradient", target=0.5, **SMALL)
    _, c_high, before, after = decided(method, [1.0, 2.5, 1.0], [1.0, 1.0, -2.0])
    assert c_high == 3.0
    assert before == pytest.approx(1 / 3)
    assert after == pytest.approx(3.5 / 5.5)


@given(
    ratio=st.lists(st.floats(0.05, 5), min_size=1, max_size=12),
    signs=st.lists(st.floats(-2, 2), min_size=12, max_size=12),
    target=st.floats(0.01, 0.99),
    contribution=st.sampled_from(["share", "net", "ratio"]),
    first=st.sampled_from(["upper", "lower"]),
)
@settings(deadline=None)
def test_under_the_surrogate_c_low_ends_at_its_start_or_its_stop(ratio, signs, target, contribution, first):
    # For net only with a target below 1: there P < N while it is missed, and |P - N| grows with N.
    method = Bapo(target=target, contribution=contribution, first=first, weight="none")
    assert decided(method, ratio, signs[: len(ratio)])[0] in (0.6, 0.9)


@FLOATS
@pytest.mark.parametrize("index", range(37))
def test_positive_ratio_equal_to_an_upper_candidate_is_not_clipped_away(dtype, index):
    # Only with the token at the candidate is P / (P + N) above one half.
    method = Bapo(counted="gradient", weight="none", target=0.4)
    candidate = method._candidates("upper").to(dtype)[index].item()
    _, c_high, _, _ = decided(method, [candidate, 1.0], [1.0, -1.0], dtype=dtype)
    assert c_high == pytest.approx(candidate, rel=1e-6)


@FLOATS
@pytest.mark.parametrize("index", range(16))
def test_negative_ratio_equal_to_a_lower_candidate_is_not_clipped_away(dtype, index):
    # The negative token goes only when c_low passes it, at the next candidate; the last one keeps it.
    method = Bapo(counted="gradient", weight="none", first="lower", target=0.9)
    lower = method._candidates("lower")
    c_low, c_high, _, share = decided(method, [1.0, lower.to(dtype)[index].item()], [1.0, -1.0], dtype=dtype)
    assert c_low == lower[min(index + 1, 15)].item()
    assert (c_high, share) == ((1.2, 1.0) if index < 15 else (3.0, pytest.approx(1 / 1.9)))


@pytest.mark.parametrize(("first", "expected"), [("upper", [0.25, 3.0]), ("lower", [0.5, 1.0])])
def test_order_of_the_search(first, expected):
    # Gradient counting: either bound alone can reach the target, so the first one to move is the one that moves.
    method = Bapo(first=first, counted="gradient", target=0.5, **SMALL)
    assert decided(method, [1.0, 2.5, 0.3, 1.0], [1.0, 1.0, -5.0, -1.0])[:2] == expected


@pytest.mark.parametrize("first", ["upper", "lower"])
def test_upper_range_is_searched_when_the_lower_one_has_no_room(first):
    method = Bapo(first=first, **{**SMALL, "lower_stop": 0.25, "target": 0.5})
    assert decided(method, [4.0, 1.0], [1.0, -1.5])[:2] == [0.25, 2.0]


@pytest.mark.parametrize(("weight", "share"), [("old", 0.2), ("rollout", 0.8), ("none", 0.5)])
def test_weights(weight, share):
    method, low, high = Bapo(weight=weight, target=0.01), math.log(0.2), math.log(0.8)
    found = decided(method, [1.0, 1.0], [1.0, -1.0], old_log_prob=[low, high], rollout_log_prob=[high, low])
    assert found[2] == pytest.approx(share)
    assert method.asks_for == (("rollout_log_prob",) if weight == "rollout" else ())


@pytest.mark.parametrize("contribution", ["share", "net", "ratio"])
@pytest.mark.parametrize("counted", ["surrogate", "gradient"])
@pytest.mark.parametrize("first", ["upper", "lower"])
class TestOneSided:
    def test_no_negatives_satisfy_any_target(self, contribution, counted, first):
        target = 1.0 if contribution == "share" else 10.0
        method = Bapo(contribution=contribution, counted=counted, first=first, target=target)
        assert decided(method, [1.0, 0.1, 9.0], [1.0, 1.0, 1.0])[:2] == [0.6, 1.2]

    def test_no_positives_move_both_bounds_to_their_ends(self, contribution, counted, first):
        method = Bapo(contribution=contribution, counted=counted, first=first)
        assert decided(method, [1.0, 2.0], [-1.0, -1.0]) == [0.9, 3.0, 0.0, 0.0]

    @FLOATS
    @pytest.mark.parametrize(("advantages", "mask"), [([-1.0, 1.0], [False, False]), ([0.0, 0.0], [True, True])])
    def test_no_tokens_leave_both_bounds_at_their_starts(self, contribution, counted, first, dtype, advantages, mask):
        method = Bapo(contribution=contribution, counted=counted, first=first)
        assert decided(method, [1.0, 2.0], advantages, mask=mask, dtype=dtype) == [0.6, 1.2, 0.0, 0.0]


def test_bounds_and_metrics():
    method, t = Bapo(**SMALL), tokens_at(row(1.0), row(1.0))
    decision = torch.tensor([0.5, 2.0, 0.25, 0.75], dtype=torch.float64)
    assert method.bounds(t, decision) == (0.5, 2.0)
    metrics = {key: value.item() for key, value in method.metrics(method.statistics(t), decision).items()}
    assert metrics == {"c_low": 0.5, "c_high": 2.0, "positive_share_before": 0.25, "positive_share_after": 0.75}


def test_statistics_by_hand():
    ratio = torch.tensor([[1.0, 2.5, 9.0, 0.5, 0.1, 1e6]])
    advantages = torch.tensor([[1.0, 2.0, 3.0, -4.0, -5.0, -1.0]])
    statistics = Bapo(**SMALL).statistics(tokens_at(ratio, advantages))
    # Weights, then values. The value of the positive 9.0, above the last candidate, is never needed.
    expected = [1, 0, 2, 3, 1, 0, 5, 0, 5, 0, 4, 1, 0.5, 0, 2, 1e6]
    assert_close(statistics, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0)


@FLOATS
def test_advantages_of_zero_count_nothing(dtype):
    t = tokens_at(row(0.5, 1.0, 9.0, dtype=dtype), torch.zeros(1, 3, dtype=dtype))
    assert not Bapo().statistics(t).any()


def test_the_order_of_tokens_does_not_matter_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages, old_log_prob = torch.randn(3, 4, 300, dtype=torch.float64, generator=generator)
    t = tokens_at(log_ratio.exp(), advantages, old_log_prob=-old_log_prob.abs())
    order = torch.randperm(300, generator=generator)
    one, other = (Bapo().statistics(u) for u in (t, type(t)(*(None if part is None else part[:, order] for part in t))))
    assert torch.equal(one, other)


def test_sequences_count_the_same_in_any_micro_batch_to_the_last_bit():
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages, old_log_prob = torch.randn(3, 4, 300, dtype=torch.float64, generator=generator)
    t = tokens_at(log_ratio.exp(), advantages, old_log_prob=-old_log_prob.abs())
    rows = [type(t)(*(None if part is None else part[k : k + 1] for part in t)) for k in range(4)]
    assert torch.equal(sum(Bapo().statistics(alone) for alone in rows), Bapo().statistics(t))


def test_a_huge_ratio_leaves_the_sums_of_the_other_sign_as_they_are():
    ratio, advantages = [1.1, 1.3, 0.7, 0.8], [0.3, 0.7, -0.3, -0.7]
    one, other = (
        Bapo().statistics(tokens_at(row(*ratio, *more), row(*advantages, *[-0.9] * len(more)))) for more in ([], [1e8])
    )
    # All but the 2 * 17 sums of negative tokens. Those are counted in larger units, still tiny parts of their total.
    assert torch.equal(other[:-34], one[:-34])
    assert_close(other[-34:], one[-34:] + torch.tensor([0] * 16 + [0.9] + [0] * 16 + [0.9e8]), rtol=0, atol=1e-2)
