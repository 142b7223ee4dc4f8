"""Entropy selection: the tokens of highest or lowest entropy, in each sequence or in the whole mini-batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl_clipx.losses.base.histogram import bucket_of, first_reaching, whole_sums
from verl_clipx.losses.base.parameters import Parameters, choice, number, parameter

# 2046 buckets of equal logarithmic width between the two limits, an open one below and an open one above: neighbouring
# edges differ by 0.83 %, about the resolution of bfloat16. Entropies above 20 nats don't occur (log of a vocabulary of
# 150,000 is 11.9); those below 1e-6 nats are rounding.
ENTROPY_BUCKETS = 2048
LOWEST_EDGE = 1e-6
HIGHEST_EDGE = 20.0


@dataclass(frozen=True, kw_only=True)
class EntropySelection(Parameters):
    """Only the tokens of highest or lowest entropy of the current policy have a gradient.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule". They select over the batch, which is done here to the width of a
    bucket. ACPO's released baselines select in each sequence (top 20 %, bottom 80 %).
    """

    node: ClassVar[str] = "clipx.select"

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
        """The tokens that are kept: bool, (sequences, length), within the mask.

        Among equal entropies in a sequence, the earlier tokens are kept, so padding and the order of the sequences make
        no difference.

        Args:
            entropy: the current policy's entropy in nats, (sequences, length), any float dtype.
            mask: bool or 0/1, (sequences, length).
            bucket: where a selection over the mini-batch ends, from `threshold`; None: it ends at that of these tokens.
        """
        mask = mask.bool()
        if self.over == "mini_batch":
            end = self.threshold(entropy_statistics(entropy, mask))[0] if bucket is None else bucket
            of_token = _bucket(entropy)
            return mask & (of_token >= end if self.keep == "highest" else of_token <= end)
        order = entropy.detach().argsort(dim=-1, descending=self.keep == "highest", stable=True)
        counts_in_order = mask.gather(-1, order)
        # Only the response's tokens are ranked: padding, NaN or not, may lie anywhere in the order.
        chosen = counts_in_order & (counts_in_order.cumsum(-1) <= self.counts(mask).unsqueeze(-1))
        return torch.zeros_like(mask).scatter(-1, order, chosen)

    def counts(self, mask: Tensor) -> Tensor:
        """The number of tokens of each sequence that are kept, which needs no entropy: int64, (sequences,).

        The whole part of ratio * tokens, but at least 1, as in ACPO's released code; 0 for a sequence without tokens.
        """
        tokens = mask.bool().sum(-1)
        # float64 as in Python's int(tokens * ratio): in float32 the whole part may differ.
        share = (tokens.to(torch.float64) * self.ratio).to(torch.int64)
        return torch.minimum(share.clamp(min=1), tokens)

    def threshold(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where a selection over the mini-batch ends. It keeps the fewest whole buckets that hold the share.

        Args:
            statistics: sum of `entropy_statistics` over any tokens, (ENTROPY_BUCKETS,).

        Returns:
            The last bucket that is kept, 0-d int64; the number of tokens that are kept, 0-d float64; on the device.
        """
        if self.keep == "lowest":
            return first_reaching(statistics, self.ratio)
        steps_down, selected = first_reaching(statistics.flip(0), self.ratio)
        return ENTROPY_BUCKETS - 1 - steps_down, selected


def entropy_statistics(entropy: Tensor, mask: Tensor) -> Tensor:
    """Additive statistics from which `EntropySelection.threshold` chooses: the histogram of the entropies.

    Args:
        entropy: of the policy at each token in nats, (sequences, length), any float dtype.
        mask: bool or 0/1, (sequences, length).

    Returns:
        (ENTROPY_BUCKETS,), float64: tokens per bucket.
    """
    return whole_sums(_bucket(entropy), mask.bool(), ENTROPY_BUCKETS).sum(0)


def _bucket(entropy: Tensor) -> Tensor:
    # Made on the device: copying a list there would wait for it.
    inner_edges = torch.linspace(
        math.log(LOWEST_EDGE), math.log(HIGHEST_EDGE), ENTROPY_BUCKETS - 1, dtype=torch.float64, device=entropy.device
    ).exp()
    return bucket_of(entropy, inner_edges)
