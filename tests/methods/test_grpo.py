"""GRPO's weight and surrogate by hand and against their definitions; verl's numbers are in the golden vectors.

Covers equality at the bounds, the dual clip, the clamp, per-token bounds and gradcheck of the surrogate with the bounds
of ACPO and BAPO held fixed. Not covered: how those bounds are found.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.golden.settings import DUAL_CLIP, EPSILONS, UNCLAMPED, Setup, bounds
from verl_clipx.check.contract import evaluate
from verl_clipx.methods import Bounds
from verl_clipx.methods.acpo import Acpo
from verl_clipx.methods.bapo import Bapo
from verl_clipx.methods.grpo import Grpo

from .against_verl import AsVerl
from .at import At, by_hand, row

PUBLISHED = {
    "grpo": dict(clip_low=0.8, clip_high=1.2, dual_clip=3.0, log_ratio_clamp=20.0),
    "dapo": dict(clip_low=0.8, clip_high=1.28, dual_clip=3.0),
}
GOLDEN = {
    "acpo_dapo": Setup(("+clipx=dapo",), (*bounds("cliprange_low", "cliprange_high", published_high=0.28), DUAL_CLIP)),
    "dgpo_ppo": Setup(("+clipx=grpo",), (*EPSILONS, DUAL_CLIP)),
    "verl091_vanilla": Setup(
        ("+clipx=dapo",), (*bounds("clip_ratio_low", "clip_ratio_high", published_high=0.28), DUAL_CLIP)
    ),
    "paper_grpo": Setup(("+clipx=grpo",), EPSILONS, ("clipx.dual_clip=null", *UNCLAMPED)),
}
VERLS = {
    "grpo": AsVerl(
        ("+clipx=grpo",),
        ("policy_loss.loss_mode=vanilla",),
        ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"),
        spreads=(0.05, 1.0, 12.0),
        weighted=True,
    )
}


def SEEN(values):
    assert sum(values("actor/pg_clipfrac")) > 0


FAR = Grpo(dual_clip=None, log_ratio_clamp=None)
E25, E20 = math.exp(25), math.exp(20)

test_by_hand = by_hand(
    {
        "both bounds and the dual clip": At(
            Grpo(clip_low=0.8, clip_high=1.25, dual_clip=3.0),
            (0.5, 0.5, 0.8, 1.0, 1.25, 1.5, 1.5, 3.0, 3.5, 3.5, 3.5),
            (2.0, -2.0, -1.0, -1.0, 1.0, 2.0, -2.0, -1.0, -2.0, 2.0, 0.0),
            (0.5, 0.0, 0.8, 1.0, 1.25, 0.0, 1.5, 3.0, 0.0, 0.0, 3.5),
            value=(-1.0, 1.6, 0.8, 1.0, -1.25, -2.5, 3.0, 3.0, 6.0, -2.5, 0.0),
        ),
        "no dual clip": At(Grpo(dual_clip=None), (100.0,), -1.0, (100.0,), value=(100.0,)),
        "beyond the clamp there is value but no gradient": At(
            Grpo(dual_clip=None), (E25, 1 / E25), (-1.0, 1.0), 0.0, value=(E20, -1 / E20)
        ),
        "bounds as a number and a tensor": At(
            Grpo(), (1.3, 1.3), 1.0, (0.0, 1.3), value=(-1.1, -1.3), bounds=Bounds(0.8, row(1.1, 1.5))
        ),
        # ACPO's epsilon can exceed 1.
        **{
            f"a lower bound of {low} never clips": At(
                FAR, (1e-9, 1e9), (-1.0, 1.0), (1e-9, 1e9), value=(1e-9, -1e9), bounds=Bounds(low, math.inf)
            )
            for low in (0.0, -2.0)
        },
    }
)


@given(
    log_ratio=st.floats(-30, 30),
    advantage=st.floats(-5, 5),
    low=st.floats(0.1, 1.0),
    high=st.floats(1.0, 4.0),
    dual_clip=st.none() | st.floats(1.5, 10),
)
@settings(deadline=None)
def test_value_and_gradient_agree_with_autograd_through_the_textbook_formula(
    log_ratio, advantage, low, high, dual_clip
):
    kinks = [math.log(low), math.log(high), 20.0, -20.0] + ([] if dual_clip is None else [math.log(dual_clip)])
    if any(abs(log_ratio - kink) < 1e-6 for kink in kinks):
        log_ratio += 1e-3
    log_prob, advantages = row(log_ratio).requires_grad_(), row(advantage)
    ratio = log_prob.clamp(-20.0, 20.0).exp()
    value = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None and advantage < 0:
        value = torch.minimum(value, -advantages * dual_clip)
    inputs = {"old_log_prob": torch.zeros(1, 1).double(), "advantages": advantages, "mask": torch.ones(1, 1) > 0}
    found = evaluate(Grpo(clip_low=low, clip_high=high, dual_clip=dual_clip), log_prob=log_prob, **inputs).loss
    gradients = (torch.autograd.grad(one.sum(), log_prob)[0] for one in (found, value))
    assert_close((found, next(gradients)), (value, next(gradients)))


@pytest.mark.parametrize(
    "method", [Grpo(clip_high=1.28, dual_clip=2.0), Acpo(alpha=0.5, dual_clip=2.0), Bapo(target=0.5, dual_clip=2.0)]
)
def test_gradcheck_of_the_surrogate_with_bounds_held_fixed(method):
    generator = torch.Generator().manual_seed(0)
    log_prob, advantages = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    old_log_prob = -torch.rand(5, 8, dtype=torch.float64, generator=generator)
    inputs = {"old_log_prob": old_log_prob, "advantages": advantages, "mask": torch.ones_like(advantages) > 0}
    log_prob = (old_log_prob + log_prob).requires_grad_()
    held = evaluate(method, log_prob=log_prob, **inputs)
    kinks = torch.stack([torch.as_tensor(bound).expand(5, 8) for bound in (*held.bounds, 2.0)])
    assert ((held.tokens.ratio - kinks).abs() > 1e-4).all(), "a kink too close for finite differences: another seed"
    assert 0 < (held.weight == 0).sum() < held.weight.numel()
    loss = lambda log_prob: evaluate(method, log_prob=log_prob, statistics=held.statistics, **inputs).loss  # noqa: E731
    assert torch.autograd.gradcheck(loss, (log_prob,))
