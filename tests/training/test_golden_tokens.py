"""Token shaping and selection against their releases, composed with the adapter's loss and verl's own aggregation.

Covers, of the releases of AR-Lopti and of ACPO (its entropy baselines): reweighted advantages, selected tokens, the
tokens of both Lopti passes, and with them losses, gradients and clip metrics. Lopti's KL term is written out here with
the release's clamps, since verl's own differs. Does not cover how a worker calls these functions, selection over a
mini-batch, the current policy's probability in Advantage Reweighting, or ties, for which nothing was recorded.
"""

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import agg_loss

from tests.golden.cases import golden_cases
from verl_clipx.losses.regions import region_members
from verl_clipx.tokens.advantage_reweighting import reweighted_advantages
from verl_clipx.tokens.entropy_selection import count_per_sequence, select_per_sequence
from verl_clipx.tokens.lopti import low_probability
from verl_clipx.training.config import GrpoConfig
from verl_clipx.training.contract import evaluate
from verl_clipx.training.methods import METHODS

REWEIGHTING = golden_cases("ar")
# One vector records advantages alone.
REWEIGHTED_LOSSES = [case for case in REWEIGHTING if case.loss_agg_mode is not None]
ENTROPY = [*golden_cases("acpo_entropy_top"), *golden_cases("acpo_entropy_bottom")]
ENTROPY_LOSSES = [case for case in ENTROPY if "loss" not in case.nonfinite]
EMPTY_ROWS = [case for case in ENTROPY if "loss" in case.nonfinite]
LOPTI = golden_cases("lopti")


def parametrize(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def surrogate(case, log_prob, advantages, *, log_ratio_clamp):
    """The clipped surrogate with the release's bounds, per token over the full mask."""
    hyper = case.hyperparameters
    config = GrpoConfig(
        clip_low=1 - hyper["cliprange_low"],
        clip_high=1 + hyper["cliprange_high"],
        dual_clip=hyper["clip_ratio_c"],
        log_ratio_clamp=log_ratio_clamp,
    )
    return evaluate(
        METHODS["grpo"],
        config,
        old_log_prob=case.inputs["old_log_prob"],
        log_prob=log_prob,
        advantages=advantages,
        mask=case.inputs["response_mask"],
    )


def assert_near(actual, expected, *, terms):
    """Equal to 1e-9 of the value, or to the rounding of a sum of terms of both signs."""
    rounding = 16 * torch.finfo(torch.float64).eps * terms.detach().abs().sum().item()
    assert_close(actual.detach(), expected.to(torch.float64), rtol=1e-9, atol=rounding)


def assert_clip_metrics(case, result):
    mask = case.inputs["response_mask"]
    members = region_members(result.tokens.ratio, result.tokens.advantages, result.bounds)
    clipped = (members["LN"] | members["HP"]).bool()
    dual_clipped = (result.tokens.advantages < 0) & (result.tokens.ratio > case.hyperparameters["clip_ratio_c"])
    # The releases divide by (tokens + 1e-8).
    slack = 1e-9 + 1e-8 / mask.sum().item()
    assert_close(clipped[mask].double().mean(), case.expected["pg_clipfrac"], rtol=slack, atol=0)
    assert_close(dual_clipped[mask].double().mean(), case.expected["pg_clipfrac_lower"], rtol=slack, atol=0)
    assert_close(-result.tokens.log_ratio[mask].mean(), case.expected["ppo_kl"], rtol=slack, atol=1e-14)


def reweighted(case):
    inputs = case.inputs
    return reweighted_advantages(inputs["advantages"], inputs["old_log_prob"], alpha=case.hyperparameters["alpha"])


@parametrize(REWEIGHTING)
def test_reweighted_advantages(case):
    advantages = reweighted(case)
    # The release can also scale negative advantages; that is no part of the method.
    advantages = torch.where(advantages < 0, case.hyperparameters["neg_adv_weight"] * advantages, advantages)
    mask = case.inputs["response_mask"]
    assert_close(advantages[mask], case.expected["reweighted_advantages"][mask], rtol=1e-12, atol=0)


@parametrize(REWEIGHTED_LOSSES)
def test_loss_of_reweighted_advantages(case):
    log_prob = case.inputs["log_prob"].clone().requires_grad_(True)
    mask = case.inputs["response_mask"]
    result = surrogate(case, log_prob, reweighted(case), log_ratio_clamp=None)
    loss = agg_loss(result.loss, mask, case.loss_agg_mode)
    loss.backward()
    assert_near(loss, case.expected["loss"], terms=result.loss / mask.sum())
    assert_close(log_prob.grad, case.expected["grad"], rtol=1e-9, atol=0)
    assert_clip_metrics(case, result)


def selected(case):
    hyper = case.hyperparameters
    keep = "highest" if hyper.get("use_entropy_top_k") else "lowest"
    mask = case.inputs["response_mask"]
    selection = select_per_sequence(case.expected["entropy"], mask, keep=keep, fraction=hyper["entropy_k_ratio"])
    count = count_per_sequence(mask, fraction=hyper["entropy_k_ratio"])
    assert_close(selection.sum(1), count, rtol=0, atol=0)
    return selection


@parametrize(ENTROPY)
def test_selected_tokens(case):
    assert (selected(case) == case.expected["selection_mask"].bool()).all()


@parametrize(ENTROPY_LOSSES)
def test_loss_of_selected_tokens(case):
    log_prob = case.inputs["log_prob"].clone().requires_grad_(True)
    selection = selected(case)
    result = surrogate(case, log_prob, case.inputs["advantages"], log_ratio_clamp=20.0)
    loss = agg_loss(result.loss, selection, case.loss_agg_mode)
    loss.backward()
    shares = selection / selection.sum(1, keepdim=True).clamp(min=1) / len(selection)
    assert_near(loss, case.expected["loss"], terms=result.loss * shares)
    assert_close(log_prob.grad, case.expected["grad"], rtol=1e-9, atol=0)
    assert_clip_metrics(case, result)


@parametrize(EMPTY_ROWS)
def test_sequences_without_tokens_are_dropped_where_the_release_made_nan(case):
    log_prob = case.inputs["log_prob"].clone().requires_grad_(True)
    selection = selected(case)
    result = surrogate(case, log_prob, case.inputs["advantages"], log_ratio_clamp=20.0)
    loss = agg_loss(result.loss, selection, case.loss_agg_mode)
    loss.backward()
    # The release divides by all sequences, verl by those with a token.
    expected = case.expected["grad"].nan_to_num(0.0) * len(selection) / selection.any(1).sum()
    assert expected.any()
    assert_close(log_prob.grad, expected, rtol=1e-9, atol=0)
    # The one token there is isn't clipped: the value -A * ratio is its own derivative.
    assert_close(loss.detach(), expected.sum(), rtol=1e-9, atol=0)
    assert_clip_metrics(case, result)


def passes(case):
    """log_prob and tokens of the first and the second pass; the release writes "high first" as a negative eta."""
    inputs, eta = case.inputs, case.hyperparameters["eta"]
    low = low_probability(inputs["old_log_prob"], eta=abs(eta), equal=False) & inputs["response_mask"]
    high = inputs["response_mask"] & ~low
    first, second = (low, high) if eta > 0 else (high, low)
    return {"pass1": (inputs["log_prob"], first), "pass2": (case.expected["log_prob_pass2"], second)}


def released_kl(log_prob, ref_log_prob):
    """Schulman's k3 estimate with the release's clamps; verl clamps the log-ratio to +-20."""
    log_ratio = (ref_log_prob - log_prob).clamp(-5, 5)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


@parametrize(LOPTI)
def test_lopti_groups(case):
    for name, (_, tokens) in passes(case).items():
        mask = case.inputs["response_mask"]
        assert (tokens[mask] == case.expected[f"{name}_kl_mask"].bool()[mask]).all()
        advantages = torch.where(tokens, reweighted(case), 0.0)
        assert_close(advantages[mask], case.expected[f"{name}_advantages"][mask], rtol=1e-12, atol=0)
    low = low_probability(case.inputs["old_log_prob"], eta=abs(case.hyperparameters["eta"]), equal=False)
    # ACPO's own port of the method splits the same way.
    assert ((low & mask) == case.expected["acpo_repo_low_mask"].bool()).all()
    assert ((~low & mask) == case.expected["acpo_repo_high_mask"].bool()).all()


@pytest.mark.parametrize("name", ["pass1", "pass2"])
@parametrize(LOPTI)
def test_lopti_loss_of_each_pass(case, name):
    log_prob, tokens = passes(case)[name]
    log_prob = log_prob.clone().requires_grad_(True)
    mask = case.inputs["response_mask"]
    # The full mask normalises both terms of a pass.
    result = surrogate(case, log_prob, torch.where(tokens, reweighted(case), 0.0), log_ratio_clamp=None)
    policy_gradient = agg_loss(result.loss, mask, case.loss_agg_mode)
    divergence = torch.where(tokens, released_kl(log_prob, case.expected["ref_log_prob"]), 0.0)
    kl = agg_loss(divergence, mask, case.loss_agg_mode)
    loss = policy_gradient + case.hyperparameters["kl_loss_coef"] * kl
    loss.backward()
    terms = result.loss / mask.sum()
    assert_near(policy_gradient, case.expected[f"{name}_pg"], terms=terms)
    assert_near(kl, case.expected[f"{name}_kl"], terms=divergence / mask.sum())
    assert_near(loss, case.expected[f"{name}_loss"], terms=terms)
    assert_close(log_prob.grad, case.expected[f"{name}_grad"], rtol=1e-9, atol=1e-16)


def test_an_edge_is_low_in_the_paper_and_not_in_the_release():
    (case,) = [case for case in LOPTI if case.name.startswith("lopti/edges")]
    old_log_prob, mask = case.inputs["old_log_prob"], case.inputs["response_mask"]
    equality = (old_log_prob.exp() == case.hyperparameters["eta"]) & mask
    assert equality.any()
    paper = low_probability(old_log_prob, eta=case.hyperparameters["eta"], equal=True) & mask
    assert (paper == (case.expected["acpo_repo_low_mask"].bool() | equality)).all()
