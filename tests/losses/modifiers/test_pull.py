"""A pull under every method that has none of its own: value and gradient are the method's and those of the divergence,
by autograd through verl's registry, at extreme log-ratios that of verl's own kl_penalty; which methods refuse it. Not
covered: that the receipt counts it (tests/training/worker/test_receipt.py), a training, a replay.
"""

import pickle

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import kl_penalty

from tests.composition import built_once
from tests.golden.runs import registered_loss
from tests.losses.methods.against_verl import ragged
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.run.config import build

METHODS_WITH_A_PULL = ("dro", "kl_cov", "p3o", "kpop")
COEFFICIENT = 0.3


def make_batch():
    """Return ragged sequences of which the second has no advantage, so that only a pull has a gradient there."""
    batch = ragged(0)
    batch["rollout_log_prob"] = batch["old_log_prob"] + 0.2 * torch.randn(8, 12, dtype=torch.float64)
    batch["entropy"] = torch.rand(8, 12, dtype=torch.float64)
    batch["advantages"][1] = 0.0
    return batch


def compute_loss(batch, *overrides):
    """Return value and gradient of a composed loss under seq-mean-token-mean."""
    loss, gradient, _ = registered_loss(
        built_once(overrides),
        batch,
        loss_agg_mode="seq-mean-token-mean",
        rollout_log_prob=batch["rollout_log_prob"],
        entropy=batch["entropy"],
    )
    return loss, gradient


def compute_divergence(batch, estimator, anchor):
    """Return value and gradient of `COEFFICIENT` times a divergence under seq-mean-token-mean, by autograd."""
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    mask = batch["response_mask"]
    x = log_prob - batch[f"{anchor}_log_prob"]
    of_tokens = {"k1": x, "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[estimator]
    of_sequences = torch.where(mask, of_tokens, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    loss = COEFFICIENT * of_sequences.sum() / mask.any(-1).sum()
    loss.backward()
    return loss.detach(), log_prob.grad


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in METHODS_WITH_A_PULL])
def test_value_and_gradient_are_the_methods_with_those_of_the_divergence(name):
    for estimator, anchor in (("k2", "old"), ("k3", "rollout"), ("k1", "old")):
        batch = make_batch()
        pull = (
            f"+clipx/pull={estimator}",
            f"clipx.pull.coefficient={COEFFICIENT}",
            f"clipx.pull.anchor={anchor}",
        )
        loss, gradient = compute_loss(batch, f"+clipx={name}")
        pulled_loss, pulled_gradient = compute_loss(batch, f"+clipx={name}", *pull)
        divergence, divergence_gradient = compute_divergence(batch, estimator, anchor)
        assert_close(pulled_loss - loss, divergence, rtol=1e-9, atol=1e-12)
        assert_close(pulled_gradient - gradient, divergence_gradient, rtol=1e-9, atol=1e-12)
        assert divergence_gradient[1].any()


# Nats, on both sides of the limits of verl's k3: its derivative ends at -2.61 and 11, its clamp of x at 20.
EXTREME_LOG_RATIOS = (-20.0, -15.0, -10.0, -2.62, -2.6, 0.0, 5.0, 10.9, 11.1, 15.0, 20.0)


def make_extreme_batch(dtype):
    """Return a sequence with `EXTREME_LOG_RATIOS` and without an advantage, so that only a pull has a gradient."""
    x = torch.tensor([EXTREME_LOG_RATIOS], dtype=dtype)
    old_log_prob = torch.full_like(x, -25.0)
    mask = torch.ones_like(x, dtype=torch.bool)
    return {
        "log_prob": old_log_prob + x,
        "old_log_prob": old_log_prob,
        "advantages": torch.zeros_like(x),
        "response_mask": mask,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_at_extreme_log_ratios_it_is_verls_own_penalty(estimator, dtype):
    batch = make_extreme_batch(dtype)
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    expected = kl_penalty(log_prob, batch["old_log_prob"], estimator).mean()
    expected.backward()
    config = built_once(("+clipx=grpo", f"+clipx/pull={estimator}", "clipx.pull.coefficient=1"))
    loss, gradient, _ = registered_loss(config, batch, loss_agg_mode="token-mean")
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)


def test_k3_pulls_no_token_beyond_its_limit():
    batch = make_extreme_batch(torch.float64)
    config = built_once(("+clipx=grpo", "+clipx/pull=k3", "clipx.pull.coefficient=0.001"))
    _, gradient, _ = registered_loss(config, batch, loss_agg_mode="token-sum")
    pull = dict(zip(EXTREME_LOG_RATIOS, gradient[0].tolist(), strict=True))
    # 0.001 (1 - e^2.6), and not 0.001 (1 - e^15) = -3269.
    assert pull[-2.6] == pytest.approx(-0.0124637, rel=1e-5)
    assert [pull[x] for x in (-20.0, -15.0, -10.0, -2.62, 11.1, 15.0, 20.0)] == [0.0] * 7


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("dro", {}),
        ("kl_cov", {}),
        ("p3o", {}),
        ("kpop", {}),
        # With this parameter it has one.
        ("ipo", {"kl_tau": 0.1}),
    ],
)
def test_a_method_with_a_pull_of_its_own_refuses_another(name, parameters):
    with pytest.raises(Refusal, match=f"clipx.pull: {name} already has its own pull"):
        build(name, pull={}, **parameters)


def test_a_method_may_have_a_pull_and_a_held_target():
    method = build("grpo", hold={"value": 0.1}, pull={"estimator": "k3"}).method
    assert method.parameters["pull"] == "k3 to old, times 0.001"
    assert "hold" in method.parameters


def test_a_method_with_a_pull_survives_pickle_and_is_another_one_with_another_pull():
    method = build("grpo", hold={"value": 0.1}, pull={"estimator": "k3"}).method
    assert pickle.loads(pickle.dumps(method)) == method
    assert method != build("grpo", hold={"value": 0.1}, pull={}).method


def test_a_pull_to_the_sampler_asks_for_its_log_probabilities():
    assert build("grpo", pull={"anchor": "rollout"}).asks_for == ("rollout_log_prob",)
