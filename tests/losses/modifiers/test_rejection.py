"""verl's criteria for rollout_rs: the tokens that remain are those that verl's own function leaves. Not covered: in
which runs the loss rejects, and what follows from it (tests/training/worker/test_rejection.py).
"""

import pytest
import torch
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS, compute_rollout_rejection_mask

from verl_clipx.losses.contract.contract import example
from verl_clipx.losses.modifiers.rejection import parse_criteria


@pytest.mark.parametrize("criterion", sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_criterion_is_verls(criterion, dtype):
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(40, 12, generator=generator) < 0.8
    mask[7] = False
    log_ratio = torch.randn(40, 12, generator=generator, dtype=dtype) * torch.rand(40, 1, generator=generator)
    log_ratio[0, 0], log_ratio[1, 1] = 40, -40
    for threshold in ("0.8_1.1", "1.2") if criterion.endswith("k1") else ("0.05", "0.4"):
        remaining = parse_criteria(criterion, threshold).remaining(mask, log_ratio, torch.zeros_like(log_ratio))
        expected, _ = compute_rollout_rejection_mask(log_ratio, mask, criterion, threshold)
        assert torch.equal(remaining, expected)
        assert 0 < remaining.sum() < mask.sum()


def test_several_criteria_with_one_threshold_or_one_each():
    batch = example(torch.float32)
    log_prob, old_log_prob, mask = batch["log_prob"], batch["old_log_prob"], batch["mask"]
    for names, thresholds in (("token_k2, seq_mean_k3,token_k2", "0.1"), ("token_k1,seq_mean_k2", "0.7_1.4, 0.1")):
        remaining = parse_criteria(names, thresholds).remaining(mask, log_prob, old_log_prob)
        expected, _ = compute_rollout_rejection_mask(log_prob - old_log_prob, mask, names, thresholds)
        assert torch.equal(remaining, expected)
        assert 0 < remaining.sum() < mask.sum()
