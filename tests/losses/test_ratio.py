"""The ratio stays finite and follows verl's clamp.

Covers dtypes, saturation and the clamp's edges. Does not cover what a loss does with the ratio.
"""

import math

import pytest
import torch

from verl_clipx.losses.ratio import compute_dtype, followed_ratio, importance_ratio, saturation_limit


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_compute_dtype(dtype, expected):
    assert compute_dtype(dtype) == expected
    log_ratio, ratio = importance_ratio(torch.zeros(1, 2, dtype=dtype), torch.zeros(1, 2, dtype=dtype), 20.0)
    assert log_ratio.dtype == ratio.dtype == expected


def test_ratio_of_probabilities():
    log_prob = torch.tensor([[0.5, 0.1, 0.9]], dtype=torch.float64).log()
    old_log_prob = torch.tensor([[0.25, 0.2, 0.9]], dtype=torch.float64).log()
    _, ratio = importance_ratio(log_prob, old_log_prob, None)
    torch.testing.assert_close(ratio, torch.tensor([[2.0, 0.5, 1.0]], dtype=torch.float64))


def test_log_probs_are_subtracted_in_the_compute_dtype():
    # In bfloat16, -8 - 0.0117 would round to -8.
    log_prob = torch.tensor([[-8.0]], dtype=torch.bfloat16)
    old_log_prob = torch.tensor([[0.01171875]], dtype=torch.bfloat16)
    log_ratio, _ = importance_ratio(log_prob, old_log_prob, None)
    assert log_ratio.item() == -8.01171875


@pytest.mark.parametrize("clamp", [20.0, 5.0])
def test_log_ratio_is_clamped(clamp):
    log_ratio, ratio = importance_ratio(torch.tensor([[30.0, -30.0, 1.0]]), torch.zeros(1, 3), clamp)
    assert log_ratio.tolist() == [[clamp, -clamp, 1.0]]
    torch.testing.assert_close(ratio, torch.tensor([[math.exp(clamp), math.exp(-clamp), math.e]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clamp", [None, 20.0, 1e6])
@pytest.mark.parametrize("extreme", [1e4, math.inf])
def test_ratio_and_its_square_are_finite_and_positive(dtype, clamp, extreme):
    log_prob = torch.tensor([[extreme, -extreme, 0.0]]).to(dtype)
    log_ratio, ratio = importance_ratio(log_prob, torch.zeros(1, 3, dtype=dtype), clamp)
    for value in (log_ratio, ratio, ratio.square(), ratio.reciprocal()):
        assert value.isfinite().all()
    assert (ratio.square() >= torch.finfo(ratio.dtype).tiny).all()


def test_no_gradient_flows_through_the_ratio():
    log_prob = torch.zeros(1, 1, requires_grad=True)
    assert not any(result.requires_grad for result in importance_ratio(log_prob, torch.zeros(1, 1), 20.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_followed_ratio_is_the_derivative_of_the_clamped_ratio(dtype):
    below, above = (torch.nextafter(torch.tensor(20.0), torch.tensor(end)).item() for end in (0.0, 100.0))
    values = [0.0, 1.0, below, 20.0, above, 40.0, -below, -20.0, -above, -40.0]
    log_prob = torch.tensor([values], dtype=dtype, requires_grad=True)
    (expected,) = torch.autograd.grad(log_prob.clamp(-20.0, 20.0).exp().sum(), log_prob)
    _, ratio = importance_ratio(log_prob, torch.zeros_like(log_prob), None)
    torch.testing.assert_close(followed_ratio(ratio, 20.0), expected)
    assert (followed_ratio(ratio, 20.0) == 0).tolist() == [[False] * 4 + [True] * 2 + [False] * 2 + [True] * 2]


@pytest.mark.parametrize("clamp", [None, 1e4])
def test_without_a_clamp_narrower_than_saturation_the_ratio_is_followed_everywhere(clamp):
    _, ratio = importance_ratio(torch.tensor([[1e4, -1e4, 30.0]]), torch.zeros(1, 3), None)
    assert torch.equal(followed_ratio(ratio, clamp), ratio)


def test_saturation_limits_are_the_documented_ones():
    assert saturation_limit(torch.float32) == pytest.approx(42.6, abs=0.05)
    assert saturation_limit(torch.float64) == pytest.approx(340.7, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_ratio_exactly_on_any_clamp_is_followed(dtype):
    # exp() rounds differently for tensors and for Python's floats, so an exact comparison would miss some of these.
    for tenths in range(1, 400):
        clamp = torch.tensor(tenths / 10, dtype=dtype).item()
        log_ratio = torch.tensor([[clamp, -clamp]], dtype=dtype)
        assert (followed_ratio(log_ratio.exp(), clamp) != 0).all(), clamp
