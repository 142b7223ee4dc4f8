"""The distance between the bounds of two decisions, measured in the same way for every method."""

import math

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.loss import tokens_in

# The number of probabilities at which bounds are compared.
PROBES = 64


class Probes:
    """Tokens at ratio 1 with probabilities from 0 to 1, each with a positive and with a negative advantage.

    Args:
        statistics: the statistics behind the first bounds, with which others are compared, (statistics_size,), float64.
    """

    def __init__(self, method: Method, statistics: Tensor):
        probability = torch.linspace(0, 1, PROBES + 1, dtype=torch.float64, device=statistics.device)[1:]
        log_prob = probability.log().expand(2, -1)
        self._ones = torch.ones_like(log_prob)
        optional = dict(rollout_log_prob=log_prob, entropy=-log_prob, group=self._ones[:, 0].long())
        asked_for = {name: optional[name] for name in method.asks_for}
        signs = self._ones * self._ones.new_tensor([[1.0], [-1.0]])
        self._method = method
        self._tokens = tokens_in(method, None, Inputs(log_prob, log_prob, signs, self._ones.bool(), **asked_for))
        self.first = self.bounds(statistics)
        low, high = self.first
        self._half = ((high - low) / 2).nan_to_num(1.0, posinf=1.0).clamp(min=1e-12)

    def bounds(self, statistics: Tensor) -> Tensor:
        """The lower and the upper bound of every probe, (2, 2, PROBES), float64."""
        decided = self._method.bounds(self._tokens, self._method.decide(statistics))
        return torch.stack([self._ones * bound for bound in decided])

    def apart(self, one: Tensor, other: Tensor) -> Tensor:
        """The distance of bounds relative to half the first ones' width, (2, 2, PROBES); 0 for equal infinite ones."""
        return torch.where(one == other, 0.0, (one - other).abs() / self._half)


def bounds_difference(method: Method, first: Tensor, second: Tensor) -> float:
    """The largest difference between the bounds from two statistics, relative to half the width of the first ones.

    Args:
        first, second: statistics, (statistics_size,), float64.

    Returns:
        0 for equal bounds; infinity if the difference is not finite. For ACPO it is the relative difference of epsilon.
    """
    probes = Probes(method, first)
    difference = float(probes.apart(probes.first, probes.bounds(second)).max())
    return difference if math.isfinite(difference) else math.inf
