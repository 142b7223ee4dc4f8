"""CTPO (arXiv 2605.07331): PPO's clip on the ratio of a token's whole prefix, with bounds that widen along it."""

import math
from dataclasses import dataclass

from torch import Tensor, minimum, where

from verl_clipx.losses.base.method import LARGEST_CAP, Bounds, Method
from verl_clipx.losses.base.parameters import number, optional, parameter
from verl_clipx.losses.base.tokens import Tokens, saturate


@dataclass(frozen=True, kw_only=True)
class Ctpo(Method, name="ctpo", source="CTPO (arXiv 2605.07331), as its authors' loss cum-token-cumprod-la"):
    """PPO's clip on the product of the ratios up to and with the token.

    R_t = r_1 ... r_t, and the bounds of token t are exp(-width_low t^power) and exp(width_high t^power). F = 0 where
    A > 0 and R > high, where A < 0 and R < low, and where A < 0 and R > exp(width_dual t^power). Elsewhere F = R.
    log_ratio_clamp acts on each token before the product.
    """

    by_sequence = True
    bounds_on = "prefix's ratio"
    formula = ("exp(-{width_low} t^{power})", "exp({width_high} t^{power})")
    symbols = "t the token's position"

    width_low: float = parameter(
        0.025, number(above=0, at_most=5), "log-width of the first token's lower bound", "release"
    )
    width_high: float = parameter(
        0.05, number(above=0, at_most=5), "log-width of the first token's upper bound", "release"
    )
    width_dual: float | None = parameter(
        0.05,
        optional(number(above=0, at_most=math.log(LARGEST_CAP))),
        "log-width above which tokens with A < 0 get no gradient; null: no dual clip",
        "release",
        role="beside",
    )
    power: float = parameter(
        0.5,
        number(at_least=0, at_most=1),
        "how the log-widths grow with the position; 0: not at all",
        "release",
    )

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        scale = self._scale(t)
        return Bounds((-self.width_low * scale).exp(), (self.width_high * scale).exp())

    def bounded(self, t: Tokens) -> Tensor:
        """Return the prefix's ratio R, (sequences, length)."""
        return saturate(t.log_ratio.cumsum(-1)).exp()

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        R = self.bounded(t)
        is_clipped = bounds.clipped(R, A)
        if self.width_dual is not None:
            is_clipped = is_clipped | ((A < 0) & (self._dual_bound(t) < R))
        return where(is_clipped, 0.0, R)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return max(-A R, -A clip(R)), and at most -A exp(width_dual t^power) where A < 0."""
        A = t.advantages
        value = bounds.surrogate(self.bounded(t), A)
        if self.width_dual is None:
            return value
        return where(A < 0, minimum(value, -A * self._dual_bound(t)), value)

    def _dual_bound(self, t: Tokens) -> Tensor:
        """Return exp(width_dual t^power), above which tokens with A < 0 get no gradient, (sequences, length)."""
        return (self.width_dual * self._scale(t)).exp()

    def _scale(self, t: Tokens) -> Tensor:
        """Return t^power, (sequences, length). Positions are counted from 1, over the response's tokens alone."""
        return t.mask.cumsum(-1).clamp(min=1).to(t.ratio.dtype).pow(self.power)
