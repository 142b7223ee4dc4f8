"""Token shaping and selection against their releases: composed configurations in, verl's loss out.

Covers, of the releases of AR-Lopti and of ACPO (its entropy baselines): reweighted advantages, selected tokens, the
tokens of both Lopti passes, and with them losses, gradients and clip metrics. Lopti's passes run through verl's whole
ppo_loss with verl's own KL term, but for the vector whose log-ratios to the reference policy exceed the release's
clamp of 5, narrower than verl's: there the release's KL term is written out. One vector records reweighted advantages
alone, with negative ones scaled, which is no part of the method. Does not cover which update a worker makes when,
selection over a mini-batch, the current policy's probability in Advantage Reweighting, or ties, for which nothing was
recorded.
"""

import copy

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import agg_loss

from tests.composition import built_once
from tests.golden.cases import golden_cases
from tests.golden.runs import per_token, run
from tests.golden.settings import overrides_of
from tests.jagged import micro_batch
from tests.worker.updates import loss_function, train
from verl_clipx.worker.layout import TokenPass
from verl_clipx.worker.step import OptimizerStep

REWEIGHTING = golden_cases("ar")
# One vector records advantages alone.
REWEIGHTED_LOSSES = [case for case in REWEIGHTING if case.loss_agg_mode is not None]
ENTROPY = [*golden_cases("acpo_entropy_top"), *golden_cases("acpo_entropy_bottom")]
ENTROPY_LOSSES = [case for case in ENTROPY if "loss" not in case.nonfinite]
EMPTY_ROWS = [case for case in ENTROPY if "loss" in case.nonfinite]
LOPTI = golden_cases("lopti")
RELEASED_KL_CLAMP = 5


def parametrize(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


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


def reweighted(case, tokens=None):
    """The advantages that the loss sees, of all tokens or of some."""
    settings = built_once(overrides_of(case)).policy_loss.clipx
    advantages = case.inputs["advantages"]
    if tokens is not None:
        advantages = torch.where(tokens, advantages, 0.0)
    # Advantages do not depend on the current policy; one vector has none.
    inputs = {"log_prob": case.inputs["old_log_prob"], **case.inputs, "advantages": advantages}
    return per_token(settings, inputs).tokens.advantages


@pytest.mark.slow
@parametrize(REWEIGHTING)
def test_reweighted_advantages(case):
    advantages = reweighted(case)
    # The release can also scale negative advantages; that is no part of the method.
    advantages = torch.where(advantages < 0, case.hyperparameters["neg_adv_weight"] * advantages, advantages)
    mask = case.inputs["response_mask"]
    assert_close(advantages[mask], case.expected["reweighted_advantages"][mask], rtol=1e-12, atol=0)


@parametrize(REWEIGHTED_LOSSES)
def test_loss_of_reweighted_advantages(case):
    found, mask = run(case), case.inputs["response_mask"]
    assert_near(found.loss, case.expected["loss"], terms=found.tokens.loss / mask.sum())
    assert_close(found.gradient, case.expected["grad"], rtol=1e-9, atol=0)
    assert_clip_metrics(case, found.metrics)


def selected(case):
    """The tokens that the loss selects."""
    return selection_of(case).selected(case.expected["entropy"], case.inputs["response_mask"])


def selection_of(case):
    return built_once(overrides_of(case)).policy_loss.clipx.select


@pytest.mark.slow
@parametrize(ENTROPY)
def test_selected_tokens(case):
    expected, mask = case.expected["selection_mask"].bool(), case.inputs["response_mask"]
    assert (selected(case) == expected).all()
    assert_close(selected(case).sum(1), selection_of(case).counts(mask), rtol=0, atol=0)
    metrics = run(case, (*overrides_of(case), "clipx.metrics=all")).metrics
    assert metrics["clipx/selected_fraction"] == pytest.approx(float(expected.sum() / mask.sum()), rel=1e-6)


@parametrize(ENTROPY_LOSSES)
def test_loss_of_selected_tokens(case):
    found, selection = run(case), selected(case)
    shares = selection / selection.sum(1, keepdim=True).clamp(min=1) / len(selection)
    assert_near(found.loss, case.expected["loss"], terms=found.tokens.loss * shares)
    assert_close(found.gradient, case.expected["grad"], rtol=1e-9, atol=0)
    assert_clip_metrics(case, found.metrics)


@parametrize(EMPTY_ROWS)
def test_sequences_without_tokens_are_dropped_where_the_release_made_nan(case):
    found, selection = run(case), selected(case)
    # The release divides by all sequences, verl by those with a token.
    expected = case.expected["grad"].nan_to_num(0.0) * len(selection) / selection.any(1).sum()
    assert expected.any()
    assert_close(found.gradient, expected, rtol=1e-9, atol=0)
    # The one token there is isn't clipped: the value -A * ratio is its own derivative.
    assert_close(found.loss, expected.sum(), rtol=1e-9, atol=0)
    assert_clip_metrics(case, found.metrics)


def token_passes(case):
    """The passes of the composed update by the release's names."""
    eta, equal = update(case).eta, update(case).equal
    passes = [TokenPass(name, eta, equal) for name in update(case).passes]
    return dict(zip(("pass1", "pass2"), passes, strict=True))


def update(case):
    return built_once(overrides_of(case)).policy_loss.clipx.update


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


@pytest.mark.slow
@parametrize(LOPTI)
def test_lopti_groups(case):
    mask = case.inputs["response_mask"]
    groups = {}
    for name, token_pass in token_passes(case).items():
        tokens = groups[token_pass.name] = tokens_of_pass(case, name)
        assert (tokens[mask] == case.expected[f"{name}_kl_mask"].bool()[mask]).all()
        advantages = reweighted(case, tokens)
        assert_close(advantages[mask], case.expected[f"{name}_advantages"][mask], rtol=1e-12, atol=0)
    # ACPO's own port of the method splits the same way.
    assert (groups["low"] == case.expected["acpo_repo_low_mask"].bool()).all()
    assert (groups["high"] == case.expected["acpo_repo_high_mask"].bool()).all()


def beyond_released_clamp(case):
    log_ratios = [
        case.expected["ref_log_prob"] - case.inputs["log_prob"],
        case.expected["ref_log_prob"] - case.expected["log_prob_pass2"],
    ]
    return any((one.abs() > RELEASED_KL_CLAMP)[case.inputs["response_mask"]].any() for one in log_ratios)


KL_BEYOND_CLAMP = [case for case in LOPTI if beyond_released_clamp(case)]
KL_WITHIN_CLAMP = [case for case in LOPTI if not beyond_released_clamp(case)]


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


@pytest.mark.parametrize("name", ["pass1", "pass2"])
@parametrize(KL_WITHIN_CLAMP)
def test_lopti_loss_of_each_pass(case, name):
    loss, gradient, metrics = pass_of(case, name)
    terms = policy_gradient_terms(case, name)
    assert_near(loss, case.expected[f"{name}_loss"], terms=terms)
    kl = torch.tensor(metrics["kl_loss"])
    assert_close(kl, case.expected[f"{name}_kl"].double(), rtol=1e-9, atol=0)
    assert_near(loss - case.hyperparameters["kl_loss_coef"] * kl, case.expected[f"{name}_pg"], terms=terms)
    assert_close(gradient, case.expected[f"{name}_grad"], rtol=1e-9, atol=1e-16)


def released_kl(log_prob, ref_log_prob):
    """Schulman's k3 estimate with the release's clamps; verl clamps the log-ratio to +-20."""
    log_ratio = (ref_log_prob - log_prob).clamp(-RELEASED_KL_CLAMP, RELEASED_KL_CLAMP)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


@pytest.mark.parametrize("name", ["pass1", "pass2"])
@parametrize(KL_BEYOND_CLAMP)
def test_lopti_loss_of_each_pass_beyond_the_release_s_kl_clamp(case, name):
    policy_gradient, gradient, _ = pass_of(case, name, "actor_rollout_ref.actor.use_kl_loss=false")
    tokens, mask = tokens_of_pass(case, name), case.inputs["response_mask"]
    log_prob = batch_of(case, name)["log_prob"].clone().requires_grad_(True)
    divergence = torch.where(tokens, released_kl(log_prob, case.expected["ref_log_prob"]), 0.0)
    kl = case.hyperparameters["kl_loss_coef"] * agg_loss(divergence, mask, case.loss_agg_mode)
    kl.backward()
    terms = policy_gradient_terms(case, name)
    assert_near(policy_gradient, case.expected[f"{name}_pg"], terms=terms)
    assert_near(policy_gradient + kl.detach(), case.expected[f"{name}_loss"], terms=terms)
    assert_close(gradient + log_prob.grad, case.expected[f"{name}_grad"], rtol=1e-9, atol=1e-16)


def test_an_edge_is_low_in_the_paper_and_not_in_the_release():
    (case,) = [case for case in LOPTI if case.name.startswith("lopti/edges")]
    old_log_prob, mask = case.inputs["old_log_prob"], case.inputs["response_mask"]
    equality = (old_log_prob.exp() == case.hyperparameters["eta"]) & mask
    assert equality.any()
    paper = built_once(("+clipx=grpo", "+clipx/update=lopti")).policy_loss.clipx.update
    low = TokenPass("low", paper.eta, paper.equal)
    data, _ = jagged_batch(batch_of(case, "pass1"))
    assert (low.tokens(data) == (case.expected["acpo_repo_low_mask"].bool() | equality)).all()
