"""Every method's golden vectors through the product: a composed configuration in, the loss from verl's registry out.

Covers losses, gradients, weights, bounds, metrics and verl's aggregation. Bounds, shares and fractions are read from
the metrics, weights and bounds per token from the function behind the public contract. Not covered: statistics over
several micro-batches or ranks; bfloat16, for which no reference was recorded; token shaping and selection
(test_golden_tokens.py). Where the reference is known to be wrong (`reference_bugs` in the manifest), its test says so.
"""

import torch
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.cases import GoldenCase, golden_cases, golden_methods, parametrize
from tests.golden.runs import Run, registered_loss, run
from tests.golden.settings import TOKEN_SETUPS, overrides_of, setups
from verl_clipx.base.tokens import saturation_limit

RELEASED_CLAMP = 20.0
RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}


def tolerance(case: GoldenCase) -> float:
    if case.name.startswith("paper_acpo/extreme"):
        # Ratios of e^25 without a clamp: the variance of shifted sums carries their rounding.
        return 1e-7
    if case.name.startswith("bapo/"):
        # Its token mean divides by (tokens + 1e-8).
        return RELATIVE_TOLERANCE[case.dtype] + 1e-8 / case.inputs["response_mask"].sum().item()
    return RELATIVE_TOLERANCE[case.dtype]


def near(actual, expected, rtol: float, atol: float = 0.0) -> None:
    actual = torch.as_tensor(actual, dtype=torch.float64)
    assert_close(actual, expected.to(torch.float64).reshape(actual.shape), rtol=rtol, atol=atol)


SETUPS = setups()
ALL = {method: golden_cases(method) for method in SETUPS}
FINITE = [case for cases in ALL.values() for case in cases if not {"loss", "grad"} & set(case.nonfinite)]
EMPTY_ROWS = [case for cases in ALL.values() for case in cases if "loss" in case.nonfinite]
OVERFLOWS = [case for case in ALL["dgpo"] if "grad" in case.nonfinite]


def of(*methods: str) -> list[GoldenCase]:
    return [case for method in methods for case in ALL[method]]


def test_every_method_with_golden_vectors_is_tested():
    assert golden_methods() == set(SETUPS) | set(TOKEN_SETUPS) | {"agg_loss"}


@parametrize(FINITE)
def test_gradient_weight_and_loss(case):
    found = run(case)
    near(found.gradient, case.expected["grad"], tolerance(case))
    advantages, mask = case.inputs["advantages"], case.inputs["response_mask"]
    if "coef" in case.expected:
        counts = mask & (advantages != 0)
        near(found.tokens.weight[counts], case.expected["coef"][counts], tolerance(case))
    if "eps_per_token" in case.expected:
        # Of equal ratios ACPO's variance is 0, or 1e-16 times the mean squared deviation by rounding. Outside the mask
        # the release keeps epsilon_base, which nothing reads.
        atol = 1e-7 if case.name.startswith("paper_acpo/extreme") else 1e-12
        for width in (found.tokens.bounds.high - 1.0, 1.0 - found.tokens.bounds.low):
            near(width.expand_as(mask)[mask], case.expected["eps_per_token"][mask], tolerance(case), atol)
    if "loss" in case.expected:
        expected = case.expected["loss"].to(torch.float64)
        if case.name.startswith("dgpo/"):
            expected = expected + value_without_gradient(case, found)
        # The loss sums terms of both signs, so its rounding is relative to their size and not to what is left of them.
        rounding = torch.finfo(case.dtype).eps * (found.tokens.weight * advantages).abs()[mask].mean().item()
        near(found.loss, expected, tolerance(case), atol=8 * rounding)


def value_without_gradient(case: GoldenCase, found: Run) -> torch.Tensor:
    """What DGPO's release adds to the value for tokens that its clamp leaves without a gradient.

    It takes A times the clamped ratio there; here the value is -F * A, so it has no part without a gradient.
    """
    advantages, mask = case.inputs["advantages"].to(torch.float64), case.inputs["response_mask"]
    log_ratio = found.tokens.tokens.free_ratio.to(torch.float64).log()
    beyond = (log_ratio.abs() > RELEASED_CLAMP) & (found.tokens.weight == 0) & mask
    clamped = log_ratio.clamp(-RELEASED_CLAMP, RELEASED_CLAMP).exp()
    return torch.where(beyond, clamped * advantages, 0.0).sum() / mask.sum()


@parametrize(EMPTY_ROWS)
def test_fully_masked_sequences_are_dropped_where_the_release_made_nan(case):
    found = run(case)
    mask = case.inputs["response_mask"]
    # The release divides by all sequences, verl by those with a response.
    scale = len(mask) / mask.any(-1).sum()
    expected = case.expected["grad"].nan_to_num(0.0) * scale
    assert expected.any()
    near(found.gradient, expected, tolerance(case))
    # Only one token has a response and it isn't clipped: the value A * ratio is its own derivative.
    near(found.loss, expected.sum(), tolerance(case))


@parametrize(OVERFLOWS)
def test_float32_overflow_is_finite_where_the_release_made_nan(case):
    (twin,) = [other for other in ALL["dgpo"] if other.name == case.name.removesuffix("__fp32")]
    log_ratio = twin.inputs["log_prob"] - twin.inputs["old_log_prob"]
    # Beyond e^42.6 this package's float32 ratio saturates, the twin's float64 one doesn't: there the expectation is
    # Eq. 9's right branch at the saturated ratio.
    limit = saturation_limit(torch.float32)
    m, eps = (case.hyperparameters[name] for name in ("m", "eps_high"))
    saturated = (1 + eps) ** (1 / m) * torch.tensor(limit * (1 - 1 / m)).exp().item()
    at_limit = -saturated * twin.inputs["advantages"] / twin.inputs["response_mask"].sum()
    right = (log_ratio > limit) & (twin.inputs["advantages"] > 0)
    assert right.any()
    expected = torch.where(right, at_limit, twin.expected["grad"])
    # Below float32's smallest number the expectation is 0.
    near(run(case).gradient, expected, tolerance(case), atol=torch.finfo(torch.float32).tiny)


@parametrize(of("bapo", "paper_bapo"))
def test_bapo_search(case):
    found = run(case)
    share = found.metrics["clipx/positive_share_after"]
    for name, bound in zip(("c_low", "c_high"), found.tokens.bounds, strict=True):
        near(found.metrics[f"clipx/{name}"], case.expected[name], 1e-12)
        near(bound, case.expected[name], 1e-12)
    if "pos_contrib" in case.expected:
        positive, negative = case.expected["pos_contrib"], case.expected["neg_contrib"]
        near(share, positive / (positive + negative), 1e-9)
    elif case.expected["pos_neg_ratio"].isfinite():
        # P / (N + 1e-8), from which P / (P + N) follows up to that 1e-8.
        ratio = case.expected["pos_neg_ratio"]
        near(share, ratio / (1 + ratio), 1e-7)
    else:
        assert share == 1.0


# What PPO would clip is what its own group reports, here of the release that both come from.
PPO = {"acpo_cispo": "acpo_dapo", "dgpo": "dgpo_ppo"}


@parametrize(of("acpo", "acpo_dapo", "acpo_cispo", "bapo", "dgpo", "dgpo_ppo", "verl091_vanilla", "verl091_cispo"))
def test_clip_fractions(case):
    method, mask = case.name.split("/")[0], case.inputs["response_mask"]
    own = run(case).metrics
    ppo = run(case, SETUPS[PPO[method]].overrides(case)).metrics if method in PPO else own
    clipped = ppo["actor/pg_clipfrac"]
    if method == "verl091_cispo":
        own = run(case, (*overrides_of(case), "clipx.metrics=all")).metrics
        # verl counts every clamped weight there, the plugin in every method what PPO would clip.
        clipped += own["clipx/region_fraction/LP"] + own["clipx/region_fraction/HN"]
    elif method == "dgpo":
        assert own["actor/pg_clipfrac"] == clipped
    # The references divide a masked sum by (tokens + 1e-8).
    rtol = RELATIVE_TOLERANCE[case.dtype] + 1e-8 / mask.sum().item()
    near(clipped, case.expected["pg_clipfrac"], rtol)
    # Not logged where there is no dual clip.
    near(ppo.get("actor/pg_clipfrac_lower", 0.0), case.expected["pg_clipfrac_lower"], rtol)
    # The mean log-ratio sums terms of both signs.
    log_ratio = (case.inputs["log_prob"] - case.inputs["old_log_prob"]).clamp(-RELEASED_CLAMP, RELEASED_CLAMP)
    rounding = torch.finfo(case.dtype).eps * log_ratio[mask].abs().mean().item()
    near(own["actor/ppo_kl"], case.expected["ppo_kl"], rtol, atol=8 * rounding)


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
        near(actual, expected, 1e-8)
