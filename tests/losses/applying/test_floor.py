"""The floor's sums of tokens whose ratio is 1 but for arithmetic. Covers: a bfloat16 policy by hand, bins, tokens that
don't count, float32's own rounding, any split. Not covered: the worker (tests/training/worker/test_floor.py).
"""

import itertools
import math

import pytest
import torch

from verl_clipx.losses.applying.floor import floor_bins, floor_sums
from verl_clipx.losses.base.shared_metrics import FLOOR
from verl_clipx.losses.base.tokens import Inputs


def add_up_floor(log_prob, old_log_prob, mask=None, counted=None):
    """Return the floor's sums over all tokens and of each bin, by their keys."""
    log_prob = torch.as_tensor(log_prob)
    inputs = Inputs(
        log_prob=log_prob,
        old_log_prob=torch.as_tensor(old_log_prob),
        advantages=torch.ones_like(log_prob),
        mask=torch.ones_like(log_prob, dtype=torch.bool) if mask is None else torch.tensor(mask),
        counted=None if counted is None else torch.tensor(counted),
    )
    sums = floor_sums(inputs, FLOOR) | floor_bins(inputs, FLOOR)
    return {name: float(value) for name, value in sums.items()}


def test_a_bfloat16_policy_whose_two_passes_differ_by_hand():
    # Two passes whose logits round to neighbouring bfloat16 numbers: 8 significant bits, so steps of 2^-5 at 6.
    old_logits = torch.tensor([[0.0, 6.0]], dtype=torch.bfloat16)
    new_logits = torch.tensor([[0.0, 6.03125]], dtype=torch.bfloat16)
    old = old_logits.float().log_softmax(-1)[:, :1]
    new = new_logits.float().log_softmax(-1)[:, :1]
    log_ratio_by_hand = math.log1p(math.exp(6.0)) - math.log1p(math.exp(6.03125))
    assert log_ratio_by_hand == pytest.approx(-0.031175, abs=1e-5)
    sums = add_up_floor(new, old)
    assert sums["clipx/floor/log_ratio"] == pytest.approx(-log_ratio_by_hand, rel=1e-4)
    assert sums["clipx/floor/tokens/bin_0"] == 1
    assert sums["clipx/floor/log_ratio_sum/bin_0"] == pytest.approx(log_ratio_by_hand, rel=1e-4)
    assert sums["clipx/floor/squared_sum/bin_0"] == pytest.approx(log_ratio_by_hand**2, rel=1e-4)


def test_tokens_are_in_the_bin_of_their_old_probability_and_the_last_has_its_upper_edge():
    old = torch.tensor([[0.05, 0.25, 0.45, 0.65, 0.85, 1.0, 0.7]]).log()
    log_ratio = torch.tensor([[0.1, -0.2, 0.3, -0.4, 0.5, 0.0, 7.0]])
    sums = add_up_floor(old + log_ratio, old, mask=[[True] * 6 + [False]])
    assert [sums[f"clipx/floor/tokens/bin_{k}"] for k in range(5)] == [1, 1, 1, 1, 2]
    log_ratios = [sums[f"clipx/floor/log_ratio_sum/bin_{k}"] for k in range(5)]
    assert log_ratios == pytest.approx([0.1, -0.2, 0.3, -0.4, 0.5], rel=1e-5)
    squares = [sums[f"clipx/floor/squared_sum/bin_{k}"] for k in range(5)]
    assert squares == pytest.approx([0.01, 0.04, 0.09, 0.16, 0.25], rel=1e-5)
    assert sums["clipx/floor/log_ratio"] == pytest.approx(1.5, rel=1e-5)


def test_tokens_outside_mask_and_pass_count_nothing_whatever_they_hold():
    old = [[-1.0, -1.0, math.nan]]
    sums = add_up_floor([[-1.5, -1.25, math.nan]], old, mask=[[True, True, False]], counted=[[True, False, True]])
    assert sums["clipx/floor/log_ratio"] == 0.5
    assert sum(sums[f"clipx/floor/tokens/bin_{k}"] for k in range(5)) == 1


def test_float32_of_two_orders_of_summation_is_below_a_millionth():
    logits = torch.randn(1, 400, 64, generator=torch.Generator().manual_seed(0))
    permutation = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    token = torch.randint(64, (1, 400, 1), generator=torch.Generator().manual_seed(2))
    old = logits.log_softmax(-1).gather(-1, token)[..., 0]
    permuted_token = permutation.argsort()[token]
    new = logits[..., permutation].log_softmax(-1).gather(-1, permuted_token)[..., 0]
    assert add_up_floor(new, old)["clipx/floor/log_ratio"] / 400 <= 1e-6


@pytest.mark.parametrize("cuts", [(0, 3, 9, 17, 18, 32), (0, 16, 32)])
def test_the_sums_of_five_micro_batches_or_two_ranks_are_those_of_all_tokens(cuts):
    old = -4 * torch.rand(32, 7, generator=torch.Generator().manual_seed(0))
    new = old + 0.02 * torch.randn(32, 7, generator=torch.Generator().manual_seed(1))
    whole = add_up_floor(new, old)
    parts = [add_up_floor(new[start:end], old[start:end]) for start, end in itertools.pairwise(cuts)]
    for name, value in whole.items():
        assert sum(part[name] for part in parts) == pytest.approx(value, rel=1e-12)
