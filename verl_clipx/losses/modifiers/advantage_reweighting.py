"""Advantage Reweighting (AR-Lopti, Eq. 4): smaller advantages for tokens of low probability."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from verl_clipx.losses.base.parameters import Parameters, choice, number, parameter
from verl_clipx.losses.base.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class AdvantageReweighting(Parameters):
    """Multiplies each advantage by alpha * probability + 1 - alpha.

    Source: AR-Lopti, Eq. 4 and Algorithm 1.
    """

    node_key: ClassVar[str] = "clipx.shaping"
    rule: ClassVar[str] = "advantage_reweighting"
    by_sequence: ClassVar[bool] = False

    alpha: float = parameter(
        0.3, number(at_least=0, at_most=1), "how much a low probability shrinks a token's advantage"
    )
    probability: str = parameter(
        "old",
        choice("old", "current"),
        "the policy whose token probability is used: old (Algorithm 1, release) or current (Eq. 4 as printed)",
    )

    def advantages(self, t: Tokens) -> Tensor:
        """Return (alpha * probability + 1 - alpha) * A, (sequences, length). No gradient flows through it."""
        log_prob = t.old_log_prob if self.probability == "old" else t.log_prob
        return (self.alpha * log_prob.exp() + (1 - self.alpha)) * t.advantages
