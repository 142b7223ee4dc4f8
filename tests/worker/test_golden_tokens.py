"""Token shaping, selection and Lopti's passes against their releases: composed configurations in, verl's loss out.

Lopti's passes run through verl's whole ppo_loss with verl's own KL term. Not covered: which update a worker makes when,
selection over a mini-batch, the current policy's probability in Advantage Reweighting, ties: nothing was recorded.
"""

import copy

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import agg_loss

from tests.composition import built_once
from tests.golden.cases import golden_cases, parametrize
from tests.golden.runs import per_token, run
from tests.golden.settings import overrides_of
from tests.jagged import micro_batch
from tests.worker.updates import loss_function, train
from verl_clipx.worker.layout import TokenPass
from verl_clipx.worker.step import OptimizerStep

LOPTI = golden_cases("lopti")
RELEASED_KL_CLAMP = 5


def assert_near(actual, expected, *, terms):
    """Equal to 1e-9 of the value, or to the rounding of a sum of terms of both signs."""
    rounding = 16 * torch.finfo(torch.float64).eps * terms.detach().abs().sum().item()
    assert_close(actual.detach(), expected.to(torch.float64), rtol=1e-9, atol=rounding)


def assert_clip_metrics(case, metrics):
    # The releases divide by (tokens + 1e-8).
    slack = 1e-9 + 1e-8 / case.inputs["response_mask"].sum().item()
    for name, atol in (("pg_clipfrac", 0), ("pg_clipfrac_lower", 0), ("ppo_kl", 1e-14)):
        actual = torch.tensor(metrics[f"actor/{name}"], dtype=torch.float64)
        assert_close(actual, case.expected[name].double(), rtol=slack, atol=atol)


@parametrize(golden_cases("ar"))
def test_reweighted_advantages(case):
    # Advantages do not depend on the current policy; one vector has none.
    inputs = {"log_prob": case.inputs["old_log_prob"], **case.inputs}
    advantages = per_token(built_once(overrides_of(case)).policy_loss.clipx, inputs).tokens.advantages
    # The release can also scale negative advantages; that is no part of the method.
    advantages = torch.where(advantages < 0, case.hyperparameters["neg_adv_weight"] * advantages, advantages)
    mask = case.inputs["response_mask"]
    assert_close(advantages[mask], case.expected["reweighted_advantages"][mask], rtol=1e-12, atol=0)
    if case.loss_agg_mode is None:
        # One vector records advantages alone.
        return
    found = run(case)
    assert_near(found.loss, case.expected["loss"], terms=found.tokens.loss / mask.sum())
    assert_close(found.gradient, case.expected["grad"], rtol=1e-9, atol=0)
    assert_clip_metrics(case, found.metrics)


@parametrize([*golden_cases("acpo_entropy_top"), *golden_cases("acpo_entropy_bottom")])
def test_selected_tokens(case):
    expected, mask = case.expected["selection_mask"].bool(), case.inputs["response_mask"]
    select = built_once(overrides_of(case)).policy_loss.clipx.select
    selected = select.selected(case.expected["entropy"], mask)
    assert torch.equal(selected, expected) and torch.equal(selected.sum(1), select.counts(mask))
    metrics = run(case, (*overrides_of(case), "clipx.metrics=all")).metrics
    assert metrics["clipx/selected_fraction"] == pytest.approx(float(expected.sum() / mask.sum()), rel=1e-6)
    found, loss, gradient = run(case), case.expected["loss"], case.expected["grad"]
    shares = selected / selected.sum(1, keepdim=True).clamp(min=1) / len(selected)
    if "loss" in case.nonfinite:
        # A sequence without tokens made the release's numbers NaN. It divides by all sequences, verl by those with a
        # token. The one token there is isn't clipped: the value -A * ratio is its own derivative.
        gradient = gradient.nan_to_num(0.0) * len(selected) / selected.any(1).sum()
        loss = gradient.sum()
        assert gradient.any()
    assert_near(found.loss, loss, terms=found.tokens.loss * shares)
    assert_close(found.gradient, gradient, rtol=1e-9, atol=0)
    assert_clip_metrics(case, found.metrics)


def token_passes(case):
    """The passes of the composed update by the release's names."""
    update = built_once(overrides_of(case)).policy_loss.clipx.update
    passes = [TokenPass(name, update.eta, update.equal) for name in update.passes]
    return dict(zip(("pass1", "pass2"), passes, strict=True))


def batch_of(case, name):
    """A pass's inputs: the second starts from the policy that the first one left."""
    inputs = {key: tensor for key, tensor in case.inputs.items() if key != "response_mask"}
    log_prob = inputs["log_prob"] if name == "pass1" else case.expected["log_prob_pass2"]
    return {**inputs, "log_prob": log_prob, "mask": case.inputs["response_mask"]}


def jagged_batch(batch):
    rows = list(range(len(batch["mask"])))
    return micro_batch(batch, rows, sequences=len(rows))


def tokens_of_pass(case, name):
    data, _ = jagged_batch(batch_of(case, name))
    mask = case.inputs["response_mask"]
    tokens = token_passes(case)[name].tokens(data)
    # Jagged sequences are padded to the longest response only.
    return torch.nn.functional.pad(tokens, (0, mask.shape[1] - tokens.shape[1]))


def beyond_released_clamp(case):
    reference, mask = case.expected["ref_log_prob"], case.inputs["response_mask"]
    log_probs = (case.inputs["log_prob"], case.expected["log_prob_pass2"])
    return any(((reference - log_prob).abs() > RELEASED_KL_CLAMP)[mask].any() for log_prob in log_probs)


def pass_of(case, name, *changes):
    """verl's whole loss of a pass."""
    # verl's ppo_loss writes the mini-batch's size into the configuration.
    config = copy.deepcopy(built_once((*overrides_of(case), *changes)))
    token_pass, batch = token_passes(case)[name], batch_of(case, name)
    step = OptimizerStep(token_pass, counted_tokens=float(token_pass.tokens(jagged_batch(batch)[0]).sum()))
    rows = list(range(len(batch["mask"])))
    extra = dict(reference=case.expected["ref_log_prob"], sequences=len(rows))
    return train(loss_function(config, step), batch, [[rows]], **extra)


def policy_gradient_terms(case, name):
    """Each token's term of the loss, for the rounding of their sum."""
    tokens, mask = tokens_of_pass(case, name), case.inputs["response_mask"]
    settings = built_once(overrides_of(case)).policy_loss.clipx
    advantages = torch.where(tokens, case.inputs["advantages"], 0.0)
    batch = {**batch_of(case, name), "advantages": advantages}
    inputs = {"response_mask": batch.pop("mask"), **batch}
    return per_token(settings, inputs).loss / mask.sum()


def released_kl(case, name):
    """Schulman's k3 estimate with the release's clamps, where verl clamps the log-ratio to +-20, and its gradient."""
    log_prob = batch_of(case, name)["log_prob"].clone().requires_grad_(True)
    log_ratio = (case.expected["ref_log_prob"] - log_prob).clamp(-RELEASED_KL_CLAMP, RELEASED_KL_CLAMP)
    estimate = (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
    divergence = torch.where(tokens_of_pass(case, name), estimate, 0.0)
    kl = agg_loss(divergence, case.inputs["response_mask"], case.loss_agg_mode)
    kl.backward()
    return kl.detach(), log_prob.grad


@pytest.mark.parametrize("name", ["pass1", "pass2"])
@parametrize(LOPTI)
def test_lopti_loss_of_each_pass(case, name):
    # ACPO's own port of the method splits the same way.
    of_port = case.expected[f"acpo_repo_{token_passes(case)[name].name}_mask"]
    assert torch.equal(tokens_of_pass(case, name), of_port.bool())
    coefficient, terms = case.hyperparameters["kl_loss_coef"], policy_gradient_terms(case, name)
    if beyond_released_clamp(case):
        policy_gradient, gradient, _ = pass_of(case, name, "actor_rollout_ref.actor.use_kl_loss=false")
        kl, of_kl = released_kl(case, name)
        loss, gradient = policy_gradient + coefficient * kl, gradient + coefficient * of_kl
    else:
        loss, gradient, metrics = pass_of(case, name)
        kl = torch.tensor(metrics["kl_loss"])
        policy_gradient = loss - coefficient * kl
        assert_close(kl, case.expected[f"{name}_kl"].double(), rtol=1e-9, atol=0)
    assert_near(policy_gradient, case.expected[f"{name}_pg"], terms=terms)
    assert_near(loss, case.expected[f"{name}_loss"], terms=terms)
    assert_close(gradient, case.expected[f"{name}_grad"], rtol=1e-9, atol=1e-16)


def test_an_edge_is_low_in_the_paper_and_not_in_the_release():
    (case,) = [case for case in LOPTI if case.name.startswith("lopti/edges")]
    old_log_prob, mask = case.inputs["old_log_prob"], case.inputs["response_mask"]
    equality = (old_log_prob.exp() == case.hyperparameters["eta"]) & mask
    assert equality.any()
    paper = built_once(("+clipx=grpo", "+clipx/update=lopti")).policy_loss.clipx.update
    low = TokenPass("low", paper.eta, paper.equal)
    data, _ = jagged_batch(batch_of(case, "pass1"))
    assert (low.tokens(data) == (case.expected["acpo_repo_low_mask"].bool() | equality)).all()
