"""KL-Cov by hand at each edge, and its buckets. What mini_batch decides over micro-batches and ranks is covered by
tests/end_to_end/test_invariance.py; the contract of all methods by tests/losses/methods.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from verl_clipx.losses.methods.kl_cov import KlCov, inner_edges

from .against_verl import ACTOR, SameInVerl
from .hand_rows import apply_method, decide, row, tokens_at

PUBLISHED = {"kl_cov": dict(share=2e-4, coefficient=1.0)}
PARAMETERS_IN_TRAINING = {"share": 0.5}


def make_case(overrides, *, share, coefficient):
    """Return a comparison with verl's loss at a share and a coefficient, which the overrides choose too."""
    # verl orders equal covariances by chance, and a bucket may hold several: its batches have no such case.
    return SameInVerl(
        overrides=("+clipx=kl_cov", "clipx.scope=micro_batch", *overrides),
        verl_overrides=(
            "policy_loss.loss_mode=kl_cov",
            f"policy_loss.kl_cov_ratio={share}",
            f"policy_loss.ppo_kl_coef={coefficient}",
        ),
        metrics=(),
        spreads=(0.3,),
        sequences=16,
    )


SAME_IN_VERL = {
    # A coefficient of 1 is the paper's and the default of verl's function; its YAML has 0.1.
    "kl_cov of 1e-09": make_case(("clipx.share=1e-09",), share=1e-9, coefficient=1),
    "kl_cov of 0.05": make_case(("clipx.share=0.05",), share=0.05, coefficient=1),
    "kl_cov of 0.3": make_case(("clipx.share=0.3",), share=0.3, coefficient=1),
    "kl_cov by verl's keys": make_case(
        (f"{ACTOR}.policy_loss.kl_cov_ratio=0.05", f"{ACTOR}.policy_loss.ppo_kl_coef=0.3"), share=0.05, coefficient=0.3
    ),
}


def test_by_hand():
    # Means: A 0, log p -2. Covariances 2 * 1 = 2, -2 * -2 = 4, 1 * 2 = 2 and -1 * -1 = 1: the second token is one of
    # a half, and each of the first and third is the other one by half a chance; three quarters are these three.
    t = tokens_at(row(2.0, 0.5, 1.0, 2.0), row(2.0, -2.0, 1.0, -1.0), old_log_prob=torch.zeros(1, 4))
    t = t._replace(log_prob=row(-1.0, -4.0, 0.0, -3.0))
    mean_advantage, mean_log_prob, bucket_low, bucket_high, chance = decide(KlCov(share=0.5), t).tolist()
    assert (mean_advantage, mean_log_prob, chance) == (0.0, -2.0, 0.5)
    assert 2 / 1.009 < bucket_low < 2 < bucket_high < 2 * 1.009
    method = KlCov(share=0.75, coefficient=0.5)
    assert decide(method, t)[-1] == 1
    result = apply_method(method, t)
    # r - 0.5 sign(log r) / A: 2 - 0.25, 0.5 - 0.25, 1 (its log-ratio is 0), and the last is not penalised.
    assert_close(result.weight, row(1.75, 0.25, 1.0, 2.0))
    log_2 = math.log(2.0)
    assert_close(result.value, row(-4 + log_2 / 2, 1 + log_2 / 2, -1.0, 2.0))


def test_a_share_of_1_penalises_every_token_with_an_advantage():
    t = tokens_at(row(2.0, 2.0, 2.0), row(1.0, -1.0, 0.0), old_log_prob=torch.zeros(1, 3))
    assert_close(apply_method(KlCov(share=1.0), t).weight, row(1.0, 3.0, 2.0))


@pytest.mark.parametrize(
    ("tokens", "share", "expected_penalised"),
    # verl takes as many as the share says, and at least one, also where all covariances are alike or small.
    [(2, 2e-4, 1), (480, 2e-4, 1), (480, 0.1, 48), (480, 0.9, 432), (4096, 0.01, 40)],
)
@pytest.mark.parametrize("spread", [0.0, 1e-5, 1.0])
def test_as_many_tokens_are_penalised_as_verl_takes_on_average(tokens, share, expected_penalised, spread):
    draws = 400 if tokens == 2 else 40
    penalised = 0
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        old = -3 * torch.rand(tokens, 1, generator=generator, dtype=torch.float64)
        # All of one advantage, or of nearly one, or of two.
        advantages = 1 + spread * (torch.arange(tokens) % 2)[:, None]
        t = tokens_at(torch.full_like(old, 1.1), advantages.double(), old_log_prob=old)
        penalised += int((apply_method(KlCov(share=share), t).weight != t.ratio).sum())
    # By chance within three standard deviations, at most those of so many independent draws.
    standard_deviation = math.sqrt(expected_penalised / draws)
    assert abs(penalised / draws - expected_penalised) <= 3 * standard_deviation + 1e-9


def test_buckets_are_0_8_percent_wide():
    edges = inner_edges("cpu")
    assert_close(edges[1:] / edges[:-1], torch.full_like(edges[1:], 1.0079), rtol=1e-4, atol=0)
    assert_close(edges[[0, -1]], torch.tensor([1e-4, 1e3], dtype=torch.float64))
