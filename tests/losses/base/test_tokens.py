"""What a method sees: the ratio stays finite and follows verl's clamp, and nothing outside the mask is left."""

import math

import pytest
import torch

from verl_clipx.losses.base.tokens import OPTIONAL, Inputs, compute_dtype, prepare_tokens


def make_tokens(log_prob, clamp=20.0, **inputs):
    """Return what a method sees: old_log_prob 0, advantages 1 and all in the mask, unless `inputs` says otherwise."""
    defaults = {
        "old_log_prob": torch.zeros_like(log_prob),
        "advantages": torch.ones_like(log_prob),
        "mask": torch.ones_like(log_prob, dtype=torch.bool),
    }
    return prepare_tokens(Inputs(log_prob, **defaults | inputs), clamp)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_everything_has_the_compute_dtype(dtype):
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert compute_dtype(dtype) == expected
    values = torch.zeros(1, 2, dtype=dtype)
    t = make_tokens(values, advantages=torch.ones(1, 2, dtype=torch.bfloat16), rollout_log_prob=values, entropy=values)
    floats = [tensor for tensor in t if tensor is not None and tensor.dtype != torch.bool]
    assert [tensor.dtype for tensor in floats] == [expected] * 8


def test_the_ratio_is_that_of_the_probabilities():
    log_prob = torch.tensor([[0.5, 0.1, 0.9]], dtype=torch.float64).log()
    old_log_prob = torch.tensor([[0.25, 0.2, 0.9]], dtype=torch.float64).log()
    t = make_tokens(log_prob, old_log_prob=old_log_prob, clamp=None)
    torch.testing.assert_close(t.ratio, torch.tensor([[2.0, 0.5, 1.0]], dtype=torch.float64))
    assert t.free_ratio is t.ratio
    assert t.unclamped.all()


def test_log_probabilities_are_subtracted_in_the_compute_dtype():
    # In bfloat16, -8 - 0.0117 would round to -8.
    log_prob = torch.tensor([[-8.0]], dtype=torch.bfloat16)
    old_log_prob = torch.tensor([[0.01171875]], dtype=torch.bfloat16)
    assert make_tokens(log_prob, old_log_prob=old_log_prob).log_ratio.item() == -8.01171875


@pytest.mark.parametrize("clamp", [20.0, 5.0])
def test_the_log_ratio_is_clamped(clamp):
    t = make_tokens(torch.tensor([[30.0, -30.0, 1.0]]), clamp=clamp)
    assert t.log_ratio.tolist() == [[clamp, -clamp, 1.0]]
    assert t.unclamped.tolist() == [[False, False, True]]
    torch.testing.assert_close(t.ratio, torch.tensor([[math.exp(clamp), math.exp(-clamp), math.e]]))
    torch.testing.assert_close(t.free_ratio, torch.tensor([[math.exp(30.0), math.exp(-30.0), math.e]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clamp", [None, 20.0, 40.0])
@pytest.mark.parametrize("extreme", [1e4, math.inf])
def test_ratio_and_its_square_are_finite_and_positive(dtype, clamp, extreme):
    t = make_tokens(torch.tensor([[extreme, -extreme, 0.0]]).to(dtype), clamp=clamp)
    for ratio in (t.ratio, t.free_ratio):
        for value in (t.log_ratio, ratio, ratio.square(), ratio.reciprocal()):
            assert value.isfinite().all()
        assert (ratio.square() >= torch.finfo(ratio.dtype).tiny).all()


def test_no_gradient_flows_through_the_tokens():
    t = make_tokens(
        torch.zeros(1, 1, requires_grad=True),
        old_log_prob=torch.zeros(1, 1, requires_grad=True),
        advantages=torch.zeros(1, 1, requires_grad=True),
        entropy=torch.zeros(1, 1, requires_grad=True),
    )
    assert not [tensor for tensor in t if tensor is not None and tensor.requires_grad]


def test_what_is_not_given_is_none():
    group = torch.tensor([2**62])
    t = make_tokens(torch.zeros(1, 1), group=group)
    assert t.group is group
    assert t.rollout_log_prob is None
    without_optional = make_tokens(torch.zeros(2, 1))
    assert [getattr(without_optional, name) for name in OPTIONAL] == [None, None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_unclamped_ratio_is_the_derivative_of_the_clamped_ratio(dtype):
    below = torch.nextafter(torch.tensor(20.0), torch.tensor(0.0)).item()
    above = torch.nextafter(torch.tensor(20.0), torch.tensor(100.0)).item()
    values = [0.0, 1.0, below, 20.0, above, 40.0, -below, -20.0, -above, -40.0]
    log_prob = torch.tensor([values], dtype=dtype, requires_grad=True)
    (expected,) = torch.autograd.grad(log_prob.clamp(-20.0, 20.0).exp().sum(), log_prob)
    t = make_tokens(log_prob)
    for clamp in torch.arange(0.1, 40.0, 0.1, dtype=dtype).tolist():
        assert make_tokens(torch.tensor([[clamp, -clamp]], dtype=dtype), clamp=clamp).unclamped.all(), clamp
    torch.testing.assert_close(torch.where(t.unclamped, t.free_ratio, 0.0), expected)
    assert t.unclamped.tolist() == [[True] * 4 + [False] * 2 + [True] * 2 + [False] * 2]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_outside_the_mask_everything_is_as_on_policy(junk):
    values = torch.tensor([[-1.0, junk]])
    names = ("old_log_prob", "advantages", "rollout_log_prob", "entropy")
    t = make_tokens(values, **dict.fromkeys(names, values), mask=torch.tensor([[True, False]]))
    outside = {name: getattr(t, name)[0, 1].item() for name in ("log_prob", "log_ratio", *names)}
    assert outside == dict.fromkeys(outside, 0.0)
    assert t.ratio[0, 1] == t.free_ratio[0, 1] == 1.0 and t.unclamped[0, 1]
    assert all(getattr(t, name)[0, 0] == -1.0 for name in ("log_prob", *names))


def test_the_mean_over_a_sequence_by_hand():
    t = make_tokens(torch.zeros(3, 3), mask=torch.tensor([[1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool))
    values = torch.tensor([[1.0, 2.0, math.nan], [math.inf, 5.0, 3.0], [7.0, 7.0, 7.0]])
    assert t.sequence_mean(values).tolist() == [[1.5], [3.0], [0.0]]
