"""Clip-Cov by hand at each edge, and its draw; beside verl's own every eligible token is drawn. Not covered: what
mini_batch decides over micro-batches and ranks (tests/end_to_end/test_invariance.py).
"""

import torch
from torch.testing import assert_close

from verl_clipx.losses.methods.clip_cov import ClipCov, compute_covariances, hash_to_uniform

from .against_verl import ACTOR, AsVerl
from .at import decision, outcome, row, tokens_at

PUBLISHED = {
    "clip_cov": dict(clip_low=0.8, clip_high=1.2, share=2e-4, covariance_low=1.0, covariance_high=5.0),
}
DRAWS_TOKENS = True

OURS = ("+clipx=clip_cov", "clipx.scope=micro_batch")
WIDE = tuple(f"policy_loss.clip_cov_{key}" for key in ("lb=0.1", "ub=3"))


def same(ours, verls=()):
    # Every eligible token is drawn.
    verls = ("policy_loss.loss_mode=clip_cov", "policy_loss.clip_cov_ratio=1", *verls)
    return AsVerl((*OURS, *ours), verls, metrics=(), spreads=(0.3,), sequences=16)


SAME_IN_VERL = {
    "clip_cov": same(("clipx.share=1",)),
    "clip_cov, wide": same(("clipx.share=1", "clipx.covariance_low=0.1", "clipx.covariance_high=3"), WIDE),
    "clip_cov by verl's keys": same(tuple(f"{ACTOR}.{key}" for key in ("policy_loss.clip_cov_ratio=1", *WIDE)), WIDE),
}


def test_by_hand():
    # Means over four tokens: A 0, log p -2. Covariances: 2 * 1.5 = 3; -2 * -1.5 = 3; 1 * 2 = 2; -1 * -2 = 2.
    t = tokens_at(row(1.0, 1.0, 1.3, 0.9), row(2.0, -2.0, 1.0, -1.0), old_log_prob=torch.zeros(1, 4))
    t = t._replace(log_prob=row(-0.5, -3.5, 0.0, -4.0))
    method = ClipCov(covariance_low=1.0, covariance_high=3.0, share=1.0)
    assert_close(compute_covariances(t, decision(method, t)[:2]), row(3.0, 3.0, 2.0, 2.0))
    # Only the last is eligible: the bounds are excluded, and PPO clips the third (A > 0, r = 1.3).
    assert_close(decision(method, t), torch.tensor([0.0, -2.0, 0.25, 1.0], dtype=torch.float64))
    found = outcome(method, t)
    assert_close(found.weight, row(1.0, 1.0, 0.0, 0.0))
    assert_close(found.value, row(-2.0, 2.0, -1.2, 0.0))
    wider = ClipCov(covariance_low=1.0, covariance_high=3.1, share=1.0)
    assert_close(outcome(wider, t).weight, row(0.0, 0.0, 0.0, 0.0))


def test_the_draw_is_uniform_and_follows_the_token_from_version_to_version():
    drawn = (hash_to_uniform(torch.tensor([[-0.5, -0.5, -2.0]]), 0) * 2**24).int()
    assert drawn.tolist() == [[7256401, 7913248, 502032]]
    values = -6 * torch.rand(400, 500, generator=torch.Generator().manual_seed(0))
    numbers, other = hash_to_uniform(values, 0), hash_to_uniform(values, 1)
    counts = torch.histc(numbers, bins=20, min=0, max=1) / numbers.numel()
    assert_close(counts, torch.full((20,), 0.05), atol=0.002, rtol=0)
    assert torch.equal(numbers[3:5, :9], hash_to_uniform(values[3:5, :9], 0))
    for one, two in ((numbers, other), (numbers[:, 1:], numbers[:, :-1])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]) < 0.01
