"""IPO of prime-rl: drops a token, whichever sign its advantage has, if its probability moved too far."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds, limit_parameter
from verl_clipx.losses.base.parameters import number, optional, parameter
from verl_clipx.losses.base.pull import WithPull
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width


def pull_parameter(default: float) -> Any:
    """Return the parameter `kl_tau`, which is the weight of a pull back to the old policy."""
    return parameter(
        default,
        number(at_least=0, at_most=100),
        "the weight of (log r)^2, whose gradient pulls every token back to the old policy; 0: no pull",
        "release",
        role="penalty",
    )


@dataclass(frozen=True, kw_only=True)
class MovedTooFar(WithPull):
    """Drops tokens that moved beyond the bounds, whichever sign the advantage has, and may pull every token back."""

    ratio_cap: float | None = limit_parameter(
        None, "upper bound of the ratio as the weight of tokens that are kept; null: no bound", "choice"
    )
    kl_tau: float = pull_parameter(0.0)

    @property
    def unconstrained_weight(self) -> bool:  # type: ignore[override]
        """Whether F may be 0 or less, which only the pull can make of it."""
        return self.kl_tau > 0

    def pull_on(self, t: Tokens, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Return kl_tau (log r)^2, and its derivative with respect to log_prob."""
        return self.kl_tau * t.log_ratio.square(), 2 * self.kl_tau * t.log_ratio

    def own_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return min(r, ratio_cap) for the tokens that are kept, and 0 for the others: (sequences, length)."""
        moved_by = self.bounded(t)
        weight = t.free_ratio
        is_dropped = (moved_by < bounds.low) | (moved_by > bounds.high)
        if self.ratio_cap is None:
            # The clamped ratio does not change with log_prob, so it passes no gradient.
            is_dropped = is_dropped | ~t.unclamped
        else:
            weight = weight.clamp(max=self.ratio_cap)
        return where(is_dropped, 0.0, weight)


@dataclass(frozen=True, kw_only=True)
class Ipo(MovedTooFar, name="ipo", source="prime-rl's default loss since September 2026 (its pull request 3586)"):
    """Drops tokens whose probability moved by more than a threshold, in either direction.

    With p the current and q the old probability, F = min(r, ratio_cap) where |p - q| <= threshold and F = 0 elsewhere.
    With kl_tau, every token is also pulled back to the old policy: kl_tau (log r)^2 is subtracted from the objective.
    Its derivative 2 kl_tau log r is a part of F, where it is divided by A. Where A is 0, traces show none of it, while
    the gradient has it.

    prime-rl measures from the policy that sampled.
    """

    bounds_on = "change of the token's probability"
    formula = ("-{threshold}", "{threshold}")
    bounds_width = Width(quantity="difference", parameters=("threshold",), every_sign=True)

    threshold: float | None = parameter(
        0.3,
        optional(number(at_least=0, at_most=1)),
        "tokens whose probability moved by more than this are dropped; null: no token",
        "release",
        role="high",
    )

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return the bounds -threshold and threshold on the change of the probability."""
        # No probability changes by more than 1.
        threshold = 1.0 if self.threshold is None else self.threshold
        return Bounds(-threshold, threshold)

    def bounded(self, t: Tokens) -> Tensor:
        """Return p - q, (sequences, length)."""
        p, q = t.probabilities
        return p - q
