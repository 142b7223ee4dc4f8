"""IPO of prime-rl: drops a token, whichever sign its advantage has, if its probability moved too far."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.base.method import Bounds, Method
from verl_clipx.base.parameters import number, optional, parameter
from verl_clipx.base.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Ipo(Method, name="ipo", source="prime-rl's default loss since September 2026 (its pull request 3586)"):
    """Drops tokens whose probability moved by more than a threshold, in either direction.

    With p the current and q the old probability, F = r where |p - q| <= threshold and F = 0 elsewhere. With kl_tau,
    every token is also pulled back to the old policy: the objective loses kl_tau (log r)^2, and its gradient
    2 kl_tau log r, which F holds divided by A (traces show none of it where A is 0, while the gradient has it).

    prime-rl measures from the policy that sampled.
    """

    bounds_on = "change of the token's probability"
    formula = "-{threshold} to {threshold}"

    threshold: float | None = parameter(
        0.3,
        optional(number(at_least=0, at_most=1)),
        "tokens whose probability moved by more than this are dropped; null: no token",
        "release",
        role="high",
    )
    kl_tau: float = parameter(
        0.0,
        number(at_least=0, at_most=100),
        "the weight of (log r)^2, whose gradient pulls every token back to the old policy; 0: no pull",
        "release",
        role="penalty",
    )

    @property
    def unconstrained_weight(self) -> bool:  # type: ignore[override]
        """Whether F may be 0 or less: it may with the pull back."""
        return self.kl_tau > 0

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """The bounds on the change of the probability."""
        # No probability changes by more than 1.
        threshold = 1.0 if self.threshold is None else self.threshold
        return Bounds(-threshold, threshold)

    def bounded(self, t: Tokens) -> Tensor:
        """p - q."""
        # Log-probabilities that are none would overflow.
        return t.log_prob.exp().clamp(max=1.0) - t.old_log_prob.exp().clamp(max=1.0)

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        kept, A = self._kept(t, bounds), t.advantages
        if not self.kl_tau:
            return kept
        return where(A == 0, kept, kept - self._pull(t) / where(A == 0, 1.0, A))

    def gradient(self, t: Tokens, weight: Tensor) -> Tensor:
        of_weight = super().gradient(t, weight)
        # Where A is 0, F can't hold the pull.
        return where(t.advantages == 0, -self._pull(t), of_weight) if self.kl_tau else of_weight

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """kl_tau (log r)^2 - A r, the second only of tokens that are kept."""
        of_kept = super().loss_value(t, bounds, self._kept(t, bounds))
        return of_kept + self.kl_tau * t.log_ratio.square() if self.kl_tau else of_kept

    def _kept(self, t: Tokens, bounds: Bounds) -> Tensor:
        moved = self.bounded(t)
        dropped = (moved < bounds.low) | (moved > bounds.high) | ~t.live
        return where(dropped, 0.0, t.free_ratio)

    def _pull(self, t: Tokens) -> Tensor:
        return 2 * self.kl_tau * t.log_ratio
