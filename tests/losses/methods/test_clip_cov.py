"""Clip-Cov by hand at each edge, and its draw; beside verl's own every eligible token is drawn. Not covered: what
mini_batch decides over micro-batches and ranks (tests/end_to_end/test_invariance.py).
"""

import torch
from torch.testing import assert_close

from verl_clipx.losses.methods.clip_cov import ClipCov, compute_covariances, hash_to_uniform

from .against_verl import ACTOR, SameInVerl
from .hand_rows import apply_method, decide, row, tokens_at

PUBLISHED = {
    "clip_cov": dict(clip_low=0.8, clip_high=1.2, share=2e-4, covariance_low=1.0, covariance_high=5.0),
}
DRAWS_TOKENS = True


def make_case(overrides, verl_bounds=()):
    """Return a comparison where every eligible token is drawn; verl_bounds: its keys for the bounds of covariances."""
    return SameInVerl(
        overrides=("+clipx=clip_cov", "clipx.scope=micro_batch", *overrides),
        verl_overrides=("policy_loss.loss_mode=clip_cov", "policy_loss.clip_cov_ratio=1", *verl_bounds),
        metrics=(),
        spreads=(0.3,),
        sequences=16,
    )


WIDE_BOUNDS = ("policy_loss.clip_cov_lb=0.1", "policy_loss.clip_cov_ub=3")
SAME_IN_VERL = {
    "clip_cov": make_case(("clipx.share=1",)),
    "clip_cov, wide": make_case(("clipx.share=1", "clipx.covariance_low=0.1", "clipx.covariance_high=3"), WIDE_BOUNDS),
    "clip_cov by verl's keys": make_case(
        tuple(f"{ACTOR}.{key}" for key in ("policy_loss.clip_cov_ratio=1", *WIDE_BOUNDS)), WIDE_BOUNDS
    ),
}


def test_by_hand():
    # Means over four tokens: A 0, log p -2. Covariances: 2 * 1.5 = 3; -2 * -1.5 = 3; 1 * 2 = 2; -1 * -2 = 2.
    t = tokens_at(row(1.0, 1.0, 1.3, 0.9), row(2.0, -2.0, 1.0, -1.0), old_log_prob=torch.zeros(1, 4))
    t = t._replace(log_prob=row(-0.5, -3.5, 0.0, -4.0))
    method = ClipCov(covariance_low=1.0, covariance_high=3.0, share=1.0)
    assert_close(compute_covariances(t, decide(method, t)[:2]), row(3.0, 3.0, 2.0, 2.0))
    # Only the last is eligible: the bounds are excluded, and PPO clips the third (A > 0, r = 1.3).
    assert_close(decide(method, t), torch.tensor([0.0, -2.0, 0.25, 1.0], dtype=torch.float64))
    result = apply_method(method, t)
    assert_close(result.weight, row(1.0, 1.0, 0.0, 0.0))
    assert_close(result.value, row(-2.0, 2.0, -1.2, 0.0))
    wider = ClipCov(covariance_low=1.0, covariance_high=3.1, share=1.0)
    assert_close(apply_method(wider, t).weight, row(0.0, 0.0, 0.0, 0.0))


def test_the_draw_is_the_same_from_version_to_version():
    numbers = hash_to_uniform(torch.tensor([[-0.5, -0.5, -2.0]]), 0)
    assert (numbers * 2**24).int().tolist() == [[7256401, 7913248, 502032]]


def test_the_draw_is_uniform_and_independent_of_other_seeds_and_tokens():
    values = -6 * torch.rand(400, 500, generator=torch.Generator().manual_seed(0))
    numbers = hash_to_uniform(values, 0)
    shares = torch.histc(numbers, bins=20, min=0, max=1) / numbers.numel()
    assert_close(shares, torch.full((20,), 0.05), atol=0.002, rtol=0)
    assert abs(correlate(numbers, hash_to_uniform(values, 1))) < 0.01
    assert abs(correlate(numbers[:, 1:], numbers[:, :-1])) < 0.01
    # A token's draw follows from its own value and place.
    assert torch.equal(numbers[3:5, :9], hash_to_uniform(values[3:5, :9], 0))


def correlate(numbers, others):
    return float(torch.corrcoef(torch.stack([numbers.flatten(), others.flatten()]))[0, 1])
