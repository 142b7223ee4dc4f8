"""Every method's golden vectors through the product: a composed configuration in, the loss from verl's registry out.
Where a reference is known to be wrong (`reference_bugs` in the manifest), its test says so. Not covered, since nothing
was recorded: several micro-batches, bfloat16, selection over a mini-batch, reweighting by the current policy, ties.
"""

import copy

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import agg_loss

from tests.composition import built_once
from tests.golden.cases import GoldenCase, golden_cases, golden_methods, parametrize
from tests.golden.runs import Run, per_token, registered_loss, run
from tests.golden.settings import TOKEN_SETUPS, overrides_of, setups
from tests.jagged import micro_batch
from tests.training.worker.updates import loss_function, train
from verl_clipx.losses.base.tokens import saturate
from verl_clipx.training.worker.plan import token_passes
from verl_clipx.training.worker.step import OptimizerStep

RELEASED_CLAMP = 20.0
RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def tolerance(case: GoldenCase) -> float:
    if case.name.startswith("paper_acpo/extreme"):
        # Ratios of e^25 without a clamp: the variance of shifted sums carries their rounding.
        return 1e-7
    if case.name.startswith("bapo/"):
        # Its token mean divides by (tokens + 1e-8).
        return RELATIVE_TOLERANCE[case.dtype] + 1e-8 / case.inputs["response_mask"].sum().item()
    if case.name.startswith("feynrl_p3o/"):
        # It adds 1e-8 to the sum of squares; what capped weight and pull leave of each other has more of it.
        return RELATIVE_TOLERANCE[case.dtype] + 2e-8
    return RELATIVE_TOLERANCE[case.dtype]


def assert_near(actual, expected, rtol: float, atol: float = 0.0) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    assert_close(actual, expected.to(torch.float64).reshape(actual.shape), rtol=rtol, atol=atol)


SETUPS = setups()
CASES_BY_METHOD = {method: golden_cases(method) for method in SETUPS}


def cases_of(*methods: str) -> list[GoldenCase]:
    return [case for method in methods for case in CASES_BY_METHOD[method]]


ALL_CASES = cases_of(*SETUPS)
FINITE_CASES = [case for case in ALL_CASES if not {"loss", "grad"} & set(case.nonfinite)]
CASES_WITH_EMPTY_ROWS = [case for case in ALL_CASES if "loss" in case.nonfinite]
OVERFLOWING_CASES = [case for case in cases_of("dgpo") if "grad" in case.nonfinite]


def test_every_method_with_golden_vectors_is_tested():
    assert golden_methods() == set(SETUPS) | set(TOKEN_SETUPS) | {"agg_loss"}


@parametrize(FINITE_CASES)
def test_gradient_weight_and_loss_are_the_references(case):
    result = run(case)
    assert_near(result.gradient, case.expected["grad"], tolerance(case))
    advantages, mask = case.inputs["advantages"], case.inputs["response_mask"]
    if "coef" in case.expected:
        counts = mask & (advantages != 0)
        assert_near(result.tokens.weight[counts], case.expected["coef"][counts], tolerance(case))
    if "eps_per_token" in case.expected:
        # Of equal ratios ACPO's variance is 0, or 1e-16 times the mean squared deviation by rounding. Outside the mask
        # the release keeps epsilon_base, which nothing reads.
        atol = 1e-7 if case.name.startswith("paper_acpo/extreme") else 1e-12
        for width in (result.tokens.bounds.high - 1.0, 1.0 - result.tokens.bounds.low):
            assert_near(width.expand_as(mask)[mask], case.expected["eps_per_token"][mask], tolerance(case), atol)
    if "loss" in case.expected:
        expected = case.expected["loss"].to(torch.float64)
        if case.name.startswith("dgpo/"):
            expected = expected + value_without_gradient(case, result)
        # The loss sums terms of both signs, so its rounding is relative to their size and not to what is left of them.
        rounding = torch.finfo(case.dtype).eps * (result.tokens.weight * advantages).abs()[mask].mean().item()
        assert_near(result.loss, expected, tolerance(case), atol=8 * rounding)


def value_without_gradient(case: GoldenCase, result: Run) -> torch.Tensor:
    """What DGPO's release adds to the value for tokens that its clamp leaves without a gradient.

    It takes A times the clamped ratio there; here the value is -F * A, so it has no part without a gradient.
    """
    advantages, mask = case.inputs["advantages"].to(torch.float64), case.inputs["response_mask"]
    log_ratio = result.tokens.tokens.free_ratio.to(torch.float64).log()
    beyond = (log_ratio.abs() > RELEASED_CLAMP) & (result.tokens.weight == 0) & mask
    clamped = log_ratio.clamp(-RELEASED_CLAMP, RELEASED_CLAMP).exp()
    return torch.where(beyond, clamped * advantages, 0.0).sum() / mask.sum()


@parametrize(CASES_WITH_EMPTY_ROWS)
def test_fully_masked_sequences_are_dropped_where_the_release_made_nan(case):
    result = run(case)
    mask = case.inputs["response_mask"]
    # The release divides by all sequences, verl by those with a response.
    scale = len(mask) / mask.any(-1).sum()
    expected = case.expected["grad"].nan_to_num(0.0) * scale
    assert expected.any()
    assert_near(result.gradient, expected, tolerance(case))
    # Only one token has a response and it isn't clipped: the value A * ratio is its own derivative.
    assert_near(result.loss, expected.sum(), tolerance(case))


@parametrize(OVERFLOWING_CASES)
def test_float32_overflow_is_finite_where_the_release_made_nan(case):
    (twin,) = [other for other in cases_of("dgpo") if other.name == case.name.removesuffix("__fp32")]
    log_ratio = twin.inputs["log_prob"] - twin.inputs["old_log_prob"]
    # Beyond e^42.6 this package's float32 ratio saturates, the twin's float64 one doesn't: there the expectation is
    # Eq. 9's right branch at the saturated ratio.
    limit = saturate(torch.tensor(torch.inf)).item()
    m = case.hyperparameters["m"]
    eps = case.hyperparameters["eps_high"]
    saturated = (1 + eps) ** (1 / m) * torch.tensor(limit * (1 - 1 / m)).exp().item()
    at_limit = -saturated * twin.inputs["advantages"] / twin.inputs["response_mask"].sum()
    right = (log_ratio > limit) & (twin.inputs["advantages"] > 0)
    assert right.any()
    expected = torch.where(right, at_limit, twin.expected["grad"])
    # Below float32's smallest number the expectation is 0.
    assert_near(run(case).gradient, expected, tolerance(case), atol=torch.finfo(torch.float32).tiny)


@parametrize(cases_of("bapo", "paper_bapo"))
def test_bapo_searches_the_references_bounds_and_share(case):
    result = run(case)
    share = result.metrics["clipx/positive_share_after"]
    for name, bound in zip(("c_low", "c_high"), result.tokens.bounds, strict=True):
        assert_near(result.metrics[f"clipx/{name}"], case.expected[name], 1e-12)
        assert_near(bound, case.expected[name], 1e-12)
    if "pos_contrib" in case.expected:
        positive, negative = case.expected["pos_contrib"], case.expected["neg_contrib"]
        assert_near(share, positive / (positive + negative), 1e-9)
    elif case.expected["pos_neg_ratio"].isfinite():
        # P / (N + 1e-8), from which P / (P + N) follows up to that 1e-8.
        ratio = case.expected["pos_neg_ratio"]
        assert_near(share, ratio / (1 + ratio), 1e-7)
    else:
        assert share == 1.0


# What PPO would clip is what its own group reports, here of the release that both come from.
PPO_OF_SAME_RELEASE = {"acpo_cispo": "acpo_dapo", "dgpo": "dgpo_ppo"}


@parametrize(cases_of("acpo", "acpo_dapo", "acpo_cispo", "bapo", "dgpo", "dgpo_ppo", "verl091_vanilla"))
def test_clip_fractions_are_the_references(case):
    method = case.name.split("/")[0]
    mask = case.inputs["response_mask"]
    own = run(case).metrics
    ppo = own
    if method in PPO_OF_SAME_RELEASE:
        ppo = run(case, SETUPS[PPO_OF_SAME_RELEASE[method]].overrides(case)).metrics
    clip_fraction = ppo["actor/pg_clipfrac"]
    if method == "dgpo":
        assert own["actor/pg_clipfrac"] == clip_fraction
    # The references divide a masked sum by (tokens + 1e-8).
    rtol = RELATIVE_TOLERANCE[case.dtype] + 1e-8 / mask.sum().item()
    assert_near(clip_fraction, case.expected["pg_clipfrac"], rtol)
    # Not logged where there is no dual clip.
    assert_near(ppo.get("actor/pg_clipfrac_lower", 0.0), case.expected["pg_clipfrac_lower"], rtol)
    # The mean log-ratio sums terms of both signs.
    log_ratio = (case.inputs["log_prob"] - case.inputs["old_log_prob"]).clamp(-RELEASED_CLAMP, RELEASED_CLAMP)
    rounding = torch.finfo(case.dtype).eps * log_ratio[mask].abs().mean().item()
    assert_near(own["actor/ppo_kl"], case.expected["ppo_kl"], rtol, atol=8 * rounding)


def test_aggregation_is_the_one_the_references_used():
    (case,) = golden_cases("agg_loss")
    matrix, mask = case.expected["loss_mat"], case.inputs["response_mask"]
    # At ratio 1 GRPO's loss of a token is -A.
    inputs = {name: torch.zeros_like(matrix) for name in ("log_prob", "old_log_prob")}
    inputs |= {"advantages": -matrix, "response_mask": mask}
    config = built_once(("+clipx=grpo", f"actor_rollout_ref.actor.loss_scale_factor={mask.shape[1]}"))
    for key, expected in case.expected.items():
        if key == "loss_mat":
            continue
        repository, mode = key.split("|")
        actual, _, _ = registered_loss(config, inputs, loss_agg_mode=mode)
        if mode == "seq-mean-token-sum-norm" and repository in ("acpo", "bapo"):
            # They divide the sum over sequences, verl their mean.
            actual = actual * mask.any(-1).sum()
        assert_near(actual, expected, 1e-8)


# Token shaping, selection and Lopti's passes; these run through verl's whole ppo_loss with verl's own KL term.

LOPTI_CASES = golden_cases("lopti")
RELEASED_KL_CLAMP = 5


def assert_near_sum(actual, expected, *, terms):
    """Assert that a sum of terms is equal to 1e-9 of the value, or to the rounding of a sum of terms of both signs."""
    rounding = 16 * torch.finfo(torch.float64).eps * terms.detach().abs().sum().item()
    assert_close(actual.detach(), expected.to(torch.float64), rtol=1e-9, atol=rounding)


def assert_clip_metrics(case, metrics):
    # The releases divide by (tokens + 1e-8).
    slack = 1e-9 + 1e-8 / case.inputs["response_mask"].sum().item()
    for name, atol in (("pg_clipfrac", 0), ("pg_clipfrac_lower", 0), ("ppo_kl", 1e-14)):
        actual = torch.tensor(metrics[f"actor/{name}"], dtype=torch.float64)
        assert_close(actual, case.expected[name].double(), rtol=slack, atol=atol)


@parametrize(golden_cases("ar"))
def test_reweighted_advantages_are_the_references(case):
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
    result = run(case)
    assert_near_sum(result.loss, case.expected["loss"], terms=result.tokens.value / mask.sum())
    assert_close(result.gradient, case.expected["grad"], rtol=1e-9, atol=0)
    assert_clip_metrics(case, result.metrics)


@parametrize([*golden_cases("acpo_entropy_top"), *golden_cases("acpo_entropy_bottom")])
def test_selected_tokens_are_the_references(case):
    expected, mask = case.expected["selection_mask"].bool(), case.inputs["response_mask"]
    select = built_once(overrides_of(case)).policy_loss.clipx.select
    selected = select.selected(case.expected["entropy"], mask)
    assert torch.equal(selected, expected) and torch.equal(selected.sum(1), select.kept_counts(mask))
    result = run(case)
    loss = case.expected["loss"]
    gradient = case.expected["grad"]
    shares = selected / selected.sum(1, keepdim=True).clamp(min=1) / len(selected)
    if "loss" in case.nonfinite:
        # A sequence without tokens made the release's numbers NaN. It divides by all sequences, verl by those with a
        # token. The one token there is isn't clipped: the value -A * ratio is its own derivative.
        gradient = gradient.nan_to_num(0.0) * len(selected) / selected.any(1).sum()
        loss = gradient.sum()
        assert gradient.any()
    assert_near_sum(result.loss, loss, terms=result.tokens.value * shares)
    assert_close(result.gradient, gradient, rtol=1e-9, atol=0)
    assert_clip_metrics(case, result.metrics)


def passes_of(case):
    """The passes of the composed update by the release's names."""
    return dict(zip(("pass1", "pass2"), token_passes(built_once(overrides_of(case)).policy_loss), strict=True))


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
    tokens = passes_of(case)[name].tokens(data)
    # Jagged sequences are padded to the longest response only.
    return torch.nn.functional.pad(tokens, (0, mask.shape[1] - tokens.shape[1]))


def beyond_released_clamp(case):
    reference, mask = case.expected["ref_log_prob"], case.inputs["response_mask"]
    log_probs = (case.inputs["log_prob"], case.expected["log_prob_pass2"])
    return any(((reference - log_prob).abs() > RELEASED_KL_CLAMP)[mask].any() for log_prob in log_probs)


def train_pass(case, name, *further_overrides):
    """Trains a pass by verl's whole loss, and returns its result."""
    # verl's ppo_loss writes the mini-batch's size into the configuration.
    config = copy.deepcopy(built_once((*overrides_of(case), *further_overrides)))
    token_pass = passes_of(case)[name]
    batch = batch_of(case, name)
    step = OptimizerStep(token_pass, counted_tokens=float(token_pass.tokens(jagged_batch(batch)[0]).sum()))
    rows = list(range(len(batch["mask"])))
    extra = dict(reference=case.expected["ref_log_prob"], sequences=len(rows))
    return train(loss_function(config, step), batch, [[rows]], **extra)


def policy_gradient_terms(case, name):
    """Each token's term of the loss, for the rounding of their sum."""
    tokens = tokens_of_pass(case, name)
    mask = case.inputs["response_mask"]
    settings = built_once(overrides_of(case)).policy_loss.clipx
    advantages = torch.where(tokens, case.inputs["advantages"], 0.0)
    batch = {**batch_of(case, name), "advantages": advantages}
    inputs = {"response_mask": batch.pop("mask"), **batch}
    return per_token(settings, inputs).value / mask.sum()


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
@parametrize(LOPTI_CASES)
def test_loptis_loss_of_each_pass_is_the_references(case, name):
    # ACPO's own port of the method splits the same way.
    mask_of_port = case.expected[f"acpo_repo_{passes_of(case)[name].name}_mask"]
    assert torch.equal(tokens_of_pass(case, name), mask_of_port.bool())
    coefficient = case.hyperparameters["kl_loss_coef"]
    terms = policy_gradient_terms(case, name)
    if beyond_released_clamp(case):
        policy_gradient, gradient, _ = train_pass(case, name, "actor_rollout_ref.actor.use_kl_loss=false")
        kl, gradient_of_kl = released_kl(case, name)
        loss = policy_gradient + coefficient * kl
        gradient = gradient + coefficient * gradient_of_kl
    else:
        loss, gradient, metrics = train_pass(case, name)
        kl = torch.tensor(metrics["kl_loss"])
        policy_gradient = loss - coefficient * kl
        assert_close(kl, case.expected[f"{name}_kl"].double(), rtol=1e-9, atol=0)
    assert_near_sum(policy_gradient, case.expected[f"{name}_pg"], terms=terms)
    assert_near_sum(loss, case.expected[f"{name}_loss"], terms=terms)
    assert_close(gradient, case.expected[f"{name}_grad"], rtol=1e-9, atol=1e-16)
