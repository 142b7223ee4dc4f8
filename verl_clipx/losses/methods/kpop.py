"""KPop (Ring 2.6's): drops a token if either binary KL divergence between its probabilities is too large."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.methods.ipo import MovedTooFar, pull_parameter

# Probabilities are kept this far from 0 and 1, as in prime-rl's.
SMALLEST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Kpop(MovedTooFar, name="kpop", source="KPop (Ring 2.6's notes, May 2026), as in prime-rl's pull request 3283"):
    """Drops tokens by the larger of the two binary KL divergences, and pulls every token back.

    With p the current and q the old probability, F = r where KL(p, q) and KL(q, p) are at most the threshold, and F = 0
    elsewhere, where KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)). The objective also loses
    kl_tau (log r)^2, as that of `ipo`.

    Both sources measure from the policy that sampled.
    """

    bounds_on = "larger divergence of the token's probability"
    formula = ("", "{threshold}")

    threshold: float = parameter(
        0.1,
        number(at_least=0, at_most=10),
        "tokens with a larger divergence, of either policy from the other, are dropped",
        "release",
        role="high",
    )
    kl_tau: float = pull_parameter(1e-3)

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """The bounds on the signed divergence."""
        return Bounds(-self.threshold, self.threshold)

    def bounded(self, t: Tokens) -> Tensor:
        """The larger divergence, below 0 where the probability fell."""
        p, q = (values.exp().clamp(SMALLEST, 1 - SMALLEST) for values in (t.log_prob, t.old_log_prob))
        # KL(p, q) = p x - (1 - p) y and KL(q, p) = (1 - q) y - q x; both signs of p - q.
        x = p.log() - q.log()
        y = (-q).log1p() - (-p).log1p()
        largest = (p * x - (1 - p) * y).maximum((1 - q) * y - q * x).clamp(min=0.0)
        return where(p < q, -largest, largest)
