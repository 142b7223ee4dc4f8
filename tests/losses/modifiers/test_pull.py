"""A pull under every method that has none of its own: value and gradient are the method's and those of the divergence,
by autograd through verl's registry, at extreme log-ratios that of verl's own kl_penalty; which methods refuse it. Not
covered: that the receipt counts it
(tests/training/worker/test_receipt.py), a training, a replay.
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

WITH_ONE = ("dro", "kl_cov", "p3o", "kpop")
DIVERGENCES = {"k1": lambda x: x, "k2": lambda x: x**2 / 2, "k3": lambda x: (-x).exp() - 1 + x}


def both(name, batch, estimator="k2", anchor="old"):
    """Loss and gradient of a method, and with a pull."""
    words = (f"+clipx/pull={estimator}", "clipx.pull.coefficient=0.3", f"clipx.pull.anchor={anchor}")
    further = {name: batch[name] for name in ("rollout_log_prob", "entropy") if name in batch}
    without, with_it = ((f"+clipx={name}",), (f"+clipx={name}", *words))
    return [
        registered_loss(built_once(one), batch, loss_agg_mode="seq-mean-token-mean", **further)
        for one in (without, with_it)
    ]


def of_divergence(batch, estimator, anchor):
    log_prob, mask = batch["log_prob"].clone().requires_grad_(True), batch["response_mask"]
    x = log_prob - (batch["old_log_prob"] if anchor == "old" else batch["rollout_log_prob"])
    of_rows = torch.where(mask, DIVERGENCES[estimator](x), 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    loss = 0.3 * of_rows.sum() / mask.any(-1).sum()
    loss.backward()
    return loss.detach(), log_prob.grad


def spoilt(seed):
    batch = ragged(seed)
    batch["rollout_log_prob"] = batch["old_log_prob"] + 0.2 * torch.randn(8, 12, dtype=torch.float64)
    batch["entropy"] = torch.rand(8, 12, dtype=torch.float64)
    # Equal scores: the pull acts there too.
    batch["advantages"][1] = 0.0
    return batch


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in WITH_ONE])
def test_value_and_gradient_are_the_methods_with_those_of_the_divergence(name):
    for estimator, anchor in (("k2", "old"), ("k3", "rollout"), ("k1", "old")):
        batch = spoilt(0)
        (loss, gradient, _), (pulled_loss, pulled_gradient, _) = both(name, batch, estimator, anchor)
        expected, expected_gradient = of_divergence(batch, estimator, anchor)
        assert_close(pulled_loss - loss, expected, rtol=1e-9, atol=1e-12)
        assert_close(pulled_gradient - gradient, expected_gradient, rtol=1e-9, atol=1e-12)
        assert expected_gradient[1].any()


# Nats, on both sides of the limits of verl's k3: its derivative ends at -2.61 and 11, its clamp of x at 20.
EXTREMES = (-20.0, -15.0, -10.0, -2.62, -2.6, 0.0, 5.0, 10.9, 11.1, 15.0, 20.0)


def at_extremes(dtype):
    """A sequence whose tokens have `EXTREMES` as log-ratios and no advantage, so that only a pull has a gradient."""
    x = torch.tensor([EXTREMES], dtype=dtype)
    old_log_prob = torch.full_like(x, -25.0)
    mask = torch.ones_like(x, dtype=torch.bool)
    return {
        "log_prob": old_log_prob + x,
        "old_log_prob": old_log_prob,
        "advantages": torch.zeros_like(x),
        "response_mask": mask,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("estimator", DIVERGENCES)
def test_at_extreme_log_ratios_it_is_verls_own_penalty(estimator, dtype):
    batch = at_extremes(dtype)
    log_prob = batch["log_prob"].clone().requires_grad_(True)
    expected = kl_penalty(log_prob, batch["old_log_prob"], estimator).mean()
    expected.backward()
    words = ("+clipx=grpo", f"+clipx/pull={estimator}", "clipx.pull.coefficient=1")
    loss, gradient, _ = registered_loss(built_once(words), batch, loss_agg_mode="token-mean")
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)


def test_k3_pulls_no_token_beyond_its_limit():
    batch = at_extremes(torch.float64)
    words = ("+clipx=grpo", "+clipx/pull=k3", "clipx.pull.coefficient=0.001")
    _, gradient, _ = registered_loss(built_once(words), batch, loss_agg_mode="token-sum")
    pull = dict(zip(EXTREMES, gradient[0].tolist(), strict=True))
    # 0.001 (1 - e^2.6), and not 0.001 (1 - e^15) = -3269.
    assert pull[-2.6] == pytest.approx(-0.0124637, rel=1e-5)
    assert [pull[x] for x in (-20.0, -15.0, -10.0, -2.62, 11.1, 15.0, 20.0)] == [0.0] * 7


@pytest.mark.parametrize("name, own", [*((name, {}) for name in WITH_ONE), ("ipo", {"kl_tau": 0.1})])
def test_a_method_with_a_pull_of_its_own_refuses_another(name, own):
    with pytest.raises(Refusal, match=f"clipx.pull: {name} already has its own pull"):
        build(name, pull={}, **own)


def test_it_goes_with_a_held_target_and_through_pickle():
    method = build("grpo", hold={"value": 0.1}, pull={"estimator": "k3"}).method
    assert pickle.loads(pickle.dumps(method)) == method != build("grpo", hold={"value": 0.1}, pull={}).method
    assert method.parameters["pull"] == "k3 to old, times 0.001" and "hold" in method.parameters
    assert build("grpo", pull={"anchor": "rollout"}).asks_for == ("rollout_log_prob",)
