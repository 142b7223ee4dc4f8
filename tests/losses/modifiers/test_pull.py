"""A pull under every method that has none of its own: value and gradient are the method's and those of the divergence,
by autograd through verl's registry; which methods refuse it. Not covered: that the receipt counts it
(tests/training/worker/test_receipt.py), a training, a replay.
"""

import pickle

import pytest
import torch
from torch.testing import assert_close

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


@pytest.mark.parametrize("name, own", [*((name, {}) for name in WITH_ONE), ("ipo", {"kl_tau": 0.1})])
def test_a_method_with_a_pull_of_its_own_refuses_another(name, own):
    with pytest.raises(Refusal, match=f"clipx.pull: {name} has a pull of its own"):
        build(name, pull={}, **own)


def test_it_goes_with_a_held_target_and_through_pickle():
    method = build("grpo", hold={"value": 0.1}, pull={"estimator": "k3"}).method
    assert pickle.loads(pickle.dumps(method)) == method != build("grpo", hold={"value": 0.1}, pull={}).method
    assert method.parameters["pull"] == "k3 to old, times 0.001" and "hold" in method.parameters
    assert build("grpo", pull={"anchor": "rollout"}).asks_for == ("rollout_log_prob",)
