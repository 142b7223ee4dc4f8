"""The golden vectors' hyperparameters as the overrides that a user would write.

A key is overridden only where a vector departs from the published value, which the group should have by itself: so a
wrong value in a group fails the vectors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.golden.cases import GoldenCase

# A key that the group leaves to the user, or has at another value than every vector.
UNPUBLISHED = object()


@dataclass(frozen=True)
class Key:
    """One hyperparameter of a reference.

    Args:
        reference: its name in the manifest.
        parameter: the plugin's key below clipx.
        published: the reference's value for which the group needs no override.
        convert: the reference's value to the plugin's.
    """

    reference: str
    parameter: str
    published: Any = UNPUBLISHED
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Setup:
    """A reference as a configuration of the plugin.

    Args:
        groups: Hydra groups, as in ("+clipx=acpo_reference",).
        keys: its hyperparameters; those that it lacks are left alone.
        always: overrides that every vector needs.
    """

    groups: tuple[str, ...]
    keys: tuple[Key, ...]
    always: tuple[str, ...] = ()

    def overrides(self, case: GoldenCase) -> tuple[str, ...]:
        """The overrides of a vector, aggregation included."""
        given = case.hyperparameters
        chosen = [
            f"clipx.{key.parameter}={written(key.convert(given[key.reference]))}"
            for key in self.keys
            if key.reference in given and given[key.reference] != key.published
        ]
        mode = () if case.loss_agg_mode is None else (f"actor_rollout_ref.actor.loss_agg_mode={case.loss_agg_mode}",)
        return (*self.groups, *self.always, *chosen, *mode)


def written(value: Any) -> str:
    """A value in Hydra's override grammar."""
    return "null" if value is None else str(value)


def below(epsilon: float) -> float:
    """The bound under the ratio 1 as a decimal, 0.8 for 0.2."""
    return round(1 - epsilon, 12)


def above(epsilon: float) -> float:
    """The bound over the ratio 1 as a decimal, 1.2 for 0.2."""
    return round(1 + epsilon, 12)


def bounds(low: str, high: str, *, published_high: Any = 0.2) -> tuple[Key, Key]:
    """The keys of fixed clip bounds, from the names of a reference's epsilons."""
    return Key(low, "clip_low", 0.2, below), Key(high, "clip_high", published_high, above)


EPSILONS = bounds("eps_low", "eps_high")
DUAL_CLIP = Key("clip_ratio_c", "dual_clip", 3.0)
DECAY = (Key("n", "n", 1), Key("m", "m", 2))
# The papers' formulas do not clamp the log-ratio.
UNCLAMPED = ("clipx.log_ratio_clamp=null",)

SETUPS: Mapping[str, Setup] = {
    "acpo": Setup(
        ("+clipx=acpo_reference",),
        (
            Key("variance_alpha", "alpha", 3.0),
            Key("variance_base_clip", "epsilon_base", 0.2),
            Key("variance_clip_min", "epsilon_min", 0.0),
            Key("variance_clip_max", "epsilon_max", 3.0),
            Key("variance_num_bins", "bins", 5),
            DUAL_CLIP,
        ),
    ),
    "acpo_dapo": Setup(("+clipx=dapo",), (*bounds("cliprange_low", "cliprange_high", published_high=0.28), DUAL_CLIP)),
    "acpo_cispo": Setup(
        ("+clipx=cispo_acpo",),
        (
            # The release's lower bound of 1 - 1 bounds nothing, which the group writes as null.
            Key("clip_ratio_is_low", "clip_low", 1.0, below),
            Key("clip_ratio_is_high", "clip_high", 0.45, above),
            Key("cliprange_low", "mask_low", 0.2, below),
            Key("cliprange_high", "mask_high", 0.3, above),
        ),
    ),
    "bapo": Setup(
        ("+clipx=bapo_reference",),
        (
            Key("adv_ratio_target", "target", 0.5),
            Key("ratio_lower_start", "lower_start", 0.8),
            Key("ratio_lower_max", "lower_stop", 0.95),
            Key("ratio_lower_step", "lower_step", 0.05),
            Key("ratio_upper_start", "upper_start", 1.2),
            Key("ratio_upper_max", "upper_stop", 2.0),
            Key("ratio_upper_step", "upper_step", 0.1),
            Key("eps", "epsilon", 1e-8),
            DUAL_CLIP,
        ),
    ),
    "dgpo": Setup(("+clipx=dgpo_reference",), (*EPSILONS, *DECAY)),
    "dgpo_ppo": Setup(("+clipx=grpo",), (*EPSILONS, DUAL_CLIP)),
    "verl091_vanilla": Setup(
        ("+clipx=dapo",), (*bounds("clip_ratio_low", "clip_ratio_high", published_high=0.28), DUAL_CLIP)
    ),
    "verl091_cispo": Setup(("+clipx=cispo",), bounds("clip_ratio_low", "clip_ratio_high")),
    "paper_acpo": Setup(
        ("+clipx=acpo",),
        (
            Key("alpha", "alpha", 3.0),
            Key("eps_b", "epsilon_base", 0.2),
            Key("bins", "bins", 5),
            Key("bin_on", "bin_on", "old"),
            Key("dual_clip", "dual_clip", None),
        ),
        UNCLAMPED,
    ),
    # pi_rollout weighs, and the vectors have the old policy for it: the group's weight=old and, in a test of its own,
    # weight=rollout.
    "paper_bapo": Setup(
        ("+clipx=bapo",),
        (
            Key("rho0", "target", 0.4),
            Key("denominator", "contribution", "share"),
            Key("order", "first", "upper_first", lambda order: order.removesuffix("_first")),
            Key("a_minus", "lower_start", 0.6),
            Key("b_minus", "lower_stop", 0.9),
            Key("delta2", "lower_step", 0.02),
            Key("a_plus", "upper_start", 1.2),
            Key("b_plus", "upper_stop", 3.0),
            Key("delta1", "upper_step", 0.05),
            Key("dual_clip", "dual_clip", None),
        ),
        UNCLAMPED,
    ),
    "paper_grpo": Setup(("+clipx=grpo",), EPSILONS, ("clipx.dual_clip=null", *UNCLAMPED)),
    "paper_cispo": Setup(("+clipx=cispo",), EPSILONS, UNCLAMPED),
    "paper_gppo": Setup(("+clipx=gppo",), EPSILONS, UNCLAMPED),
    "paper_cegppo": Setup(
        ("+clipx=ce_gppo",), (*EPSILONS, Key("beta1", "beta_low", 0.75), Key("beta2", "beta_high", 1.0)), UNCLAMPED
    ),
    # Not Eq. 6 of DGPO's paper as printed: the vectors share the group's reading of it, 1/ratio clamped to the caps.
    # They are a second opinion on the arithmetic, not on the reading.
    "paper_aspo": Setup(
        ("+clipx=aspo_dgpo",),
        (*EPSILONS, Key("e_lo", "weight_low", 0.33, below), Key("e_hi", "weight_high", 3.0, above)),
        UNCLAMPED,
    ),
    # The same bounds on 1/ratio with the flip of the authors' code, whose own cap is 3 for both signs.
    "paper_aspo_posonly": Setup(
        ("+clipx=aspo",),
        (*EPSILONS, Key("e_lo", "weight_low", UNPUBLISHED, below), Key("e_hi", "weight_high", UNPUBLISHED, above)),
        ("clipx.negative_weight_high=null", *UNCLAMPED),
    ),
    "paper_dgpo": Setup(("+clipx=dgpo",), (*EPSILONS, *DECAY)),
    "skyrl_rollout_is": Setup(("+clipx=two_sided",), bounds("eps_clip_low", "eps_clip_high")),
    "trl_vespo": Setup(
        ("+clipx=vespo",),
        (
            Key("k_pos", "k_positive", 2.0),
            Key("lambda_pos", "lambda_positive", 3.0),
            Key("k_neg", "k_negative", 3.0),
            Key("lambda_neg", "lambda_negative", 2.0),
        ),
    ),
    "ctpo": Setup(
        ("+clipx=ctpo",),
        (
            Key("la_clip_low", "width_low", 0.025),
            Key("la_clip_high", "width_high", 0.05),
            Key("la_clip_c", "width_dual", 0.05),
            Key("clip_ratio_la_power", "power", 0.5),
        ),
    ),
}

SHAPING = ("+clipx=grpo", "+clipx/shaping=advantage_reweighting")
SHAPING_KEYS = (
    *bounds("cliprange_low", "cliprange_high"),
    DUAL_CLIP,
    Key("alpha", "shaping.alpha", 0.3),
)
SELECTION_KEYS = (*bounds("cliprange_low", "cliprange_high", published_high=0.28), DUAL_CLIP)

TOKEN_SETUPS: Mapping[str, Setup] = {
    # The release of AR-Lopti does not clamp the log-ratio.
    "ar": Setup(SHAPING, SHAPING_KEYS, UNCLAMPED),
    "lopti": Setup(
        (*SHAPING, "+clipx/update=lopti_reference"),
        (
            *SHAPING_KEYS,
            Key("eta", "update.eta", 0.5, abs),
            # The release writes "the high group first" as a negative eta.
            Key("eta", "update.order", UNPUBLISHED, lambda eta: "low_first" if eta > 0 else "high_first"),
        ),
        (
            *UNCLAMPED,
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_coef=0.001",
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        ),
    ),
    "acpo_entropy_top": Setup(
        ("+clipx=dapo", "+clipx/select=high_entropy"), (*SELECTION_KEYS, Key("entropy_k_ratio", "select.ratio", 0.2))
    ),
    "acpo_entropy_bottom": Setup(
        ("+clipx=dapo", "+clipx/select=low_entropy"), (*SELECTION_KEYS, Key("entropy_k_ratio", "select.ratio", 0.8))
    ),
}


def overrides_of(case: GoldenCase) -> tuple[str, ...]:
    """The overrides under which the plugin computes a vector."""
    method = case.name.split("/")[0]
    return {**SETUPS, **TOKEN_SETUPS}[method].overrides(case)
