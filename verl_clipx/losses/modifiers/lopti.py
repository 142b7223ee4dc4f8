"""Lopti (AR-Lopti, Algorithm 1): tokens of low probability are updated first, then the others, in two passes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl_clipx.losses.base.parameters import Parameters, boolean, choice, number, parameter


@dataclass(frozen=True, kw_only=True)
class Lopti(Parameters):
    """Two passes over the rollout batch, each updating on its own group of tokens, or only the first of them."""

    node_key: ClassVar[str] = "clipx.update"

    eta: float = parameter(
        0.5, number(at_least=1e-6, at_most=1), "tokens whose old probability is at most this are low-probability tokens"
    )
    equal: bool = parameter(
        True, boolean(), "whether a probability equal to eta counts as low (paper) or not (release)"
    )
    order: str = parameter(
        "low_first",
        choice("low_first", "high_first", "low_only"),
        "the group that is updated first (paper: low_first); low_only: the other group is not updated",
    )


def low_probability(old_log_prob: Tensor, *, eta: float, equal: bool) -> Tensor:
    """Return which tokens belong to the low-probability group. The other tokens of the mask are the other group.

    Args:
        old_log_prob: log-probabilities under the old policy, (sequences, length), any float dtype.
        eta: the threshold on the probability, in (0, 1].
        equal: whether a probability of exactly eta counts as low. It does in the paper, but not in the released code.

    Returns:
        bool, (sequences, length). Probabilities are compared in float64.

    Source: AR-Lopti, Algorithm 1, lines 12 to 20.
    """
    # Rounding can put a log-probability above 0.
    probability = old_log_prob.detach().to(torch.float64).clamp(max=0.0).exp()
    return probability <= eta if equal else probability < eta
