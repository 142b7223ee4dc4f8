"""The configuration of every method, and the factory that the Hydra groups name as `_target_`."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_clipx.training.modifiers import AdvantageReweightingConfig, LoptiConfig, SelectionConfig, instance
from verl_clipx.training.parameters import choice, integer, number, optional, parameter, validate

NODE = "clipx"

# Ratios saturate at a log-ratio of 42.6 in float32 (losses/ratio.py), so that a larger clamp would clamp nothing.
LARGEST_CLAMP = 40.0

# Bounds on a ratio: a larger one cuts off what null leaves free.
LARGEST_BOUND = 1e6


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """What every method has.

    Raises:
        ValueError: when built with a value outside a parameter's range; names key, value and what is allowed.
    """

    method: ClassVar[str] = ""

    log_ratio_clamp: float | None = parameter(
        20.0,
        optional(number(at_least=1e-3, at_most=LARGEST_CLAMP)),
        "log importance-sampling ratios are clamped to plus or minus this, as verl does (20); null: not",
    )
    scope: str = parameter(
        "mini_batch",
        choice("mini_batch", "lagged", "micro_batch"),
        "over what the statistics behind adaptive bounds are taken: mini_batch (exact: the optimizer mini-batch of all "
        "ranks), lagged (the same update of the previous rollout batch, free), micro_batch (this one on this rank)",
    )
    lagged_average: float = parameter(
        0.0,
        number(at_least=0, at_most=0.999),
        "scope=lagged: weight of the past in an exponential average of the statistics; 0: the previous ones alone",
    )
    missing_state: str = parameter(
        "error",
        choice("error", "fresh"),
        "resuming from a checkpoint without a usable state of the bounds: an error, or a fresh start",
    )
    shaping: AdvantageReweightingConfig | None = parameter(
        None, optional(instance(AdvantageReweightingConfig)), "+clipx/shaping=advantage_reweighting"
    )
    select: SelectionConfig | None = parameter(
        None, optional(instance(SelectionConfig)), "+clipx/select=high_entropy or low_entropy"
    )
    update: LoptiConfig | None = parameter(None, optional(instance(LoptiConfig)), "+clipx/update=lopti")

    def __post_init__(self):
        validate(self, NODE)
        if self.lagged_average and self.scope != "lagged":
            raise ValueError(
                f"{NODE}.lagged_average={self.lagged_average:g} with {NODE}.scope={self.scope}: only scope=lagged "
                f"averages. Set {NODE}.scope=lagged, or {NODE}.lagged_average=0."
            )


@dataclass(frozen=True, kw_only=True)
class FixedBoundsConfig(MethodConfig):
    """Methods whose clip bounds are constants."""

    clip_low: float | None = parameter(
        0.8, optional(number(at_least=0, at_most=1)), "lower clip bound on the ratio; null: none"
    )
    clip_high: float | None = parameter(
        1.2, optional(number(at_least=1, at_most=LARGEST_BOUND)), "upper clip bound on the ratio; null: none"
    )


def dual_clip_parameter(default: float | None) -> Any:
    """The bound on the ratio of tokens with negative advantages (dual-clip PPO, arXiv 1912.09729)."""
    return parameter(
        default,
        optional(number(above=1, at_most=LARGEST_BOUND)),
        "tokens with A < 0 and a ratio above this get no gradient; null: off",
    )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(FixedBoundsConfig):
    """GRPO's asymmetric clip; with clip_high 1.28 it is DAPO's clip-higher."""

    method: ClassVar[str] = "grpo"

    dual_clip: float | None = dual_clip_parameter(3.0)


@dataclass(frozen=True, kw_only=True)
class CispoConfig(FixedBoundsConfig):
    """CISPO: the clip acts on the weight, no token is dropped (unless a mask is set)."""

    method: ClassVar[str] = "cispo"

    mask_low: float | None = parameter(
        None, optional(number(at_least=0, at_most=1)), "drop tokens with A < 0 and a ratio below this; null: none"
    )
    mask_high: float | None = parameter(
        None,
        optional(number(at_least=1, at_most=LARGEST_BOUND)),
        "drop tokens with A > 0 and a ratio above this; null: none",
    )


@dataclass(frozen=True, kw_only=True)
class GppoConfig(FixedBoundsConfig):
    """GPPO: clipped tokens keep the bound as their weight."""

    method: ClassVar[str] = "gppo"


@dataclass(frozen=True, kw_only=True)
class CeGppoConfig(FixedBoundsConfig):
    """CE-GPPO: clipped tokens keep a scaled bound as their weight."""

    method: ClassVar[str] = "ce_gppo"

    beta_low: float = parameter(
        0.75, number(at_least=0, at_most=1e3), "scale of the weight of tokens below the lower bound, A < 0"
    )
    beta_high: float = parameter(
        1.0, number(at_least=0, at_most=1e3), "scale of the weight of tokens above the upper bound, A > 0"
    )
    dual_clip: float | None = dual_clip_parameter(None)


@dataclass(frozen=True, kw_only=True)
class AspoConfig(FixedBoundsConfig):
    """ASPO: the reciprocal ratio as the weight of tokens with positive advantages."""

    method: ClassVar[str] = "aspo"

    flip: str = parameter(
        "positive", choice("positive", "both"), "tokens whose weight is the reciprocal ratio: those with A > 0, or all"
    )
    weight_low: float | None = parameter(
        None, optional(number(at_least=0, at_most=1e6)), "lower bound of a reciprocal weight; null: none"
    )
    weight_high: float | None = parameter(
        3.0, optional(number(at_least=1e-3, at_most=1e6)), "upper bound of a reciprocal weight; null: none"
    )
    negative_weight_high: float | None = parameter(
        3.0,
        optional(number(at_least=1e-3, at_most=1e6)),
        "upper bound of the weight of tokens that are not flipped; null: none",
    )

    def __post_init__(self):
        super().__post_init__()
        not_above(self, "weight_low", "weight_high")


@dataclass(frozen=True, kw_only=True)
class DgpoConfig(FixedBoundsConfig):
    """DGPO: the gradient decays outside the bounds instead of stopping."""

    method: ClassVar[str] = "dgpo"

    log_ratio_clamp: float | None = parameter(
        None,
        optional(number(at_least=1e-3, at_most=LARGEST_CLAMP)),
        "beyond this log ratio tokens whose weight is the ratio get no gradient (the release: 20); null: not",
    )
    n: float = parameter(
        1.0, number(at_least=1e-3, at_most=1e3), "decay below the lower bound: the weight falls with ratio^(n+1)"
    )
    m: float = parameter(
        2.0, number(at_least=1, at_most=1e3), "decay above the upper bound: the weight grows with ratio^(1-1/m)"
    )

    def __post_init__(self):
        super().__post_init__()
        for key in ("clip_low", "clip_high"):
            if not getattr(self, key):
                raise ValueError(f"{NODE}.{key}={getattr(self, key)!r}: DGPO scales its decay by the bound, set one.")


@dataclass(frozen=True, kw_only=True)
class AcpoConfig(MethodConfig):
    """ACPO: GRPO's clip with bounds per probability bin, from the spread of the ratio in the bin."""

    method: ClassVar[str] = "acpo"

    alpha: float = parameter(3.0, number(at_least=0, at_most=1e3), "epsilon of a bin = alpha * sigma + epsilon_base")
    epsilon_base: float = parameter(0.2, number(at_least=0, at_most=1e3), "epsilon of a bin without spread")
    epsilon_min: float | None = parameter(
        None, optional(number(at_least=0, at_most=1e3)), "epsilon is at least this; null: free"
    )
    epsilon_max: float | None = parameter(
        None, optional(number(at_least=0, at_most=1e6)), "epsilon is at most this; null: free"
    )
    bins: int = parameter(5, integer(at_least=1, at_most=1000), "number of equally wide probability bins")
    bin_on: str = parameter("old", choice("old", "current"), "the policy whose token probability chooses the bin")
    variance_epsilon: float = parameter(
        0.0, number(at_least=0, at_most=1), "added to the variance under the square root"
    )
    min_tokens: int = parameter(
        1, integer(at_least=1, at_most=1_000_000_000), "a bin with fewer tokens keeps epsilon_base"
    )
    dual_clip: float | None = dual_clip_parameter(None)

    def __post_init__(self):
        super().__post_init__()
        not_above(self, "epsilon_min", "epsilon_max")
        # Otherwise every bin's epsilon is epsilon_max, but for those with too few tokens, which have more.
        not_above(self, "epsilon_base", "epsilon_max")


@dataclass(frozen=True, kw_only=True)
class BapoConfig(MethodConfig):
    """BAPO: GRPO's clip with bounds searched until positive tokens contribute enough."""

    method: ClassVar[str] = "bapo"

    target: float = parameter(
        0.4,
        number(at_least=0, at_most=1e6),
        "the contribution of positive tokens that the search aims at; at most 1 for contribution=share",
    )
    contribution: str = parameter(
        "share",
        choice("share", "net", "ratio"),
        "of positive (P) and negative (N) tokens: share P/(P+N), net P/|P-N| (Eq. 8 as printed), ratio P/N (release)",
    )
    counted: str = parameter(
        "surrogate",
        choice("surrogate", "gradient"),
        "surrogate: every token counts with its clipped value (paper); gradient: only tokens with a live gradient",
    )
    weight: str = parameter(
        "old",
        choice("old", "rollout", "none"),
        "the probability that weighs a token's contribution: the old policy's, the rollout's, or none (release)",
    )
    first: str = parameter("upper", choice("upper", "lower"), "the bound that moves first (paper: upper)")
    last_step: str = parameter(
        "full", choice("full", "clipped"), "a last step that would leave the range: not taken, or clipped to its end"
    )
    lower_start: float = parameter(0.6, number(at_least=0, at_most=1), "where the lower bound starts")
    lower_stop: float = parameter(0.9, number(at_least=0, at_most=1), "how far the lower bound may rise")
    lower_step: float = parameter(0.02, number(at_least=1e-3, at_most=1), "step of the lower bound")
    upper_start: float = parameter(1.2, number(at_least=1, at_most=100), "where the upper bound starts")
    upper_stop: float = parameter(3.0, number(at_least=1, at_most=100), "how far the upper bound may rise")
    upper_step: float = parameter(0.05, number(at_least=1e-3, at_most=100), "step of the upper bound")
    epsilon: float = parameter(
        1e-8, number(at_least=0, at_most=1e3), "added to N in contribution=ratio (release: 1e-8)"
    )
    dual_clip: float | None = dual_clip_parameter(None)

    def __post_init__(self):
        super().__post_init__()
        if self.contribution == "share" and self.target > 1:
            raise ValueError(
                f"{NODE}.target={self.target:g} with {NODE}.contribution=share: a share is at most 1. Take a target "
                f"of at most 1, or {NODE}.contribution=ratio or net."
            )
        for side in ("lower", "upper"):
            not_above(self, f"{side}_start", f"{side}_stop")
            start, stop = getattr(self, f"{side}_start"), getattr(self, f"{side}_stop")
            step = getattr(self, f"{side}_step")
            if (stop - start) / step > 10_000:
                raise ValueError(f"{NODE}.{side}_step={step:g}: more than 10000 candidates; take a larger step.")


def not_above(config: MethodConfig, low: str, high: str) -> None:
    """Raises if one parameter is above another; null is above and below nothing.

    Args:
        config: a method's configuration.
        low, high: the parameters' names.

    Raises:
        ValueError: names both keys and their values.
    """
    first, second = getattr(config, low), getattr(config, high)
    if first is not None and second is not None and first > second:
        raise ValueError(f"{NODE}.{low}={first:g}: must not be above {NODE}.{high}={second:g}.")


def values(config: MethodConfig) -> dict[str, Any]:
    """The parameters of a configuration as a dictionary.

    Args:
        config: a method's configuration.

    Returns:
        Parameter name to value.
    """
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
