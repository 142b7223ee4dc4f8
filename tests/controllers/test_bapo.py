"""BAPO's candidates, contributions and search by hand.

Does not cover the golden vectors (tests/training/test_golden.py), the search against a plain loop
(test_bapo_search.py), additivity or host syncs (test_contract.py).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from verl_clipx.controllers.bapo import BapoController, candidate_bounds, candidate_count


def _decide(controller, ratio, advantages, *, mask=None, old_log_prob=None, rollout_log_prob=None, dtype=torch.float64):
    ratio = torch.tensor([ratio], dtype=dtype)
    old_log_prob = torch.zeros_like(ratio) if old_log_prob is None else torch.tensor([old_log_prob], dtype=dtype)
    statistics = controller.statistics(
        ratio=ratio,
        advantages=torch.tensor([advantages], dtype=dtype),
        mask=torch.ones_like(ratio, dtype=torch.bool) if mask is None else torch.tensor([mask]),
        log_prob=old_log_prob,
        old_log_prob=old_log_prob,
        rollout_log_prob=None if rollout_log_prob is None else torch.tensor([rollout_log_prob], dtype=dtype),
    )
    return controller.decide(statistics).tolist()


def test_published_ranges_reach_their_ends():
    lower, upper = candidate_bounds(0.6, 0.9, 0.02, "full"), candidate_bounds(1.2, 3.0, 0.05, "full")
    assert lower.tolist() == [round(0.6 + 0.02 * k, 2) for k in range(16)]
    assert upper.tolist() == [round(1.2 + 0.05 * k, 2) for k in range(37)]
    assert lower[-1] == 0.9
    assert upper[-1] == 3.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1.2, 2.0, 0.3, "full"), [1.2, 1.5, 1.8]),
        ((1.2, 2.0, 0.3, "clipped"), [1.2, 1.5, 1.8, 2.0]),
        ((1.2, 1.8, 0.3, "clipped"), [1.2, 1.5, 1.8]),
        ((1.2, 1.3, 0.3, "full"), [1.2]),
        ((1.2, 1.3, 0.3, "clipped"), [1.2, 1.3]),
        ((1.2, 2.0, 0.0, "clipped"), [1.2]),
        ((0.8, 0.8, 0.1, "clipped"), [0.8]),
        ((0.8, 0.8, 0.0, "full"), [0.8]),
    ],
)
def test_candidates_by_hand(arguments, expected):
    assert candidate_bounds(*arguments).tolist() == expected
    assert candidate_count(*arguments) == len(expected)


@given(
    start=st.integers(1, 400), steps=st.integers(0, 60), step=st.integers(1, 50), decimals=st.sampled_from([100, 1000])
)
@settings(deadline=None)
def test_whole_numbers_of_decimal_steps_reach_the_stop_whatever_last_step_is(start, steps, step, decimals):
    stop = (start + steps * step) / decimals
    for last_step in ("full", "clipped"):
        candidates = candidate_bounds(start / decimals, stop, step / decimals, last_step)
        assert candidates.tolist() == [(start + k * step) / decimals for k in range(steps + 1)]


# Upper candidates 1, 2, 3 and lower ones 0.25, 0.5, 0.75 in the tests by hand.
SMALL = {"lower_start": 0.25, "lower_stop": 0.75, "lower_step": 0.25, "upper_start": 1.0, "upper_stop": 3.0}
SMALL |= {"upper_step": 1.0, "weight": "none"}


def test_surrogate_share_by_hand():
    # P = min(r, c_high), N = 2 max(0.125, c_low) + 1: at 1, 2, 3 with c_low = 0.25, P / (P + N) = 1/2.5, 2/3.5, 3/4.5.
    ratio, advantages = [4.0, 0.125, 1.0], [1.0, -2.0, -1.0]
    assert _decide(BapoController(target=0.4, **SMALL), ratio, advantages)[:2] == [0.25, 1.0]
    assert _decide(BapoController(target=0.5, **SMALL), ratio, advantages)[:2] == [0.25, 2.0]
    before, after = _decide(BapoController(target=0.6, **SMALL), ratio, advantages)[2:]
    assert before == pytest.approx(1 / 2.5)
    assert after == pytest.approx(3 / 4.5)
    assert _decide(BapoController(target=0.7, **SMALL), ratio, advantages)[:2] == [0.75, 3.0]


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
    ratio, advantages = [4.0, 0.125, 1.0], [1.0, -2.0, -1.0]
    found = _decide(BapoController(contribution=contribution, target=reached, **SMALL), ratio, advantages)
    assert found[:2] == [0.25, c_high]
    found = _decide(BapoController(contribution=contribution, target=missed, **SMALL), ratio, advantages)
    assert found[:2] == [0.75, 3.0]


def test_epsilon_is_added_to_the_negatives_of_ratio_only():
    # P = min(4, c_high), N = 1: with epsilon = 1, P / 2 reaches 1 at c_high = 2; the shares 1/2, 2/3 reach 0.5 at 1.
    ratio, advantages = [4.0, 1.0], [1.0, -1.0]
    found = _decide(BapoController(contribution="ratio", target=1.0, epsilon=1.0, **SMALL), ratio, advantages)
    assert found[:2] == [0.25, 2.0]
    found = _decide(BapoController(contribution="share", target=0.5, epsilon=1.0, **SMALL), ratio, advantages)
    assert found[:2] == [0.25, 1.0]


def test_counted_gradient_can_stop_c_low_strictly_between():
    # Negatives at 0.3 and 0.6 leave one by one as c_low passes them: N = 6.9, then 3.9 from 0.5 on, then 3 at 0.75.
    ratio, advantages = [1.0, 1.0, 0.3, 0.6], [3.0, -3.0, -10.0, -1.5]
    share_at_half = 3 / (3 + 3.9)
    controller = BapoController(counted="gradient", target=share_at_half - 0.01, **SMALL)
    assert _decide(controller, ratio, advantages)[0] == 0.5
    assert _decide(BapoController(target=share_at_half - 0.01, **SMALL), ratio, advantages)[0] == 0.75


def test_counted_gradient_drops_positive_tokens_above_c_high():
    # P = 1 until c_high reaches 2.5, then 3.5.
    ratio, advantages = [1.0, 2.5, 1.0], [1.0, 1.0, -2.0]
    controller = BapoController(counted="gradient", target=0.5, **SMALL)
    _, c_high, before, after = _decide(controller, ratio, advantages)
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
    controller = BapoController(target=target, contribution=contribution, first=first, weight="none")
    assert _decide(controller, ratio, signs[: len(ratio)])[0] in (0.6, 0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", range(37))
def test_positive_ratio_equal_to_an_upper_candidate_is_not_clipped_away(dtype, index):
    candidate = candidate_bounds(1.2, 3.0, 0.05, "full").to(dtype)[index].item()
    # Only with the token at the candidate is P / (P + N) above one half.
    controller = BapoController(counted="gradient", weight="none", target=0.4)
    _, c_high, _, _ = _decide(controller, [candidate, 1.0], [1.0, -1.0], dtype=dtype)
    assert c_high == pytest.approx(candidate, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("index", range(15))
def test_negative_ratio_equal_to_a_lower_candidate_is_not_clipped_away(dtype, index):
    candidates = candidate_bounds(0.6, 0.9, 0.02, "full")
    # The negative token goes only when c_low passes it, at the next candidate.
    controller = BapoController(counted="gradient", weight="none", first="lower", target=0.9)
    at_candidate = candidates.to(dtype)[index].item()
    c_low, _, _, share = _decide(controller, [1.0, at_candidate], [1.0, -1.0], dtype=dtype)
    assert c_low == candidates[index + 1].item()
    assert share == 1.0


def test_last_lower_candidate_itself_keeps_its_token():
    controller = BapoController(counted="gradient", weight="none", first="lower", target=0.9)
    c_low, c_high, _, share = _decide(controller, [1.0, 0.9], [1.0, -1.0])
    assert (c_low, c_high) == (0.9, 3.0)
    assert share == pytest.approx(1 / 1.9)


def test_order_of_the_search():
    # Gradient counting: either bound alone can reach the target, so the first one to move is the one that moves.
    ratio, advantages = [1.0, 2.5, 0.3, 1.0], [1.0, 1.0, -5.0, -1.0]
    options = {"counted": "gradient", "target": 0.5, **SMALL}
    assert _decide(BapoController(first="upper", **options), ratio, advantages)[:2] == [0.25, 3.0]
    assert _decide(BapoController(first="lower", **options), ratio, advantages)[:2] == [0.5, 1.0]


def test_upper_range_is_searched_when_the_lower_one_has_no_room():
    options = {**SMALL, "lower_stop": 0.25, "target": 0.5}
    for first in ("upper", "lower"):
        assert _decide(BapoController(first=first, **options), [4.0, 1.0], [1.0, -1.5])[:2] == [0.25, 2.0]


def test_weights():
    # Old probabilities 0.2 and 0.8, rollout probabilities 0.8 and 0.2: shares 0.2, 0.8 and, unweighted, 0.5.
    probability = torch.tensor([0.2, 0.8], dtype=torch.float64).log().tolist()
    for weight, share in (("old", 0.2), ("rollout", 0.8), ("none", 0.5)):
        found = _decide(
            BapoController(weight=weight, target=0.01),
            [1.0, 1.0],
            [1.0, -1.0],
            old_log_prob=probability,
            rollout_log_prob=probability[::-1],
        )
        assert found[2] == pytest.approx(share)


def test_rollout_weight_without_rollout_log_probs_says_what_to_do():
    with pytest.raises(ValueError, match=r"weight='rollout'.*calculate_log_probs=True.*weight='old'"):
        _decide(BapoController(weight="rollout"), [1.0], [1.0])


@pytest.mark.parametrize("contribution", ["share", "net", "ratio"])
@pytest.mark.parametrize("counted", ["surrogate", "gradient"])
@pytest.mark.parametrize("first", ["upper", "lower"])
class TestOneSided:
    def test_no_negatives_satisfy_any_target(self, contribution, counted, first):
        controller = BapoController(contribution=contribution, counted=counted, first=first, target=50.0)
        assert _decide(controller, [1.0, 0.1, 9.0], [1.0, 1.0, 1.0])[:2] == [0.6, 1.2]

    def test_no_positives_move_both_bounds_to_their_ends(self, contribution, counted, first):
        controller = BapoController(contribution=contribution, counted=counted, first=first)
        assert _decide(controller, [1.0, 2.0], [-1.0, -1.0]) == [0.9, 3.0, 0.0, 0.0]

    def test_no_tokens_leave_both_bounds_at_their_starts(self, contribution, counted, first):
        controller = BapoController(contribution=contribution, counted=counted, first=first)
        assert _decide(controller, [1.0, 2.0], [-1.0, 1.0], mask=[False, False]) == [0.6, 1.2, 0.0, 0.0]

    def test_zero_advantages_are_no_tokens(self, contribution, counted, first):
        controller = BapoController(contribution=contribution, counted=counted, first=first)
        assert _decide(controller, [1.0, 2.0], [0.0, 0.0]) == [0.6, 1.2, 0.0, 0.0]


def test_token_bounds_and_metrics():
    controller = BapoController(target=0.5, **SMALL)
    statistics = torch.zeros(controller.statistics_size, dtype=torch.float64)
    decision = torch.tensor([0.5, 2.0, 0.25, 0.75], dtype=torch.float64)
    tensor = torch.zeros(2, 3)
    low, high = controller.token_bounds(decision, log_prob=tensor, old_log_prob=tensor, dtype=torch.float32)
    assert (low.dtype, low.item(), high.item()) == (torch.float32, 0.5, 2.0)
    assert (tensor.clamp(min=low) == 0.5).all()
    metrics = {key: value.item() for key, value in controller.metrics(statistics, decision).items()}
    assert metrics == {"c_low": 0.5, "c_high": 2.0, "positive_share_before": 0.25, "positive_share_after": 0.75}


def test_statistics_hold_two_sums_per_interval():
    # 16 lower and 37 upper candidates make 17 and 38 intervals.
    assert BapoController().statistics_size == 2 * (17 + 38)


def test_statistics_by_hand():
    statistics = BapoController(target=0.5, **SMALL).statistics(
        ratio=torch.tensor([[1.0, 2.5, 9.0, 0.5, 0.1]]),
        advantages=torch.tensor([[1.0, 2.0, 3.0, -4.0, -5.0]]),
        mask=torch.ones(1, 5, dtype=torch.bool),
        log_prob=torch.zeros(1, 5),
        old_log_prob=torch.zeros(1, 5),
    )
    expected = [1, 0, 2, 3, 1, 0, 5, 27, 5, 0, 4, 0, 0.5, 0, 2, 0]
    assert_close(statistics, torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("contribution", "sum"),
        ("counted", "value"),
        ("weight", "current"),
        ("first", "both"),
        ("last_step", "partial"),
        ("lower_step", -0.1),
        ("upper_stop", 1.0),
    ],
)
def test_what_would_make_the_mathematics_wrong_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"{key}={value!r}"):
        BapoController(**{key: value})


def test_a_lower_candidate_below_0_is_below_every_ratio():
    tokens = {
        "ratio": torch.tensor([[0.05, 0.5, 0.05]], dtype=torch.float64),
        "advantages": torch.tensor([[-1.0, -1.0, 1.0]], dtype=torch.float64),
        "mask": torch.ones(1, 3, dtype=torch.bool),
        "log_prob": torch.zeros(1, 3, dtype=torch.float64),
        "old_log_prob": torch.zeros(1, 3, dtype=torch.float64),
    }
    controller = BapoController(lower_start=-0.2, lower_stop=0.1, lower_step=0.1, upper_step=0.0)
    statistics = controller.statistics(**tokens)
    # Weights on either side of c_high; then those between the lower candidates -0.2, -0.1, 0 and 0.1.
    assert statistics[:2].tolist() == [1, 0]
    assert statistics[4:9].tolist() == [0, 0, 0, 1, 1]
