"""Bounds that depend on nothing."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FixedBounds:
    """The same bounds for every token of every step; see `Controller` for the methods.

    Attributes:
        clip_low: lower bound on the ratio; None for none.
        clip_high: upper bound on the ratio; None for none.
    """

    clip_low: float | None
    clip_high: float | None

    @property
    def statistics_size(self) -> int:
        return 0

    def statistics(
        self,
        *,
        ratio: Tensor,
        advantages: Tensor,
        mask: Tensor,
        log_prob: Tensor,
        old_log_prob: Tensor,
        rollout_log_prob: Tensor | None = None,
    ) -> Tensor:
        return torch.zeros(0, dtype=torch.float64, device=ratio.device)

    def decide(self, statistics: Tensor) -> Tensor:
        return torch.zeros(0, dtype=torch.float64, device=statistics.device)

    def token_bounds(
        self, decision: Tensor, *, log_prob: Tensor, old_log_prob: Tensor, dtype: torch.dtype
    ) -> tuple[float, float]:
        low = 0.0 if self.clip_low is None else self.clip_low
        return low, math.inf if self.clip_high is None else self.clip_high

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        return {}
