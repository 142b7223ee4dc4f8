"""The golden vectors through the adapter that verl calls, under each method's configuration class.

Covers: gradient of the papers' formulas and of BAPO's released function, bounds of BAPO. Not covered: values, metrics
and the remaining references (tests/losses/test_golden.py compares all of them with the pieces).
"""

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

from tests.golden.cases import golden_cases
from verl_clipx.training.config import (
    AcpoConfig,
    AspoConfig,
    BapoConfig,
    CeGppoConfig,
    CispoConfig,
    DgpoConfig,
    GppoConfig,
    GrpoConfig,
)
from verl_clipx.training.contract import evaluate
from verl_clipx.training.methods import METHODS


def fixed(hyper):
    return {"clip_low": 1 - hyper["eps_low"], "clip_high": 1 + hyper["eps_high"]}


def paper_bapo(hyper):
    return BapoConfig(
        target=hyper["rho0"], contribution=hyper["denominator"], weight="old", dual_clip=None, log_ratio_clamp=None
    )


def released_bapo(hyper):
    return BapoConfig(
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
        dual_clip=hyper["clip_ratio_c"],
    )


ASPO = {"weight_low": 0.67, "weight_high": 4.0, "negative_weight_high": None, "log_ratio_clamp": None}

CONFIGS = {
    "paper_grpo": lambda h: GrpoConfig(**fixed(h), dual_clip=None, log_ratio_clamp=None),
    "paper_cispo": lambda h: CispoConfig(**fixed(h), log_ratio_clamp=None),
    "paper_gppo": lambda h: GppoConfig(**fixed(h), log_ratio_clamp=None),
    "paper_cegppo": lambda h: CeGppoConfig(**fixed(h), beta_low=h["beta1"], beta_high=h["beta2"], log_ratio_clamp=None),
    "paper_dgpo": lambda h: DgpoConfig(**fixed(h), n=h["n"], m=h["m"]),
    "paper_aspo": lambda h: AspoConfig(**fixed(h), flip="both", **ASPO),
    "paper_aspo_posonly": lambda h: AspoConfig(**fixed(h), flip="positive", **ASPO),
    "paper_acpo": lambda h: AcpoConfig(alpha=h["alpha"], epsilon_base=h["eps_b"], bins=h["bins"], log_ratio_clamp=None),
    "paper_bapo": paper_bapo,
    "bapo": released_bapo,
}

CASES = [(method, case) for method in CONFIGS for case in golden_cases(method)]


@pytest.mark.parametrize(("method", "case"), CASES, ids=[case.name for _, case in CASES])
def test_gradient_and_bounds(method, case):
    config = CONFIGS[method](case.hyperparameters)
    log_prob = case.inputs["log_prob"].clone().requires_grad_(True)
    mask = case.inputs["response_mask"]
    result = evaluate(
        METHODS[config.method],
        config,
        log_prob=log_prob,
        old_log_prob=case.inputs["old_log_prob"],
        advantages=case.inputs["advantages"],
        mask=mask,
    )
    agg_loss(result.loss, mask, case.loss_agg_mode).backward()
    # 1e-7: bins with ratios of e^20 lose digits in the variance; BAPO's masked mean adds 1e-8 to its denominator.
    torch.testing.assert_close(log_prob.grad.double(), case.expected["grad"], rtol=1e-7, atol=1e-12)
    for name, bound in (("c_low", result.bounds.low), ("c_high", result.bounds.high)):
        if name in case.expected:
            torch.testing.assert_close(bound.double(), case.expected[name].reshape(()), rtol=1e-9, atol=0)
