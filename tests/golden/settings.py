"""The golden vectors' hyperparameters as the overrides that a user would write.

A parameter is overridden only where a vector departs from the published value, which the group should have by itself:
so a wrong value in a group fails the vectors. A method's test states those of its references, as `GOLDEN`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.golden.cases import GoldenCase

# The manifest's name of a parameter, with what makes a parameter of its value where that is another one.
Reference = str | tuple[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Setup:
    """A reference as a configuration.

    Args:
        group: of the method, whose published values its test states.
        keys: from a parameter below clipx to what the reference calls it.
        always: overrides that every vector needs.
        published: the values of the modifiers among them.
    """

    group: str
    keys: Mapping[str, Reference]
    always: tuple[str, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self, case: GoldenCase) -> tuple[str, ...]:
        """The overrides of a vector, aggregation included."""
        # Their tests import this module.
        from tests.losses.methods.facts import facts

        published, chosen = {**facts("PUBLISHED")[self.group], **self.published}, []
        for parameter, reference in self.keys.items():
            name, convert = (reference, lambda value: value) if isinstance(reference, str) else reference
            if name in case.hyperparameters:
                value = convert(case.hyperparameters[name])
                if parameter not in published or published[parameter] != value:
                    chosen.append(f"clipx.{parameter}={'null' if value is None else value}")
        mode = () if case.loss_agg_mode is None else (f"actor_rollout_ref.actor.loss_agg_mode={case.loss_agg_mode}",)
        return (f"+clipx={self.group}", *self.always, *chosen, *mode)


def below(epsilon: float) -> float:
    """The bound under the ratio 1 as a decimal, 0.8 for 0.2."""
    return round(1 - epsilon, 12)


def above(epsilon: float) -> float:
    """The bound over the ratio 1 as a decimal, 1.2 for 0.2."""
    return round(1 + epsilon, 12)


def bounds(low: str, high: str) -> dict[str, Reference]:
    """The keys of fixed clip bounds, from the names of a reference's epsilons."""
    return {"clip_low": (low, below), "clip_high": (high, above)}


EPSILONS = bounds("eps_low", "eps_high")
OF_RELEASES = {**bounds("cliprange_low", "cliprange_high"), "dual_clip": "clip_ratio_c"}
# The papers' formulas do not clamp the log-ratio.
UNCLAMPED = ("clipx.log_ratio_clamp=null",)

ACTOR, SHAPING = "actor_rollout_ref.actor", "+clipx/shaping=advantage_reweighting"
SHAPING_KEYS = OF_RELEASES | {"shaping.alpha": "alpha"}

TOKEN_SETUPS: Mapping[str, Setup] = {
    # The release of AR-Lopti does not clamp the log-ratio.
    "ar": Setup("grpo", SHAPING_KEYS, (SHAPING, *UNCLAMPED), {"shaping.alpha": 0.3}),
    "lopti": Setup(
        "grpo",
        # The release writes "the high group first" as a negative eta.
        SHAPING_KEYS
        | {"update.eta": ("eta", abs), "update.order": ("eta", lambda eta: "low_first" if eta > 0 else "high_first")},
        (
            *(SHAPING, "+clipx/update=lopti_reference", *UNCLAMPED),
            *(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.001", f"{ACTOR}.kl_loss_type=low_var_kl"),
        ),
        {"shaping.alpha": 0.3, "update.eta": 0.5},
    ),
    **{
        f"acpo_entropy_{end}": Setup(
            "dapo",
            OF_RELEASES | {"select.ratio": "entropy_k_ratio"},
            (f"+clipx/select={kept}_entropy",),
            {"select.ratio": ratio},
        )
        for end, kept, ratio in (("top", "high", 0.2), ("bottom", "low", 0.8))
    },
}


def setups() -> dict[str, Setup]:
    """The references of methods, which their tests state, by the name that the manifest has."""
    from tests.losses.methods.facts import facts

    return facts("GOLDEN")


def overrides_of(case: GoldenCase) -> tuple[str, ...]:
    """The overrides under which the plugin computes a vector."""
    return {**setups(), **TOKEN_SETUPS}[case.name.split("/")[0]].overrides(case)
