"""Published faults of other trainers' losses, each by its own formula and autograd, and what `check_gradient` says of
them. Not covered: the faults that docs/elsewhere.md calls out of reach, which change no gradient on log_prob or its
inputs alike; the comparison in a run (tests/worker/test_receipt.py).
"""

import inspect
import math

import pytest
import torch
from torch import where

from verl_clipx import check_gradient, clip_loss

DAPO = {"loss": "dapo", "dual_clip": None}


def tokens(dtype=torch.float64):
    """Log-probabilities of three policies, advantages of both signs and a ragged mask: 8 sequences of up to 24."""
    torch.manual_seed(1)
    old = -torch.rand(8, 24, dtype=torch.float64) * 2 - 0.1
    current = old + 0.5 * torch.randn(8, 24, dtype=torch.float64)
    rollout = old + 0.05 * torch.randn(8, 24, dtype=torch.float64)
    advantages = torch.tensor([1.5, -1.0, 0.5, -0.7, 2.0, -1.2, 0.9, -0.4], dtype=torch.float64)[:, None]
    mask = torch.arange(24) < torch.tensor([24, 20, 7, 15, 24, 11, 3, 18])[:, None]
    return [of.to(dtype) for of in (current, old, advantages.expand(8, 24))] + [mask, rollout.to(dtype)]


def surrogate(log_prob, old, advantages, low=0.8, high=1.28, dual_clip=None):
    """PPO's clipped loss of each token."""
    ratio = (log_prob - old).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return loss if dual_clip is None else where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def mean(loss, mask, number=None):
    return where(mask, loss, 0).sum() / (mask.sum() if number is None else number)


def checked(trainer, announced, dtype=torch.float64, mask=None):
    """What is found of a trainer's loss: a function of the tensors of `tokens` that returns a scalar."""
    log_prob, old, advantages, whole, rollout = tokens(dtype)
    mask = whole if mask is None else mask
    leaf = log_prob.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(trainer(leaf, old, advantages, mask, rollout), leaf)
    further = {
        key: value(old, rollout, mask) if inspect.isfunction(value) else value for key, value in announced.items()
    }
    return check_gradient(log_prob, old, advantages, mask, gradient, rollout_log_prob=rollout, **further)


def token_ratio(old, rollout, mask):
    return (old - rollout).exp()


def product(old, rollout, mask):
    return where(mask, old - rollout, 0).sum(-1, keepdim=True).exp()


def sum_of_ratios(p, old, A, mask, rollout):
    return mean(surrogate(p, old, A) * where(mask, (old - rollout).exp(), 0).sum(-1, keepdim=True), mask)


def opsm_by_token(p, old, A, mask, rollout):
    kept = ~((A < 0) & (rollout - p.detach() > 0.05))
    return mean(surrogate(p, old, A) * kept, mask)


def overflowing(p, old, A, mask, rollout):
    hopeless = torch.arange(24) == 2
    ratio = (p - where(hopeless, -1e4, old)).exp()
    return mean(where(hopeless, 0.0, -A) * ratio * ~hopeless, mask)


# The fault; what the trainer computes; what was announced; words of the reason.
FAULTS = {
    "unsloth-zoo#870": (sum_of_ratios, {**DAPO, "correction": product}, "the sum of a sequence's ratios"),
    "unsloth-zoo#870, VESPO": (
        lambda p, old, A, mask, rollout: mean(-A * p, mask),
        {"loss": "vespo"},
        "the old policy is the current one, and every ratio 1",
    ),
    "Liger-Kernel#1082": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A), mask),
        {**DAPO, "correction": lambda old, rollout, mask: torch.full_like(old, 0.01)},
        "no correction acts",
    ),
    "trl#6369": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A), mask, number=mask.numel()),
        DAPO,
        "as if divided by 192 and not by the 122 tokens in the mask",
    ),
    "slime#2247": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A), mask),
        {"loss": "dapo", "dual_clip": 1.5},
        "a parameter is not forwarded: dual_clip=None acts and not 1.5",
    ),
    "slime#1917": (
        opsm_by_token,
        {"loss": clip_loss("dapo", dual_clip=None, mask={"rule": "opsm", "delta": 0.05})},
        "opsm judges tokens and not sequences",
    ),
    "verl#4912, #4272": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A, dual_clip=3.0), mask),
        {"loss": "dapo", "correction": token_ratio},
        "no correction acts",
    ),
    "prime-rl#2973, Soup#342": (overflowing, {**DAPO, "clip_low": None, "clip_high": None}, "not finite"),
    "SkyRL#1315, miles#1829": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, rollout, A), mask),
        DAPO,
        "the old policy is the sampler's",
    ),
    "Megatron-LM#6660, in the loss": (
        lambda p, old, A, mask, rollout: 2 * mean(surrogate(p, old, A), mask),
        DAPO,
        "all of it 2 times",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_published_fault_is_found_and_named(fault):
    trainer, announced, reason = FAULTS[fault]
    found = checked(trainer, announced)
    assert not found and len(found.tokens) > 0 and reason in str(found), str(found)


def test_rejected_tokens_that_stay_in_the_denominator_are_named():
    # verl#4852: rejection in bypass mode changes the numerator's mask alone.
    whole = tokens()[3]
    left = whole & (torch.arange(24) % 3 > 0)
    found = checked(lambda p, old, A, mask, rollout: mean(surrogate(p, old, A), mask, whole.sum()), DAPO, mask=left)
    assert "as if divided by 122 and not by the 80 tokens in the mask" in found.reason


# Variants that no thread reports.
OTHERS = {
    "a symmetric clip": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A, high=1.2), mask),
        "not forwarded: clip_high=1.2 acts and not 1.28",
    ),
    "no clip": (
        lambda p, old, A, mask, rollout: mean(-A * (p - old).exp(), mask),
        "clip_low=None acts and not 0.8, clip_high=None acts and not 1.28",
    ),
    "a mean of means": (
        lambda p, old, A, mask, rollout: (where(mask, surrogate(p, old, A), 0).sum(-1) / mask.sum(-1)).mean(),
        "averaged by seq-mean-token-mean",
    ),
    "a wrong sign": (lambda p, old, A, mask, rollout: -mean(surrogate(p, old, A), mask), "the sign is wrong"),
    "another bound": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A, high=1.5), mask),
        "an unannounced gradient at 4 tokens with A > 0 and ratios from 1.2",
    ),
    "a lower bound that drops": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A, low=0.9), mask),
        "no gradient at 3 tokens with A < 0 and ratios from 0.8",
    ),
    "padding": (
        lambda p, old, A, mask, rollout: mean(surrogate(p, old, A), mask | True, mask.sum()),
        "outside the mask",
    ),
    "another loss": (
        lambda p, old, A, mask, rollout: mean(-A * (p - old).exp().clamp(0.8, 1.28).detach() * p, mask),
        "it is cispo",
    ),
}


@pytest.mark.parametrize("variant", OTHERS)
def test_another_variant_is_found_and_named(variant):
    trainer, reason = OTHERS[variant]
    found = checked(trainer, DAPO)
    assert not found and reason in found.reason, str(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_announced_loss_agrees_in_every_dtype_and_aggregation(dtype):
    def trainer(p, old, A, mask, rollout):
        p, old, A = p.float() if dtype != torch.float64 else p, old, A
        return mean(surrogate(p, old.to(p), A.to(p), dual_clip=3.0), mask)

    found = checked(trainer, {"loss": "dapo"}, dtype)
    assert found and len(found.tokens) == 0 and "is the announced one" in str(found), str(found)
    by_share = checked(trainer, {"loss": "dapo", "aggregation": lambda old, rollout, mask: 1 / mask.sum()}, dtype)
    assert by_share


@pytest.mark.filterwarnings("ignore:what .* clips follows")
@pytest.mark.parametrize("name", ["acpo", "m2po", "kl_cov", "gspo", "dro"])
def test_our_own_losses_agree_with_what_they_announce(name):
    loss = clip_loss(name)

    def trainer(p, old, A, mask, rollout):
        return mean(loss(p, old, A, mask, rollout_log_prob=rollout)[0], mask)

    found = checked(trainer, {"loss": name})
    assert found, str(found)


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation='mean' must be one of token-mean"):
        checked(lambda p, old, A, mask, rollout: mean(p, mask), {"aggregation": "mean"})
    assert math.isinf(checked(overflowing, DAPO).difference)
