"""ACPO: bounds that follow the spread of the ratio, separately for each range of probability."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_clipx.controllers.statistics import bucket_sums
from verl_clipx.masking import kept


@dataclass(frozen=True)
class AcpoController:
    """1 -+ epsilon, with epsilon = alpha * (standard deviation of the ratio) + epsilon_base per probability bin.

    See `Controller` for the methods. The statistics are, for each bin, the number of tokens and the sums of
    ratio - 1 and of its square; the decision holds each bin's standard deviation and then each bin's epsilon.

    Attributes:
        alpha: weight of the standard deviation, at least 0.
        epsilon_base: epsilon without any spread, at least 0.
        epsilon_min, epsilon_max: limits of epsilon; None for none.
        bins: number of equal bins of the probability in [0, 1]; each contains its lower edge, the last one both.
        bin_on: which policy's probability chooses the bin, "old" or "current".
        variance_epsilon: added to the variance before the square root (1e-8 in the released code).
        min_tokens: a bin with fewer tokens keeps epsilon_base, at least 1.

    Raises:
        ValueError: `bin_on` is neither "old" nor "current", or `bins` or `min_tokens` is below 1.

    Source: ACPO, Eq. 8, with the population standard deviation. A large mean of the ratio costs precision: the
    standard deviation has a relative error of about 1e-16 * (1 + (mean - 1)^2 / variance).
    """

    alpha: float = 3.0
    epsilon_base: float = 0.2
    epsilon_min: float | None = None
    epsilon_max: float | None = None
    bins: int = 5
    bin_on: Literal["old", "current"] = "old"
    variance_epsilon: float = 0.0
    min_tokens: int = 1

    def __post_init__(self) -> None:
        if self.bin_on not in ("old", "current"):
            raise ValueError(f"bin_on={self.bin_on!r}: use 'old' or 'current', the policy whose probability is binned")
        if self.bins < 1:
            raise ValueError(f"bins={self.bins}: use at least 1 probability bin")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens={self.min_tokens}: use at least 1, an empty bin has no standard deviation")

    @property
    def statistics_size(self) -> int:
        return 3 * self.bins

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
        deviation = kept(ratio.to(torch.float64) - 1.0, mask)
        bucket = self._bin(log_prob=log_prob, old_log_prob=old_log_prob, dtype=ratio.dtype).to(torch.int64)
        return bucket_sums(bucket, (mask.view(torch.int8), deviation, deviation * deviation), self.bins).flatten()

    def decide(self, statistics: Tensor) -> Tensor:
        count, total, squares = statistics.view(3, self.bins)
        divisor = count.clamp(min=1.0)
        variance = (squares / divisor - (total / divisor).square()).clamp(min=0.0)
        used = count >= self.min_tokens
        sigma = torch.where(used, (variance + self.variance_epsilon).sqrt(), 0.0)
        epsilon = self.alpha * sigma + self.epsilon_base
        if self.epsilon_min is not None:
            epsilon = epsilon.clamp(min=self.epsilon_min)
        if self.epsilon_max is not None:
            epsilon = epsilon.clamp(max=self.epsilon_max)
        return torch.cat([sigma, torch.where(used, epsilon, self.epsilon_base)])

    def token_bounds(
        self, decision: Tensor, *, log_prob: Tensor, old_log_prob: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        _, epsilon = decision.view(2, self.bins)
        bucket = self._bin(log_prob=log_prob, old_log_prob=old_log_prob, dtype=dtype)
        low, high = (1.0 - epsilon).to(dtype), (1.0 + epsilon).to(dtype)
        # Four times as fast on a CPU as indexing.
        return tuple(bound.index_select(0, bucket.flatten()).view_as(bucket) for bound in (low, high))

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        count = statistics.view(3, self.bins)[0]
        sigma, epsilon = decision.view(2, self.bins)
        return {
            f"{name}/bin_{index}": value
            for name, values in (("count", count), ("sigma", sigma), ("epsilon", epsilon))
            for index, value in enumerate(values.unbind())
        }

    def _bin(self, *, log_prob: Tensor, old_log_prob: Tensor, dtype: torch.dtype) -> Tensor:
        chosen = old_log_prob if self.bin_on == "old" else log_prob
        position = chosen.detach().to(dtype).exp().mul_(self.bins)
        # Clamped before the conversion: rounding can put a probability above 1, and padding may hold any number.
        return position.clamp_(0, self.bins - 1).to(torch.int32)
