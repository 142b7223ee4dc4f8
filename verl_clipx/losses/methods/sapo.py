"""SAPO (arXiv 2511.20347): a gate that falls off smoothly on both sides of the ratio 1, instead of the clip."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, full_like, sigmoid, where

from verl_clipx.losses.base.method import Bounds, Method
from verl_clipx.losses.base.parameters import VerlKey, number, parameter
from verl_clipx.losses.base.tokens import Tokens


def temperature_parameter(default: float, tokens: str, key: str) -> Any:
    """Return a parameter that is the temperature of some tokens.

    Args:
        default: as for `parameter`.
        tokens: these tokens, in words.
        key: the name that verl's loss `sapo` reads. verl's scripts set it under policy_loss.
    """
    allowed = number(at_least=0.01, at_most=100, usual=(0.5, 10))
    verl = VerlKey((key, f"policy_loss.{key}"))
    meaning = f"temperature of {tokens}; larger: a narrower gate"
    return parameter(default, allowed, meaning, "paper", verl, role="soft gate")


@dataclass(frozen=True, kw_only=True)
class Sapo(Method, name="sapo", source="SAPO (arXiv 2511.20347), Eq. 5-8"):
    """A soft gate instead of bounds.

    The objective is f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)). With p = sigmoid(tau (r - 1)), this gives
    F = 4 p (1 - p) r, which is 1 at r = 1; the gate 4 p (1 - p) is smaller on both sides. tau is tau_positive where
    A > 0 and tau_negative elsewhere. F = 0 beyond log_ratio_clamp.
    """

    tau_positive: float = temperature_parameter(1.0, "tokens with A > 0", "tau_pos")
    tau_negative: float = temperature_parameter(1.05, "the other tokens", "tau_neg")

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        r = t.free_ratio
        x = self._temperature(t) * (r - 1)
        # 1 - sigmoid(x) is sigmoid(-x) without the rounding.
        return where(t.unclamped, 4 * sigmoid(x) * sigmoid(-x) * r, 0.0)

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return -A f(r)."""
        tau = self._temperature(t)
        return -t.advantages * sigmoid(tau * (t.ratio - 1)) * (4 / tau)

    def _temperature(self, t: Tokens) -> Tensor:
        """Return tau of each token, (sequences, length)."""
        # One of the two branches is a tensor, so that the result has the ratio's dtype: `where` of two Python numbers
        # has PyTorch's default dtype.
        return where(t.advantages > 0, full_like(t.ratio, self.tau_positive), self.tau_negative)
