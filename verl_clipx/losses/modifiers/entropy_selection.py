"""Entropy selection keeps the tokens of highest or lowest entropy, in each sequence or in the whole mini-batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl_clipx.losses.base.histogram import ReachedBucket, bucket_of, find_bucket_reaching, whole_sums
from verl_clipx.losses.base.parameters import Parameters, choice, number, parameter

# The histogram of a selection over the mini-batch: 2046 buckets of equal logarithmic width between LOWEST_EDGE and
# HIGHEST_EDGE, an open one below and an open one above. Neighbouring edges differ by 0.83 %, about the resolution of
# bfloat16. Entropies above 20 nats don't occur (the logarithm of a vocabulary of 150,000 is 11.9); those below 1e-6
# nats are rounding.
ENTROPY_BUCKETS = 2048
LOWEST_EDGE = 1e-6
HIGHEST_EDGE = 20.0


@dataclass(frozen=True, kw_only=True)
class EntropySelection(Parameters):
    """Only the tokens of highest or lowest entropy of the current policy have a gradient.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule". They select over the batch, which is done here to the width of a
    bucket. ACPO's released baselines select in each sequence (top 20 %, bottom 80 %).
    """

    node_key: ClassVar[str] = "clipx.select"

    keep: str = parameter(
        "highest", choice("highest", "lowest"), "the tokens that are kept: of highest or lowest entropy"
    )
    ratio: float = parameter(0.2, number(at_least=1e-6, at_most=1), "the share of the tokens that are kept")
    over: str = parameter(
        "sequence",
        choice("sequence", "mini_batch"),
        "what the share is computed over: each sequence, or the optimizer mini-batch of all ranks (Wang et al.)",
    )
    normaliser: str = parameter(
        "selected",
        choice("selected", "all"),
        "the tokens that the loss is averaged over: the selected ones (release) or all",
    )

    def selected(self, entropy: Tensor, mask: Tensor, bucket: Tensor | None = None) -> Tensor:
        """Return the tokens that are kept: bool, (sequences, length), within the mask.

        Within a sequence, the earlier of two tokens with the same entropy is kept first, so padding and the order of
        the sequences make no difference. Over the mini-batch, whole buckets are kept, with all tokens in them.

        Args:
            entropy: the current policy's entropy in nats, (sequences, length), any float dtype.
            mask: the response's tokens, bool or 0/1, (sequences, length).
            bucket: the last bucket that is kept, from `find_last_kept_bucket`, 0-d int64; None: the one that these
                tokens give. Only a selection over the mini-batch reads it.
        """
        mask = mask.bool()
        if self.over == "mini_batch":
            last_kept = bucket
            if last_kept is None:
                last_kept = self.find_last_kept_bucket(entropy_statistics(entropy, mask)).index
            bucket_of_token = _find_bucket(entropy)
            if self.keep == "highest":
                return mask & (bucket_of_token >= last_kept)
            return mask & (bucket_of_token <= last_kept)
        order = entropy.detach().argsort(dim=-1, descending=self.keep == "highest", stable=True)
        # A running count over the mask ranks the response's tokens alone. Padding may lie anywhere in the order, even
        # where its entropy is NaN.
        mask_in_order = mask.gather(-1, order)
        rank_in_order = mask_in_order.cumsum(-1)
        is_kept_in_order = mask_in_order & (rank_in_order <= self.kept_counts(mask).unsqueeze(-1))
        return torch.zeros_like(mask).scatter(-1, order, is_kept_in_order)

    def kept_counts(self, mask: Tensor) -> Tensor:
        """Return how many tokens of each sequence are kept, which does not depend on the entropy.

        It is the whole part of ratio * tokens, but at least 1, as in ACPO's released code; 0 for a sequence without
        tokens.

        Args:
            mask: as for `selected`.

        Returns:
            int64, (sequences,).
        """
        token_counts = mask.bool().sum(-1)
        # In float64, as Python computes int(tokens * ratio). In float32 the whole part may differ.
        whole_part = (token_counts.to(torch.float64) * self.ratio).to(torch.int64)
        return torch.minimum(whole_part.clamp(min=1), token_counts)

    def find_last_kept_bucket(self, statistics: Tensor) -> ReachedBucket:
        """Find the last bucket that a selection over the mini-batch keeps.

        The selection begins with the bucket of highest or of lowest entropy, and keeps the fewest buckets that hold at
        least the share of the tokens.

        Args:
            statistics: the sum of `entropy_statistics` over any tokens, (ENTROPY_BUCKETS,).

        Returns:
            The last bucket that is kept, and the number of tokens that are kept; both on the statistics' device.
        """
        if self.keep == "lowest":
            return find_bucket_reaching(self.ratio, statistics)
        # Flipped, because the counting begins with the highest bucket.
        reached = find_bucket_reaching(self.ratio, statistics.flip(0))
        return ReachedBucket(index=ENTROPY_BUCKETS - 1 - reached.index, count=reached.count)


def entropy_statistics(entropy: Tensor, mask: Tensor) -> Tensor:
    """Return the histogram of the entropies, for `EntropySelection.find_last_kept_bucket`.

    Args:
        entropy: the policy's entropy at each token in nats, (sequences, length), any float dtype.
        mask: the response's tokens, bool or 0/1, (sequences, length).

    Returns:
        (ENTROPY_BUCKETS,), float64: the number of tokens in each bucket, additive over any split of the tokens.
    """
    return whole_sums(_find_bucket(entropy), mask.bool(), ENTROPY_BUCKETS).sum(0)


def _find_bucket(entropy: Tensor) -> Tensor:
    """Return the bucket of each entropy: int64 in [0, ENTROPY_BUCKETS), (sequences, length)."""
    # Made on the device, because copying a list there would wait for it.
    log_edges = torch.linspace(
        math.log(LOWEST_EDGE), math.log(HIGHEST_EDGE), ENTROPY_BUCKETS - 1, dtype=torch.float64, device=entropy.device
    )
    return bucket_of(entropy, inner_edges=log_edges.exp())
