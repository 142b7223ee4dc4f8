"""KPop (of Ring 2.6): drops a token if a binary KL divergence of its two probabilities is too large."""

from dataclasses import dataclass

from torch import Tensor, where

from verl_clipx.losses.base.method import Bounds
from verl_clipx.losses.base.parameters import number, parameter
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.methods.ipo import MovedTooFar, pull_parameter

# Probabilities are kept this far from 0 and 1, as in prime-rl.
SMALLEST = 1e-6


@dataclass(frozen=True, kw_only=True)
class Kpop(MovedTooFar, name="kpop", source="KPop (Ring 2.6's notes, May 2026), as in prime-rl's pull request 3283"):
    """Drops tokens by the larger of the two binary KL divergences, and pulls every token back.

    With p the current and q the old probability, F = r where both KL(p, q) and KL(q, p) are at most the threshold, and
    F = 0 elsewhere. The binary divergence is that of the token against all others,

        KL(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    kl_tau (log r)^2 is subtracted from the objective, as in `ipo`.

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
        """Return the bounds on the larger divergence, to which `bounded` gives a sign."""
        return Bounds(-self.threshold, self.threshold)

    def bounded(self, t: Tokens) -> Tensor:
        """Return the larger of KL(p, q) and KL(q, p), below 0 where p < q: (sequences, length)."""
        p = t.log_prob.exp().clamp(SMALLEST, 1 - SMALLEST)
        q = t.old_log_prob.exp().clamp(SMALLEST, 1 - SMALLEST)
        larger = larger_divergence(p, q)
        return where(p < q, -larger, larger)


def larger_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return the larger of KL(p, q) and KL(q, p), for a token against all others together: (sequences, length).

    It is a function of its own so that the memory of both divergences is free again where it returns.
    """
    log_ratio = p.log() - q.log()
    # log((1 - q) / (1 - p)), of all other tokens, whose probabilities are 1 - p and 1 - q.
    log_ratio_of_others = (-q).log1p() - (-p).log1p()
    kl_pq = p * log_ratio - (1 - p) * log_ratio_of_others
    kl_qp = (1 - q) * log_ratio_of_others - q * log_ratio
    # A divergence is never negative, but rounding can put it a little below 0.
    return kl_pq.maximum(kl_qp).clamp(min=0.0)
