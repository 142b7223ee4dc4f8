"""Entropy selection: the tokens of highest or lowest entropy, of each sequence or of all tokens of a mini-batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from verl_clipx.histogram import bucket_of, first_reaching, histogram
from verl_clipx.parameters import choice, number, parameter, validate

# 2046 buckets of equal logarithmic width between the two limits, an open one below and an open one above: neighbouring
# edges differ by 0.83 %, about the resolution of bfloat16. Entropies above 20 nats don't occur (log of a vocabulary of
# 150,000 is 11.9); those below 1e-6 nats are rounding.
ENTROPY_BUCKETS = 2048
LOWEST_EDGE = 1e-6
HIGHEST_EDGE = 20.0


@dataclass(frozen=True, kw_only=True)
class EntropySelection:
    """Only the tokens of highest or lowest entropy of the current policy have a gradient."""

    node: ClassVar[str] = "clipx.select"

    keep: str = parameter(
        "highest", choice("highest", "lowest"), "the tokens that are kept: of highest or lowest entropy"
    )
    ratio: float = parameter(0.2, number(at_least=1e-6, at_most=1), "the share of the tokens that is kept")
    over: str = parameter(
        "sequence",
        choice("sequence", "mini_batch"),
        "where the share is taken: in each sequence, or over the optimizer mini-batch and all ranks (Wang et al.)",
    )
    normaliser: str = parameter(
        "selected",
        choice("selected", "all"),
        "the tokens that the loss is averaged over: the selected ones (release) or all",
    )

    def __post_init__(self) -> None:
        validate(self, self.node)

    def selected(self, entropy: Tensor, mask: Tensor, bucket: Tensor | None = None) -> Tensor:
        """The tokens that are kept: bool, (sequences, length), within the mask.

        Args:
            entropy: the current policy's entropy in nats, (sequences, length).
            mask: bool, (sequences, length).
            bucket: where a selection over the mini-batch ends, from `entropy_threshold`; None: at that of these tokens.
        """
        if self.over == "sequence":
            return select_per_sequence(entropy, mask, keep=self.keep, fraction=self.ratio)
        if bucket is None:
            bucket, _ = entropy_threshold(entropy_statistics(entropy, mask), keep=self.keep, fraction=self.ratio)
        return select_by_threshold(entropy, mask, bucket, keep=self.keep)


def select_per_sequence(entropy: Tensor, mask: Tensor, *, keep: str, fraction: float) -> Tensor:
    """The `fraction` of each sequence's tokens with the highest or the lowest entropy.

    Args:
        entropy: entropy of the policy at each token in nats, (sequences, length), any float dtype.
        mask: bool or 0/1, (sequences, length).
        keep: "highest" or "lowest".
        fraction: in (0, 1].

    Returns:
        bool, (sequences, length), within the mask: `count_per_sequence` tokens of each sequence. Among equal entropies
        the earlier tokens are taken, so padding and the order of the sequences change nothing.

    Source: ACPO's released baselines (top 20 %, bottom 80 %), after Wang et al. 2025, "Beyond the 80/20 Rule".
    """
    mask = mask.bool()
    count = count_per_sequence(mask, fraction=fraction)
    order = entropy.detach().argsort(dim=-1, descending=keep == "highest", stable=True)
    counts_in_order = mask.gather(-1, order)
    # Ranks among the response's tokens alone: padding, NaN or not, may lie anywhere in the order.
    rank = counts_in_order.cumsum(-1)
    chosen = counts_in_order & (rank <= count.unsqueeze(-1))
    return torch.zeros_like(mask).scatter(-1, order, chosen)


def count_per_sequence(mask: Tensor, *, fraction: float) -> Tensor:
    """How many tokens of each sequence `select_per_sequence` selects, known without any entropy.

    Args:
        mask: bool or 0/1, (sequences, length).
        fraction: in (0, 1].

    Returns:
        int64, (sequences,): the whole part of fraction * tokens, but at least 1; 0 for a sequence without tokens.

    Source: ACPO's released code.
    """
    tokens = mask.bool().sum(-1)
    # float64 as in Python's int(tokens * fraction): in float32 the whole part may differ.
    share = (tokens.to(torch.float64) * fraction).to(torch.int64)
    return torch.minimum(share.clamp(min=1), tokens)


def entropy_statistics(entropy: Tensor, mask: Tensor) -> Tensor:
    """Additive statistics from which `entropy_threshold` chooses: the histogram of the entropies.

    Args:
        entropy: entropy of the policy at each token in nats, (sequences, length), any float dtype.
        mask: bool or 0/1, (sequences, length).

    Returns:
        (ENTROPY_BUCKETS,), float64: tokens per bucket. Buckets are logarithmic from 1e-6 to 20 nats, neighbouring
        edges 0.83 % apart; the first and the last bucket are open.
    """
    return histogram(_bucket(entropy), mask, ENTROPY_BUCKETS)


def entropy_threshold(statistics: Tensor, *, keep: str, fraction: float) -> tuple[Tensor, Tensor]:
    """The bucket down (or up) to which tokens are selected; nothing is fetched to the host.

    Whole buckets are selected, the fewest that hold at least `fraction` of the tokens.

    Args:
        statistics: sum of `entropy_statistics` over any tokens, (ENTROPY_BUCKETS,).
        keep: "highest" or "lowest".
        fraction: in (0, 1].

    Returns:
        bucket: 0-d int64, the last bucket selected.
        selected: 0-d float64, the number of tokens selected; 0 if there are no tokens.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule", who select over the batch, here to the width of a bucket.
    """
    if keep == "lowest":
        return first_reaching(statistics, fraction)
    steps_down, selected = first_reaching(statistics.flip(0), fraction)
    return ENTROPY_BUCKETS - 1 - steps_down, selected


def select_by_threshold(entropy: Tensor, mask: Tensor, bucket: Tensor, *, keep: str) -> Tensor:
    """The tokens on the selected side of a threshold, its own bucket included.

    Args:
        entropy: as for `entropy_statistics`.
        mask: bool or 0/1, (sequences, length).
        bucket: 0-d int64 from `entropy_threshold`.
        keep: "highest" or "lowest", as for the threshold.

    Returns:
        bool, (sequences, length), within the mask.
    """
    token_bucket = _bucket(entropy)
    return mask.bool() & (token_bucket >= bucket if keep == "highest" else token_bucket <= bucket)


def _bucket(entropy: Tensor) -> Tensor:
    # Made on the device: copying a list there would wait for it.
    inner_edges = torch.linspace(
        math.log(LOWEST_EDGE), math.log(HIGHEST_EDGE), ENTROPY_BUCKETS - 1, dtype=torch.float64, device=entropy.device
    ).exp()
    return bucket_of(entropy, inner_edges)
