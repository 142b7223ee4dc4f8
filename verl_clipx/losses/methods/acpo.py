"""ACPO (arXiv 2606.22570, Eq. 8): GRPO's clip, its bounds from the spread of the ratio in each bin of probability."""

from dataclasses import dataclass
from itertools import chain

from torch import Tensor, cat, float32, float64, stack, where

from verl_clipx.losses.base.method import LARGEST_BOUND, Bounds, limit_parameter, require_not_above
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
        require_not_above(self, "epsilon_min", "epsilon_max")
        # With a larger epsilon_base every bin's epsilon would be epsilon_max, except in bins with too few tokens, which
        # keep epsilon_base and would be above the limit.
        require_not_above(self, "epsilon_base", "epsilon_max")

    @property
    def unbounded_below_from(self) -> float | None:
        """The smallest sigma at which epsilon is at least 1, so that nothing is clipped below; None: there is none."""
        if max(self.epsilon_base, self.epsilon_min or 0) >= 1:
            return 0.0
        is_capped = self.epsilon_max is not None and self.epsilon_max < 1
        if is_capped or self.alpha == 0:
            return None
        return (1 - self.epsilon_base) / self.alpha

    @property
    def statistics_size(self) -> int:
        return 3 * self.bins

    @property
    def never_negative(self) -> slice:
        return slice(self.bins)

    def statistics(self, t: Tokens) -> Tensor:
        """Count the tokens of each bin, and sum r - 1 and (r - 1)^2 over them.

        Returns:
            (3 * bins,), float64: the count of each bin, then the sum of r - 1 of each, then the sum of (r - 1)^2.
        """
        # A masked sum for each bin, because the compiler fuses these into one pass without atomic additions, so that
        # they are the same to the last bit each time. Each of `parts` is summed first, because an accelerator sums it
        # by a block of threads of its own; all tokens at once would have a single block.
        deviation = parts(t.ratio.to(float64) - 1)
        bin_of_token = parts(where(t.mask, self._find_bin(t), -1.0))
        counts = [(bin_of_token == k).sum(-1, dtype=float32).to(float64) for k in range(self.bins)]
        bin_of_token = bin_of_token.to(float64)
        sums = [where(bin_of_token == k, deviation, 0.0).sum(-1) for k in range(self.bins)]
        # In place, so that no second tensor of this size is made.
        squared = deviation.mul_(deviation)
        sums_of_squares = [where(bin_of_token == k, squared, 0.0).sum(-1) for k in range(self.bins)]
        return stack(counts + sums + sums_of_squares).sum(-1)

    def decide(self, statistics: Tensor) -> Tensor:
        """Return sigma of each bin, then epsilon of each bin: (2 * bins,), float64."""
        count, total, squares = statistics.view(3, self.bins)
        has_enough_tokens = count >= self.min_tokens
        divisor = count.clamp(min=1)
        variance = (squares / divisor - (total / divisor) ** 2).clamp(min=0)
        sigma = where(has_enough_tokens, (variance + self.variance_epsilon).sqrt(), 0.0)
        epsilon = self.alpha * sigma + self.epsilon_base
        if self.epsilon_min is not None:
            epsilon = epsilon.clamp(min=self.epsilon_min)
        if self.epsilon_max is not None:
            epsilon = epsilon.clamp(max=self.epsilon_max)
        return cat([sigma, where(has_enough_tokens, epsilon, self.epsilon_base)])

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return 1 - epsilon and 1 + epsilon of each token's bin, each (sequences, length).

        Args:
            t: the tokens.
            decision: what `decide` returns; its second half is epsilon of each bin.
        """
        epsilon_of_bin = decision[self.bins :].to(t.ratio.dtype)
        bin_of_token = self._find_bin(t)
        # A `where` for each bin instead of an index by the bin: the compiler fuses it into the loss's one pass.
        epsilon = epsilon_of_bin[0]
        for k in range(1, self.bins):
            epsilon = where(bin_of_token == k, epsilon_of_bin[k], epsilon)
        return Bounds(1 - epsilon, 1 + epsilon)

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        """Return the number of tokens and epsilon of each bin."""
        return {"count": statistics[: self.bins], "epsilon": decision[self.bins :]}

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """Return what is logged of epsilon over all updates on a rollout batch.

        The highest value and the average are over the bins that have tokens. The average is weighted by the numbers of
        tokens. If there are several updates, the last one's epsilon of each bin is logged too.
        """
        epsilons = [metrics[f"epsilon/bin_{k}"] for k in range(self.bins)]
        counts = [metrics[f"count/bin_{k}"] for k in range(self.bins)]
        epsilons_and_counts = []
        for epsilon, count in zip(chain(*epsilons), chain(*counts), strict=True):
            if count > 0:
                epsilons_and_counts.append((epsilon, count))
        logged = {}
        if epsilons_and_counts:
            logged["epsilon_highest"] = max(epsilon for epsilon, _ in epsilons_and_counts)
            weighted_sum = sum(epsilon * count for epsilon, count in epsilons_and_counts)
            logged["epsilon_average"] = weighted_sum / sum(count for _, count in epsilons_and_counts)
        if len(epsilons[0]) > 1:
            for k, epsilon_in_updates in enumerate(epsilons):
                logged[f"epsilon_last/bin_{k}"] = epsilon_in_updates[-1]
        return logged

    def _find_bin(self, t: Tokens) -> Tensor:
        """Return the number of each token's bin, from 0 on: (sequences, length), in the ratio's dtype."""
        log_prob = t.old_log_prob if self.bin_on == "old" else t.log_prob
        # Rounding can put a probability above 1; the last bin contains its upper edge.
        return (log_prob.exp() * self.bins).floor().clamp(0, self.bins - 1)
