"""Properties of every method composed into a loss.

Covers finite gradients for any log-ratio and dtype, garbage outside the mask, degenerate batches, the gradient against
-F * A * mask / normaliser written independently, and invariance to the order of sequences and tokens and to padding.
Does not cover the veRL-facing adapter, micro-batches or ranks.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.losses.composition import (
    aspo_method,
    ce_gppo_method,
    cispo_method,
    compose,
    dgpo_method,
    gppo_method,
    grpo_method,
)
from verl_clipx.controllers.acpo import AcpoController
from verl_clipx.controllers.bapo import BapoController
from verl_clipx.controllers.fixed import FixedBounds

CLAMP = 20.0
FIXED = FixedBounds(0.8, 1.28)
METHODS = {
    "grpo": (grpo_method(log_ratio_clamp=CLAMP), FIXED),
    "grpo_dual_clip": (grpo_method(dual_clip=3.0, log_ratio_clamp=CLAMP), FIXED),
    "cispo": (cispo_method(), FIXED),
    "cispo_masked": (cispo_method(mask_low=0.8, mask_high=1.3), FixedBounds(0.0, 1.45)),
    "gppo": (gppo_method(log_ratio_clamp=CLAMP), FIXED),
    "ce_gppo": (ce_gppo_method(beta_low=0.75, beta_high=1.0, dual_clip=3.0, log_ratio_clamp=CLAMP), FIXED),
    "aspo": (aspo_method(log_ratio_clamp=CLAMP), FIXED),
    "aspo_literal": (aspo_method(flip="both", weight_low=0.67, weight_high=4.0), FIXED),
    "dgpo": (dgpo_method(n=1, m=2, log_ratio_clamp=CLAMP), FIXED),
    "acpo": (grpo_method(log_ratio_clamp=CLAMP), AcpoController()),
    "acpo_reference": (
        grpo_method(dual_clip=3.0, log_ratio_clamp=CLAMP),
        AcpoController(epsilon_min=0.0, epsilon_max=3.0, bin_on="current", variance_epsilon=1e-8),
    ),
    "bapo": (grpo_method(log_ratio_clamp=CLAMP), BapoController()),
    "bapo_gradient": (grpo_method(log_ratio_clamp=CLAMP), BapoController(counted="gradient", weight="rollout")),
    "bapo_reference": (
        grpo_method(dual_clip=3.0, log_ratio_clamp=CLAMP),
        BapoController(contribution="ratio", target=0.5, weight="none", first="lower", last_step="clipped"),
    ),
}
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
every_method = pytest.mark.parametrize("name", METHODS)


def _batch(seed: int, *, sequences: int = 4, length: int = 12, spread: float = 0.6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    old_log_prob = -torch.rand(sequences, length, dtype=torch.float64, generator=generator) * 3
    log_prob = old_log_prob + spread * torch.randn(sequences, length, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, length + 1, (sequences, 1), generator=generator)
    return {
        "old_log_prob": old_log_prob.to(dtype),
        "log_prob": log_prob.to(dtype),
        "advantages": torch.randn(sequences, length, dtype=torch.float64, generator=generator).to(dtype),
        "response_mask": torch.arange(length) < lengths,
    }


def _run(name: str, batch: dict, **options):
    method, controller = METHODS[name]
    return compose(**batch, method=method, controller=controller, log_ratio_clamp=CLAMP, **options)


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 30.0, 300.0, 1e4])
def test_finite_for_any_log_ratio(name, dtype, spread):
    steps = torch.linspace(-1.0, 1.0, 31, dtype=torch.float64) * spread
    batch = {
        "old_log_prob": torch.full((2, 31), -1.0, dtype=dtype),
        "log_prob": (steps - 1.0).repeat(2, 1).to(dtype),
        "advantages": torch.tensor([[1.0], [-1.0]]).expand(2, 31).to(dtype),
        "response_mask": torch.ones(2, 31, dtype=torch.bool),
    }
    outcome = _run(name, batch)
    assert outcome.loss.isfinite()
    for tensor in (outcome.weight, outcome.statistics, outcome.decision):
        assert tensor.isfinite().all()
    assert outcome.gradient.isfinite().all()


@every_method
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_outside_the_mask_is_read(name, garbage):
    batch = _batch(0)
    expected = _run(name, batch)
    outside = ~batch["response_mask"]
    assert outside.any()
    for key in ("old_log_prob", "log_prob", "advantages"):
        batch[key] = torch.where(outside, garbage, batch[key])
    actual = _run(name, batch)
    assert torch.equal(actual.loss, expected.loss)
    assert torch.equal(actual.gradient, expected.gradient)
    assert torch.equal(actual.decision, expected.decision)
    assert (actual.gradient[outside] == 0).all()


@every_method
@pytest.mark.parametrize("kind", ["one token", "an empty sequence", "no positives", "no negatives", "no advantages"])
def test_degenerate_batches_are_finite(name, kind):
    batch = _batch(1)
    if kind == "one token":
        batch["response_mask"] = torch.zeros_like(batch["response_mask"])
        batch["response_mask"][1, 3] = True
        batch["log_prob"][1, 3] = batch["old_log_prob"][1, 3]
    elif kind == "an empty sequence":
        batch["response_mask"][2] = False
    elif kind == "no positives":
        batch["advantages"] = -batch["advantages"].abs()
    elif kind == "no negatives":
        batch["advantages"] = batch["advantages"].abs()
    else:
        batch["advantages"] = torch.zeros_like(batch["advantages"])
    for mode in AGGREGATIONS:
        outcome = _run(name, batch, loss_agg_mode=mode)
        for tensor in (outcome.loss, outcome.gradient, outcome.decision):
            assert tensor.isfinite().all()
        # Finite zeros everywhere would pass the lines above.
        signal = (outcome.weight * batch["advantages"] != 0) & batch["response_mask"]
        assert torch.equal(outcome.gradient != 0, signal)
        assert signal.any() or kind == "no advantages"


@every_method
def test_no_tokens_at_all_give_finite_bounds(name):
    batch = _batch(2)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    outcome = _run(name, batch, loss_agg_mode="token-sum")
    assert outcome.loss == 0
    assert not outcome.gradient.any()
    assert outcome.decision.isfinite().all()
    assert not outcome.statistics.any()


@every_method
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_gradient_is_minus_weight_times_advantage_over_the_normaliser(name, mode):
    batch = _batch(3)
    outcome = _run(name, batch, loss_agg_mode=mode)
    mask = batch["response_mask"]
    sequences = mask.any(-1).sum()
    normaliser = {
        "token-mean": mask.sum(),
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences * mask.sum(-1, keepdim=True),
    }[mode]
    expected = torch.where(mask, -outcome.weight * batch["advantages"] / normaliser, 0.0)
    assert_close(outcome.gradient, expected, rtol=1e-12, atol=0)


@every_method
@given(seed=st.integers(0, 10_000), order=st.integers(0, 10_000), padding=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_order_and_padding_do_not_matter(name, seed, order, padding):
    batch = _batch(seed, sequences=3, length=8)
    generator = torch.Generator().manual_seed(order)
    rows = torch.randperm(3, generator=generator)
    # Padding goes anywhere, not only to the end.
    columns = torch.randperm(8 + padding, generator=generator)
    moved = {}
    for key, tensor in batch.items():
        fill = False if key == "response_mask" else torch.nan
        padded = torch.cat([tensor, torch.full((3, padding), fill, dtype=tensor.dtype)], dim=1)
        moved[key] = padded[rows][:, columns]
    for mode in AGGREGATIONS:
        before, after = _run(name, batch, loss_agg_mode=mode), _run(name, moved, loss_agg_mode=mode)
        back = torch.empty_like(after.gradient)
        back[rows[:, None], columns] = after.gradient
        assert_close(after.loss, before.loss, rtol=1e-10, atol=1e-14)
        assert_close(back[:, :8], before.gradient, rtol=1e-10, atol=1e-15)
        assert_close(after.decision, before.decision, rtol=1e-10, atol=1e-12)


@every_method
def test_float32_agrees_with_float64(name):
    narrow = _batch(4, dtype=torch.float32)
    wide = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in narrow.items()}
    actual, expected = _run(name, narrow), _run(name, wide)
    assert_close(actual.gradient.double(), expected.gradient, rtol=2e-5, atol=0)


def test_on_policy_every_ratio_method_has_the_plain_policy_gradient():
    batch = _batch(5)
    batch["log_prob"] = batch["old_log_prob"].clone()
    mask = batch["response_mask"]
    expected = torch.where(mask, -batch["advantages"] / mask.sum(), 0.0)
    for name in METHODS:
        assert_close(_run(name, batch).gradient, expected, rtol=1e-12, atol=0, msg=name)
