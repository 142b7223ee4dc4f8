"""The golden vectors' hyperparameters as the overrides that a user would write.

A key is overridden only where a vector departs from the published value, which the group should have by itself: so a
wrong value in a group fails the vectors. A method's test states those of its references, as `GOLDEN`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.golden.cases import GoldenCase

# A key that the group leaves to the user, or has at another value than every vector.
UNPUBLISHED = object()


@dataclass(frozen=True)
class Key:
    """One hyperparameter: its name in the manifest and below clipx, and the value for which no override is needed."""

    reference: str
    parameter: str
    published: Any = UNPUBLISHED
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Setup:
    """A reference as a configuration: Hydra groups, its hyperparameters, and overrides that every vector needs."""

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
# The papers' formulas do not clamp the log-ratio.
UNCLAMPED = ("clipx.log_ratio_clamp=null",)

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


def setups() -> dict[str, Setup]:
    """The references of methods, which their tests state, by the name that the manifest has."""
    # Their tests import this module.
    from tests.methods.facts import facts

    return facts("GOLDEN")


def overrides_of(case: GoldenCase) -> tuple[str, ...]:
    """The overrides under which the plugin computes a vector."""
    return {**setups(), **TOKEN_SETUPS}[case.name.split("/")[0]].overrides(case)
