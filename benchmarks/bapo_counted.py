"""Draws docs/figures/bapo_counted.png: what raising BAPO's lower bound does to the share that its search aims at.

Run: python benchmarks/bapo_counted.py
"""

from pathlib import Path

import matplotlib
import torch

from verl_clipx.base.tokens import Inputs, Tokens, tokens_of
from verl_clipx.methods.bapo import Bapo

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend must be chosen first

FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "bapo_counted.png"
TOKENS = 20_000
TARGET = 0.4


def batch(seed: int) -> Tokens:
    """A synthetic off-policy batch in which seven tokens of ten have a negative advantage."""
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.where(torch.rand(1, TOKENS, generator=generator) < 0.3, 1.0, -1.0).double()
    old_log_prob = -torch.rand(1, TOKENS, generator=generator).double() * 3
    drift = 0.45 * torch.randn(1, TOKENS, generator=generator).double() + 0.1 * advantages
    mask = torch.ones_like(drift, dtype=torch.bool)
    return tokens_of(Inputs(old_log_prob + drift, old_log_prob, advantages, mask), None)


def share_at(tokens: Tokens, counted: str, c_low: float, c_high: float) -> float:
    """The positive share at a pair of bounds: a search whose ranges are single points measures it."""
    bapo = Bapo(
        target=TARGET, counted=counted, lower_start=c_low, lower_stop=c_low, upper_start=c_high, upper_stop=c_high
    )
    return float(bapo.decide(bapo.statistics(tokens))[3])


def main() -> None:
    """Draws the figure and prints the bounds that each way of counting ends at."""
    tokens = batch(seed=0)
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    lower = [round(0.6 + 0.02 * step, 2) for step in range(16)]
    for counted, style in (("surrogate", "o-"), ("gradient", "s-")):
        shares = [share_at(tokens, counted, c_low, 3.0) for c_low in lower]
        axis.plot(lower, shares, style, markersize=4, label=f"counted: {counted}")
        bapo = Bapo(target=TARGET, counted=counted)
        c_low, c_high, before, after = bapo.decide(bapo.statistics(tokens)).tolist()
        print(f"{counted}: c_low {c_low:.2f}, c_high {c_high:.2f}, share {before:.4f} -> {after:.4f}")
    axis.axhline(TARGET, color="black", linestyle="--", linewidth=1, label="target")
    axis.set_xlabel("lower bound c_low, the upper bound at its end, 3.0")
    axis.set_ylabel("share of positive tokens P / (P + N)")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(FIGURE, dpi=110)
    print(FIGURE.relative_to(Path.cwd()) if FIGURE.is_relative_to(Path.cwd()) else FIGURE)


if __name__ == "__main__":
    main()
