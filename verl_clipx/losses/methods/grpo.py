"""GRPO (arXiv 2402.03300): PPO's clipped surrogate. With clip_high=1.28 it is DAPO's clip-higher."""

from dataclasses import dataclass

from torch import Tensor, minimum, where

from verl_clipx.losses.base.method import Bounds, FixedBounds, Method, dual_clip_parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


@dataclass(frozen=True, kw_only=True)
class ClippedSurrogate(Method):
    """PPO's clipped surrogate, min(r A, clip(r, low, high) A), with an optional dual clip.

    F = 0 where A > 0 and r > high, where A < 0 and r < low, and where A < 0 and r > dual_clip. Elsewhere F = r.

    Source: PPO (arXiv 1707.06347), Eq. 7; as a gradient weight, DGPO, Eq. 2. Dual clip: arXiv 1912.09729.
    """

    dual_clip: float | None = dual_clip_parameter(None, "paper")

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        A = t.advantages
        r = t.free_ratio
        # The clamped ratio does not change with log_prob, so it passes no gradient.
        is_clipped = bounds.clipped(r, A) | ~t.unclamped
        if self.dual_clip is not None:
            is_clipped = is_clipped | ((A < 0) & (r > self.dual_clip))
        return where(is_clipped, 0.0, r)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return max(-A r, -A clip(r)), and at most -A dual_clip where A < 0."""
        A = t.advantages
        value = bounds.surrogate(t.ratio, A)
        if self.dual_clip is None:
            return value
        return where(A < 0, minimum(value, -A * self.dual_clip), value)


@dataclass(frozen=True, kw_only=True)
class Grpo(
    ClippedSurrogate, FixedBounds, name="grpo", source="GRPO (arXiv 2402.03300); DAPO (arXiv 2503.14476), Eq. 10"
):
    """PPO's clip with separate lower and upper bounds (DAPO's clip-higher with clip_high 1.28)."""

    bounds_width = Width(mask=True)

    dual_clip: float | None = dual_clip_parameter(3.0, "choice")
