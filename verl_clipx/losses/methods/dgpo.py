"""DGPO (Eqs. 9-10): outside the bounds the gradient decays as a power of the ratio, instead of stopping."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, where

from verl_clipx.losses.base.method import NODE, Bounds, FixedBounds, clamp_parameter
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


def decay_parameter(default: float, at_least: float, at_most: float, meaning: str) -> Any:
    """Return a parameter that is an exponent of the decay. The arguments are as for `parameter` and `number`."""
    return parameter(default, number(at_least=at_least, at_most=at_most), meaning, "paper")


@dataclass(frozen=True, kw_only=True)
class Dgpo(FixedBounds, name="dgpo", source="DGPO (arXiv 2603.14389), Eq. 9-10"):
    """A gradient that decays as a power of the ratio outside the bounds.

    F = r (r / low)^n where A < 0 and r < low, r (high / r)^(1/m) where A > 0 and r > high, and r elsewhere. F is
    continuous at both bounds. With m = 1, its upper bound is constant, as in GPPO.
    """

    bounds_width = Width()

    log_ratio_clamp: float | None = clamp_parameter(
        None,
        "beyond this log ratio, tokens whose weight is the ratio get no gradient (release: 20); null: no clamp",
        "paper",
    )
    n: float = decay_parameter(1.0, 1e-3, 20, "decay below the lower bound: the weight falls with ratio^(n+1)")
    m: float = decay_parameter(2.0, 1, 100, "decay above the upper bound: the weight grows with ratio^(1-1/m)")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("clip_low", "clip_high"):
            if not getattr(self, key):
                raise Refusal(f"{NODE}.{key}", getattr(self, key), "DGPO scales its decay by the bound", "Set one.")

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        r = t.free_ratio
        is_below = (A < 0) & (r < bounds.low)
        is_above = (A > 0) & (r > bounds.high)
        # The clamped ratio does not change with log_prob, so it passes no gradient.
        weight = where(t.unclamped, r, 0.0)
        weight = where(is_below, r * (r / bounds.low) ** self.n, weight)
        return where(is_above, r * (bounds.high / r) ** (1 / self.m), weight)
