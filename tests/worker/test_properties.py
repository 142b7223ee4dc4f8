"""Properties of the groups' registered losses, one for each formula.

Covers finite gradients for any log-ratio and dtype, garbage outside the mask, degenerate batches, invariance to the
order of sequences and tokens and to padding, float32 against float64, and the on-policy gradient. Does not cover the
normaliser of each aggregation (test_policy_loss.py), or micro-batches and ranks.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import per_token, registered_loss
from verl_clipx.methods import BUILT_IN

# The groups that differ from these in numbers alone: dapo, cispo_minimax, ce_gppo_reference, dgpo_reference,
# dcpo_reference, dppo_reference, m2po_reference.
GROUPS = (
    *("grpo", "cispo", "cispo_acpo", "gppo", "ce_gppo", "aspo", "aspo_dgpo", "dgpo"),
    *("acpo", "acpo_reference", "bapo", "bapo_reference", "dcpo", "dppo", "dppo_kl", "dro", "gmpo", "gspo", "sapo"),
    "topr",
)
SETTINGS = {group: (f"+clipx={group}",) for group in GROUPS}
SETTINGS["bapo_gradient"] = ("+clipx=bapo", "clipx.counted=gradient")
# Otherwise its ratio is to a policy that verl's signature leaves out.
SETTINGS["m2po"] = ("+clipx=m2po", "clipx.behaviour=old")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
every_setting = pytest.mark.parametrize("name", SETTINGS)


def ragged(seed: int, *, sequences: int = 4, length: int = 12, spread: float = 0.6, dtype=torch.float64):
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


def call(name: str, batch: dict, mode: str = "token-mean"):
    return registered_loss(built_once(SETTINGS[name]), batch, loss_agg_mode=mode)


def weights(name: str, batch: dict):
    return per_token(built_once(SETTINGS[name]).policy_loss.clipx, batch).weight


def assert_finite(loss, gradient, metrics):
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert not [key for key, value in metrics.items() if not math.isfinite(value)]


@pytest.mark.slow
def test_every_method_is_here():
    assert {built_once(SETTINGS[name]).policy_loss.clipx.method.name for name in SETTINGS} == set(BUILT_IN)


@every_setting
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
    assert_finite(*call(name, batch))
    assert weights(name, batch).isfinite().all()


@every_setting
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_nothing_outside_the_mask_is_read(name, garbage):
    batch = ragged(0)
    loss, gradient, metrics = call(name, batch)
    outside = ~batch["response_mask"]
    assert outside.any()
    for key in ("old_log_prob", "log_prob", "advantages"):
        batch[key] = torch.where(outside, garbage, batch[key])
    same_loss, same_gradient, same_metrics = call(name, batch)
    assert torch.equal(same_loss, loss)
    assert torch.equal(same_gradient, gradient)
    assert same_metrics == metrics
    assert (gradient[outside] == 0).all()


@every_setting
@pytest.mark.parametrize("kind", ["one token", "an empty sequence", "no positives", "no negatives", "no advantages"])
def test_degenerate_batches_are_finite(name, kind):
    batch = ragged(1)
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
    # Finite zeros everywhere would not do.
    signal = (weights(name, batch) * batch["advantages"] != 0) & batch["response_mask"]
    if name == "dro" and kind == "no advantages":
        # Its penalty pulls there, too.
        signal = batch["response_mask"]
    assert signal.any() or kind == "no advantages"
    for mode in AGGREGATIONS:
        loss, gradient, metrics = call(name, batch, mode)
        assert_finite(loss, gradient, metrics)
        assert torch.equal(gradient != 0, signal)


@every_setting
def test_no_tokens_at_all_give_finite_metrics(name):
    batch = ragged(2)
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    loss, gradient, metrics = call(name, batch, "token-sum")
    assert_finite(loss, gradient, metrics)
    assert loss == 0
    assert not gradient.any()


@pytest.mark.slow
@every_setting
@given(seed=st.integers(0, 10_000), order=st.integers(0, 10_000), padding=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_order_and_padding_do_not_matter(name, seed, order, padding):
    batch = ragged(seed, sequences=3, length=8)
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
        loss, gradient, metrics = call(name, batch, mode)
        moved_loss, moved_gradient, moved_metrics = call(name, moved, mode)
        back = torch.empty_like(moved_gradient)
        back[rows[:, None], columns] = moved_gradient
        assert_close(moved_loss, loss, rtol=1e-10, atol=1e-14)
        assert_close(back[:, :8], gradient, rtol=1e-10, atol=1e-15)
        assert moved_metrics == pytest.approx(metrics, rel=1e-10, abs=1e-12)


@every_setting
def test_float32_agrees_with_float64(name):
    narrow = ragged(4, dtype=torch.float32)
    wide = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in narrow.items()}
    (_, actual, _), (_, expected, _) = call(name, narrow), call(name, wide)
    assert_close(actual.double(), expected, rtol=2e-5, atol=0)


@every_setting
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name):
    batch = ragged(5)
    batch["log_prob"] = batch["old_log_prob"].clone()
    mask = batch["response_mask"]
    expected = torch.where(mask, -batch["advantages"] / mask.sum(), 0.0)
    assert_close(call(name, batch)[1], expected, rtol=1e-12, atol=0)
