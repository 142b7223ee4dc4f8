"""ACPO (arXiv 2606.22570, Eq. 8): GRPO's clip, its bounds from the spread of the ratio in each bin of probability."""

import math
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, cat, float32, float64, stack, where

from verl_clipx.losses.base.method import LARGEST_BOUND, Bounds, limit_parameter, not_above
from verl_clipx.losses.base.metric import of_decision, of_rollout_batch
from verl_clipx.losses.base.parameters import choice, integer, number, parameter
from verl_clipx.losses.base.tokens import Tokens, parts
from verl_clipx.losses.methods.grpo import ClippedSurrogate


@dataclass(frozen=True, kw_only=True)
class Acpo(ClippedSurrogate, name="acpo", source="ACPO (arXiv 2606.22570), Eq. 8"):
    """Bounds per probability bin, from the spread of the ratio in the bin.

    A token's bounds are [1 - epsilon, 1 + epsilon], where epsilon = alpha sigma + epsilon_base and sigma is the
    population standard deviation of the ratio in the token's probability bin. sigma is computed with a relative error
    of about 1e-16 (1 + (mean - 1)^2 / variance).
    """

    logs = (
        of_decision("epsilon", "epsilon per probability bin", "ratio", numbered="bin", chart="bounds"),
        of_rollout_batch(
            "epsilon_last", "epsilon of the rollout batch's last update", "ratio", numbered="bin", chart="last bounds"
        ),
        of_rollout_batch(
            "epsilon_highest", "largest epsilon of any bin with tokens in any update of the rollout batch", "ratio"
        ),
        of_rollout_batch("epsilon_average", "average of epsilon over all tokens of the rollout batch", "ratio"),
        of_decision("count", "tokens per bin, over the mini-batch", "tokens", numbered="bin", adds_up=True),
    )

    formula = ("1 - epsilon", "1 + epsilon", "epsilon = {alpha} σ + {epsilon_base}")
    symbols = "σ of the ratio in each of {bins} bins of the {bin_on} probability"

    alpha: float = parameter(
        3.0, number(at_least=0, at_most=20), "epsilon of a bin = alpha * sigma + epsilon_base", "paper"
    )
    epsilon_base: float = parameter(
        0.2, number(at_least=0, at_most=1), "epsilon of a bin whose ratios do not vary", "paper"
    )
    epsilon_min: float | None = limit_parameter(
        None, "smallest epsilon; null: no limit", "paper", at_least=0, at_most=1
    )
    epsilon_max: float | None = limit_parameter(
        None, "largest epsilon; null: no limit", "paper", at_least=0.01, at_most=LARGEST_BOUND
    )
    bins: int = parameter(5, integer(at_least=1, at_most=100), "number of equally wide probability bins", "paper")
    bin_on: str = parameter(
        "old", choice("old", "current"), "the policy whose token probability chooses the bin", "paper"
    )
    variance_epsilon: float = parameter(
        0.0, number(at_least=0, at_most=0.01), "added to the variance under the square root", "choice", role="guard"
    )
    min_tokens: int = parameter(
        1, integer(at_least=1, at_most=1_000_000), "a bin with fewer tokens keeps epsilon_base", "choice", role="guard"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        not_above(self, "epsilon_min", "epsilon_max")
        # Otherwise every bin's epsilon is epsilon_max, but for those with too few tokens, which have more.
        not_above(self, "epsilon_base", "epsilon_max")

    @property
    def unbounded_below_from(self) -> float | None:
        if max(self.epsilon_base, self.epsilon_min or 0) >= 1:
            return 0.0
        is_capped = self.epsilon_max is not None and self.epsilon_max < 1
        return None if is_capped or not self.alpha else (1 - self.epsilon_base) / self.alpha

    @property
    def statistics_size(self) -> int:
        return 3 * self.bins

    @property
    def never_negative(self) -> slice:
        return slice(self.bins)

    def statistics(self, t: Tokens) -> Tensor:
        """The number of tokens of each bin, then the sum of r - 1, then the sum of (r - 1)^2."""
        # A masked sum a bin fuses into one pass without atomic additions: the same to the last bit each time. Over
        # parts first, so that on an accelerator each has a block of threads, not all of them one.
        deviation = parts(t.ratio.to(float64) - 1)
        bin = parts(where(t.mask, self._bin(t), -1.0))
        counts = [(bin == k).sum(-1, dtype=float32).to(float64) for k in range(self.bins)]
        bin = bin.to(float64)
        sums = [where(bin == k, deviation, 0.0).sum(-1) for k in range(self.bins)]
        squared = deviation.mul_(deviation)
        return stack(counts + sums + [where(bin == k, squared, 0.0).sum(-1) for k in range(self.bins)]).sum(-1)

    def decide(self, statistics: Tensor) -> Tensor:
        """sigma of each bin, then epsilon of each bin."""
        n, total, squares = statistics.view(3, self.bins)
        used = n >= self.min_tokens
        divisor = n.clamp(min=1)
        variance = (squares / divisor - (total / divisor) ** 2).clamp(min=0)
        sigma = where(used, (variance + self.variance_epsilon).sqrt(), 0.0)
        epsilon = self.alpha * sigma + self.epsilon_base
        epsilon = epsilon if self.epsilon_min is None else epsilon.clamp(min=self.epsilon_min)
        epsilon = epsilon if self.epsilon_max is None else epsilon.clamp(max=self.epsilon_max)
        return cat([sigma, where(used, epsilon, self.epsilon_base)])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        of_bin = decision[self.bins :].to(t.ratio.dtype)
        bin = self._bin(t)
        epsilon = of_bin[0]
        for k in range(1, self.bins):
            epsilon = where(bin == k, of_bin[k], epsilon)
        return Bounds(1 - epsilon, 1 + epsilon)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        return {"count": statistics[: self.bins], "epsilon": decision[self.bins :]}

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """The largest epsilon of a bin with tokens in any update, the average over all tokens, the last update's."""
        epsilons, counts = ([metrics[f"{name}/bin_{k}"] for k in range(self.bins)] for name in ("epsilon", "count"))
        found = {}
        pairs = [(epsilon, count) for epsilon, count in zip(chain(*epsilons), chain(*counts), strict=True) if count > 0]
        if pairs:
            found["epsilon_highest"] = max(epsilon for epsilon, _ in pairs)
            found["epsilon_average"] = sum(map(math.prod, pairs)) / sum(count for _, count in pairs)
        if len(epsilons[0]) > 1:
            found |= {f"epsilon_last/bin_{k}": of_updates[-1] for k, of_updates in enumerate(epsilons)}
        return found

    def _bin(self, t: Tokens) -> Tensor:
        probability = (t.old_log_prob if self.bin_on == "old" else t.log_prob).exp()
        # Rounding can put a probability above 1; the last bin contains its upper edge.
        return (probability * self.bins).floor().clamp(0, self.bins - 1)
