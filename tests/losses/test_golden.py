"""Every method's loss, gradient, bounds and metrics against its reference: released functions, the papers' formulas.

Covers the composition of losses and controllers with verl's own aggregation. Does not cover the veRL-facing adapter,
statistics over several micro-batches or ranks, or bfloat16, for which no reference was recorded.

Where the reference is known to be wrong (`reference_bugs` in the manifest) the test says what it expects instead:
- acpo-empty-row-nan: a fully masked sequence made the reference's mean NaN; verl's aggregation drops it.
- dgpo-nan-grad: float32 gradients the reference made NaN; the float64 twin holds the intended ones.
"""

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import agg_loss

from tests.golden.cases import GoldenCase, golden_cases, golden_methods
from tests.losses.composition import (
    Method,
    Outcome,
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
from verl_clipx.controllers.controller import Controller
from verl_clipx.controllers.fixed import FixedBounds
from verl_clipx.losses.bounds import Bounds
from verl_clipx.losses.ratio import importance_ratio, saturation_limit
from verl_clipx.losses.regions import region_members

RELEASED_CLAMP = 20.0
RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def _acpo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    controller = AcpoController(
        alpha=hyper["variance_alpha"],
        epsilon_base=hyper["variance_base_clip"],
        epsilon_min=hyper["variance_clip_min"],
        epsilon_max=hyper["variance_clip_max"],
        bins=hyper["variance_num_bins"],
        bin_on="current",
        variance_epsilon=1e-8,
    )
    method = grpo_method(dual_clip=hyper["clip_ratio_c"], log_ratio_clamp=RELEASED_CLAMP)
    return method, controller, RELEASED_CLAMP


def _dapo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    method = grpo_method(dual_clip=hyper["clip_ratio_c"], log_ratio_clamp=RELEASED_CLAMP)
    return method, FixedBounds(1 - hyper["cliprange_low"], 1 + hyper["cliprange_high"]), RELEASED_CLAMP


def _acpo_cispo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    method = cispo_method(mask_low=1 - hyper["cliprange_low"], mask_high=1 + hyper["cliprange_high"])
    return method, FixedBounds(1 - hyper["clip_ratio_is_low"], 1 + hyper["clip_ratio_is_high"]), RELEASED_CLAMP


def _bapo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    controller = BapoController(
        target=hyper["adv_ratio_target"],
        contribution="ratio",
        weight="none",
        first="lower",
        last_step="clipped",
        lower_start=hyper["ratio_lower_start"],
        lower_stop=hyper["ratio_lower_max"],
        lower_step=hyper["ratio_lower_step"],
        upper_start=hyper["ratio_upper_start"],
        upper_stop=hyper["ratio_upper_max"],
        upper_step=hyper["ratio_upper_step"],
        epsilon=hyper["eps"],
    )
    method = grpo_method(dual_clip=hyper["clip_ratio_c"], log_ratio_clamp=RELEASED_CLAMP)
    return method, controller, RELEASED_CLAMP


def _dgpo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    method = dgpo_method(n=hyper["n"], m=hyper["m"], log_ratio_clamp=RELEASED_CLAMP)
    return method, _symmetric(case), RELEASED_CLAMP


def _dgpo_ppo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    method = grpo_method(dual_clip=case.hyperparameters["clip_ratio_c"], log_ratio_clamp=RELEASED_CLAMP)
    return method, _symmetric(case), RELEASED_CLAMP


def _verl_vanilla(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    method = grpo_method(dual_clip=case.hyperparameters["clip_ratio_c"], log_ratio_clamp=RELEASED_CLAMP)
    return method, _verl_bounds(case), RELEASED_CLAMP


def _verl_cispo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    return cispo_method(), _verl_bounds(case), RELEASED_CLAMP


def _paper_acpo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    controller = AcpoController(
        alpha=hyper["alpha"], epsilon_base=hyper["eps_b"], bins=hyper["bins"], bin_on=hyper["bin_on"]
    )
    return grpo_method(), controller, None


def _paper_bapo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    controller = BapoController(
        target=hyper["rho0"],
        contribution=hyper["denominator"],
        weight="rollout",
        first="upper",
        last_step="full",
        lower_start=hyper["a_minus"],
        lower_stop=hyper["b_minus"],
        lower_step=hyper["delta2"],
        upper_start=hyper["a_plus"],
        upper_stop=hyper["b_plus"],
        upper_step=hyper["delta1"],
    )
    return grpo_method(), controller, None


def _paper_ce_gppo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    return ce_gppo_method(beta_low=hyper["beta1"], beta_high=hyper["beta2"]), _symmetric(case), None


def _paper_aspo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    method = aspo_method(flip="both", weight_low=1 - hyper["e_lo"], weight_high=1 + hyper["e_hi"])
    return method, _symmetric(case), None


def _paper_aspo_posonly(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    hyper = case.hyperparameters
    method = aspo_method(
        flip="positive", weight_low=1 - hyper["e_lo"], weight_high=1 + hyper["e_hi"], negative_weight_high=None
    )
    return method, _symmetric(case), None


def _paper_dgpo(case: GoldenCase) -> tuple[Method, Controller, float | None]:
    return dgpo_method(n=case.hyperparameters["n"], m=case.hyperparameters["m"]), _symmetric(case), None


def _symmetric(case: GoldenCase) -> FixedBounds:
    return FixedBounds(1 - case.hyperparameters["eps_low"], 1 + case.hyperparameters["eps_high"])


def _verl_bounds(case: GoldenCase) -> FixedBounds:
    return FixedBounds(1 - case.hyperparameters["clip_ratio_low"], 1 + case.hyperparameters["clip_ratio_high"])


SETUPS = {
    "acpo": _acpo,
    "acpo_dapo": _dapo,
    "acpo_cispo": _acpo_cispo,
    "bapo": _bapo,
    "dgpo": _dgpo,
    "dgpo_ppo": _dgpo_ppo,
    "verl091_vanilla": _verl_vanilla,
    "verl091_cispo": _verl_cispo,
    "paper_acpo": _paper_acpo,
    "paper_bapo": _paper_bapo,
    "paper_grpo": lambda case: (grpo_method(), _symmetric(case), None),
    "paper_cispo": lambda case: (cispo_method(), _symmetric(case), None),
    "paper_gppo": lambda case: (gppo_method(), _symmetric(case), None),
    "paper_cegppo": _paper_ce_gppo,
    "paper_aspo": _paper_aspo,
    "paper_aspo_posonly": _paper_aspo_posonly,
    "paper_dgpo": _paper_dgpo,
}


def _run(case: GoldenCase) -> tuple[Outcome, Controller, float | None]:
    method, controller, clamp = SETUPS[case.name.split("/")[0]](case)
    outcome = compose(
        **case.inputs,
        method=method,
        controller=controller,
        log_ratio_clamp=clamp,
        loss_agg_mode=case.loss_agg_mode,
    )
    return outcome, controller, clamp


def _tolerance(case: GoldenCase) -> float:
    if case.name.startswith("paper_acpo/extreme"):
        # Ratios of e^25 without a clamp: the variance of shifted sums carries their rounding.
        return 1e-7
    if case.name.startswith("bapo/"):
        # Its token mean divides by (tokens + 1e-8).
        return RELATIVE_TOLERANCE[case.dtype] + 1e-8 / case.inputs["response_mask"].sum().item()
    return RELATIVE_TOLERANCE[case.dtype]


def _parametrize(*methods: str):
    cases = [case for method in methods for case in golden_cases(method)]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def _assert_close(actual, expected, rtol: float, atol: float = 0.0) -> None:
    assert_close(actual.to(torch.float64), expected.to(torch.float64), rtol=rtol, atol=atol)


# Token shaping and selection, which losses don't know: tests/training/test_golden_tokens.py.
TOKENS = {"ar", "lopti", "acpo_entropy_top", "acpo_entropy_bottom"}


def test_every_method_with_golden_vectors_is_tested():
    assert golden_methods() == set(SETUPS) | TOKENS | {"agg_loss"}


FINITE = [case for method in SETUPS for case in golden_cases(method) if not {"loss", "grad"} & set(case.nonfinite)]
EMPTY_ROWS = [case for method in SETUPS for case in golden_cases(method) if "loss" in case.nonfinite]
OVERFLOWS = [case for case in golden_cases("dgpo") if "grad" in case.nonfinite]


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float64)[mask].mean()


@pytest.mark.parametrize("case", FINITE, ids=lambda case: case.name)
def test_gradient(case):
    outcome, _, _ = _run(case)
    _assert_close(outcome.gradient, case.expected["grad"], _tolerance(case))


@pytest.mark.parametrize("case", [case for case in FINITE if "loss" in case.expected], ids=lambda case: case.name)
def test_loss(case):
    outcome, _, _ = _run(case)
    advantages, mask = case.inputs["advantages"], case.inputs["response_mask"]
    expected = case.expected["loss"].to(torch.float64)
    if case.name.startswith("dgpo/"):
        expected = expected + _value_without_gradient(case, outcome)
    # The loss sums terms of both signs, so its rounding is relative to their size and not to what is left of them.
    rounding = torch.finfo(case.dtype).eps * (outcome.weight * advantages).abs()[mask].mean().item()
    _assert_close(outcome.loss, expected, _tolerance(case), atol=8 * rounding)


def _value_without_gradient(case: GoldenCase, outcome: Outcome) -> torch.Tensor:
    """What DGPO's release adds to the value for tokens that its clamp leaves without a gradient.

    It takes A times the clamped ratio there; here the value is -F * A, so it has no part without a gradient.
    """
    advantages, mask = case.inputs["advantages"].to(torch.float64), case.inputs["response_mask"]
    ratio = outcome.ratio.to(torch.float64)
    beyond = (ratio.log().abs() > RELEASED_CLAMP) & (outcome.weight == 0) & mask
    clamped = ratio.log().clamp(-RELEASED_CLAMP, RELEASED_CLAMP).exp()
    return torch.where(beyond, clamped * advantages, 0.0).sum() / mask.sum()


@pytest.mark.parametrize("case", EMPTY_ROWS, ids=lambda case: case.name)
def test_fully_masked_sequences_are_dropped_where_the_release_made_nan(case):
    outcome, _, _ = _run(case)
    mask = case.inputs["response_mask"]
    # The release divides by all sequences, verl by those with a response.
    scale = len(mask) / mask.any(-1).sum()
    expected = case.expected["grad"].nan_to_num(0.0) * scale
    _assert_close(outcome.gradient, expected, _tolerance(case))
    # Only one token has a response and it isn't clipped: the value A * ratio is its own derivative.
    _assert_close(outcome.loss, expected.sum(), _tolerance(case))


@pytest.mark.parametrize("case", OVERFLOWS, ids=lambda case: case.name)
def test_float32_overflow_is_finite_where_the_release_made_nan(case):
    outcome, _, _ = _run(case)
    (twin,) = [other for other in golden_cases("dgpo") if other.name == case.name.removesuffix("__fp32")]
    log_ratio = twin.inputs["log_prob"] - twin.inputs["old_log_prob"]
    # Beyond e^42.6 this package's float32 ratio saturates, the twin's float64 one doesn't: there the expectation is
    # Eq. 9's right branch at the saturated ratio.
    limit = saturation_limit(torch.float32)
    hyper = case.hyperparameters
    saturated = (1 + hyper["eps_high"]) ** (1 / hyper["m"]) * torch.tensor(limit * (1 - 1 / hyper["m"])).exp().item()
    at_limit = -saturated * twin.inputs["advantages"] / twin.inputs["response_mask"].sum()
    right = (log_ratio > limit) & (twin.inputs["advantages"] > 0)
    assert right.any()
    expected = torch.where(right, at_limit, twin.expected["grad"])
    # Below float32's smallest number the expectation is 0.
    _assert_close(outcome.gradient, expected, _tolerance(case), atol=torch.finfo(torch.float32).tiny)


@pytest.mark.parametrize("case", [case for case in FINITE if "coef" in case.expected], ids=lambda case: case.name)
def test_gradient_weight(case):
    outcome, _, _ = _run(case)
    counts = case.inputs["response_mask"] & (case.inputs["advantages"] != 0)
    _assert_close(outcome.weight[counts], case.expected["coef"][counts], _tolerance(case))


@_parametrize("acpo", "paper_acpo")
def test_acpo_bins(case):
    outcome, controller, _ = _run(case)
    mask = case.inputs["response_mask"]
    count = outcome.statistics.view(3, controller.bins)[0]
    sigma, epsilon = outcome.decision.view(2, controller.bins)
    _assert_close(count, case.expected["bin_count"], 0.0)
    used = count > 0
    rtol = _tolerance(case)
    # A bin of equal ratios has a variance of 0, or 1e-16 times its mean squared deviation by rounding.
    atol = 1e-7 if case.name.startswith("paper_acpo/extreme") else 1e-12
    if "bin_std" in case.expected:
        _assert_close(sigma[used], case.expected["bin_std"][used], rtol, atol)
    else:
        _assert_close(sigma[used], case.expected["nonempty_bin_std"], rtol, atol)
        _assert_close(epsilon[used], case.expected["nonempty_bin_eps"], rtol, atol)
    assert (epsilon[~used] == controller.epsilon_base).all()
    # Outside the mask the release keeps epsilon_base, which nothing reads.
    _assert_close((outcome.bounds.high - 1.0)[mask], case.expected["eps_per_token"][mask], rtol, atol)
    _assert_close((1.0 - outcome.bounds.low)[mask], case.expected["eps_per_token"][mask], rtol, atol)


@_parametrize("bapo", "paper_bapo")
def test_bapo_search(case):
    outcome, _, _ = _run(case)
    c_low, c_high, _, share = outcome.decision
    _assert_close(c_low, case.expected["c_low"], 1e-12)
    _assert_close(c_high, case.expected["c_high"], 1e-12)
    if "pos_contrib" in case.expected:
        positive, negative = case.expected["pos_contrib"], case.expected["neg_contrib"]
        _assert_close(share, positive / (positive + negative), 1e-9)
    elif case.expected["pos_neg_ratio"].isfinite():
        # P / (N + 1e-8), from which P / (P + N) follows up to that 1e-8.
        ratio = case.expected["pos_neg_ratio"]
        _assert_close(share, ratio / (1 + ratio), 1e-7)
    else:
        assert share == 1.0


@_parametrize("acpo", "acpo_dapo", "acpo_cispo", "bapo", "dgpo", "dgpo_ppo", "verl091_vanilla")
def test_clip_fractions_follow_from_the_regions(case):
    outcome, _, clamp = _run(case)
    inputs, mask = case.inputs, case.inputs["response_mask"]
    bounds = outcome.bounds
    if case.name.startswith("acpo_cispo"):
        # The release reports what PPO with its own bounds would clip, not what the weight's bounds do.
        hyper = case.hyperparameters
        bounds = Bounds(1 - hyper["cliprange_low"], 1 + hyper["cliprange_high"])
    members = region_members(outcome.ratio, inputs["advantages"], bounds)
    clipped = (members["LN"] | members["HP"]).bool()
    dual_clipped = (inputs["advantages"] < 0) & (outcome.ratio > case.hyperparameters["clip_ratio_c"])
    log_ratio, _ = importance_ratio(inputs["log_prob"], inputs["old_log_prob"], clamp)
    # The references divide a masked sum by (tokens + 1e-8).
    rtol = RELATIVE_TOLERANCE[case.dtype] + 1e-8 / mask.sum().item()
    # The mean log-ratio sums terms of both signs.
    rounding = torch.finfo(case.dtype).eps * log_ratio[mask].abs().mean().item()
    _assert_close(_masked_mean(clipped, mask), case.expected["pg_clipfrac"], rtol)
    _assert_close(_masked_mean(dual_clipped, mask), case.expected["pg_clipfrac_lower"], rtol)
    _assert_close(_masked_mean(-log_ratio, mask), case.expected["ppo_kl"], rtol, atol=8 * rounding)


def test_aggregation_is_the_one_the_references_used():
    (case,) = golden_cases("agg_loss")
    matrix, mask = case.expected["loss_mat"], case.inputs["response_mask"]
    for key, expected in case.expected.items():
        if key == "loss_mat":
            continue
        repository, mode = key.split("|")
        actual = agg_loss(loss_mat=matrix, loss_mask=mask, loss_agg_mode=mode)
        if mode == "seq-mean-token-sum-norm" and repository in ("acpo", "bapo"):
            # They divide the sum over sequences, verl their mean.
            actual = actual * mask.any(-1).sum()
        _assert_close(actual, expected, 1e-8)
