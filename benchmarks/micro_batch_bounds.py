"""Draws docs/figures/micro_batch_bounds.png: ACPO's epsilon per bin against the size of the micro-batch.

Run: python benchmarks/micro_batch_bounds.py

The tokens are synthetic: their log-ratios have heavy tails and more spread where the probability is low, as late
updates on a rollout batch have.
"""

from pathlib import Path

import matplotlib
import torch

from verl_clipx.base.tokens import Inputs, Tokens, tokens_of
from verl_clipx.methods.acpo import Acpo

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "micro_batch_bounds.png"
SEQUENCES, LENGTH = 256, 512
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEGREES_OF_FREEDOM = 4.0


def batch(seed: int) -> Tokens:
    """A ragged mini-batch whose policy has moved away from the old one."""
    torch.manual_seed(seed)
    probability = torch.distributions.Beta(1.2, 0.35).sample((SEQUENCES, LENGTH)).double().clamp(1e-6, 1 - 1e-9)
    heavy = torch.distributions.StudentT(DEGREES_OF_FREEDOM).sample((SEQUENCES, LENGTH)).double()
    log_ratio = ((0.02 + 0.3 * (1 - probability)) * heavy).clamp(-3, 3)
    lengths = torch.randint(LENGTH // 8, LENGTH + 1, (SEQUENCES, 1))
    old = probability.log()
    advantages = torch.randn(SEQUENCES, 1).double().expand(-1, LENGTH)
    return tokens_of(Inputs(old + log_ratio, old, advantages, torch.arange(LENGTH) < lengths), None)


def micro_batches(t: Tokens, size: int) -> list[Tokens]:
    """Tokens cut into micro-batches of a number of sequences."""
    pieces = [[None] * SEQUENCES if tensor is None else tensor.split(size) for tensor in t]
    return [Tokens(*piece) for piece in zip(*pieces, strict=False)]


def epsilons(acpo: Acpo, t: Tokens, size: int) -> torch.Tensor:
    """Epsilon of each micro-batch of a size and each bin, (micro-batches, bins)."""
    decisions = [acpo.decide(acpo.statistics(part)) for part in micro_batches(t, size)]
    return torch.stack(decisions)[:, acpo.bins :]


def clipped(acpo: Acpo, t: Tokens, decision: torch.Tensor) -> torch.Tensor:
    """Tokens outside the bounds that a decision sets, (sequences, length)."""
    low, high = acpo.bounds(t, decision)
    return t.mask & ((t.ratio < low) | (t.ratio > high))


def other_side(acpo: Acpo, t: Tokens, size: int) -> float:
    """Tokens that are clipped by one of the two bounds only, in shares of those clipped over the mini-batch."""
    whole = clipped(acpo, t, acpo.decide(acpo.statistics(t)))
    own = torch.cat([clipped(acpo, part, acpo.decide(acpo.statistics(part))) for part in micro_batches(t, size)])
    return float((own != whole).sum() / whole.sum())


def main() -> None:
    """Draws the figure and prints its numbers."""
    acpo = Acpo()
    tokens = batch(seed=0)
    exact = epsilons(acpo, tokens, SEQUENCES)[0]
    figure, axes = pyplot.subplots(1, acpo.bins, figsize=(13, 3.2), layout="constrained")
    print("| micro-batch | " + " | ".join(f"bin {index}" for index in range(acpo.bins)) + " | other side |")
    print("|---|" + "---|" * (acpo.bins + 1))
    by_size = {size: epsilons(acpo, tokens, size) for size in SIZES}
    for size, found in by_size.items():
        cells = [
            f"{column.mean():.2f} ({column.min():.2f}-{column.max():.2f})" if len(column) > 1 else f"{column[0]:.2f}"
            for column in found.T
        ]
        print(f"| {size} | " + " | ".join(cells) + f" | {100 * other_side(acpo, tokens, size):.1f} % |")
    for index, axis in enumerate(axes):
        columns = [found[:, index] for found in by_size.values()]
        axis.fill_between(SIZES, [c.min() for c in columns], [c.max() for c in columns], alpha=0.2)
        axis.plot(SIZES, [c.mean() for c in columns], "o-", markersize=3, label="micro-batches: mean, range")
        axis.axhline(exact[index], color="black", linestyle="--", linewidth=1, label="mini-batch")
        axis.set_xscale("log", base=2)
        axis.set_title(f"probability {index / acpo.bins:.1f}-{(index + 1) / acpo.bins:.1f}", fontsize=9)
        axis.set_xlabel("sequences of a micro-batch")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("epsilon")
    axes[0].legend(fontsize=7)
    figure.savefig(FIGURE, dpi=110)
    print(FIGURE.relative_to(Path.cwd()) if FIGURE.is_relative_to(Path.cwd()) else FIGURE)


if __name__ == "__main__":
    main()
