"""What clipx.precision keeps and costs, on made-up mini-batches: docs/performance.md.

Run: python benchmarks/sampled_bounds.py

A mini-batch is drawn, with replacement, from sequences whose log-ratios have heavy tails, more spread where the
probability is low, and a spread of their own in each sequence. One after the other, as the updates at one position of
successive rollout batches, each is sampled as the last one's error says; the bounds are compared with those of the
whole mini-batch. Samples, errors and shares come from the functions that the worker calls.
"""

import math
import statistics
from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer
from torch import Tensor

from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.bounds import Probes
from verl_clipx.loss.compiled import token_functions
from verl_clipx.methods import Method
from verl_clipx.methods.acpo import Acpo
from verl_clipx.methods.bapo import Bapo
from verl_clipx.methods.m2po import M2po
from verl_clipx.worker.extra_pass import of_each_sequence
from verl_clipx.worker.sampling import (
    GROUPS,
    LEAST,
    by_group,
    drawn,
    error_of_parts,
    next_share,
    standard_errors,
    without_end,
)

# Of the advantages half is positive: BAPO's search ends at its start under the first target, and under the second a few
# sequences decide whether it moves.
METHODS = {
    "acpo": Acpo(),
    "bapo, target 0.4": Bapo(target=0.4),
    "bapo, target 0.5": Bapo(target=0.5),
    "m2po": M2po(behaviour="old", threshold=0.005),
}
# Degrees of freedom of Student's t, the standard deviation of the logarithm of a sequence's own spread, and the spread
# of a token of probability 0. The kurtosis that follows is about the usual one of recorded runs, and the worst.
TAILS = {"usual": (8, 0.2, 0.1), "heavy": (4, 0.4, 0.2)}
LARGEST = 2.0
# Sequences that mini-batches are drawn from, and tokens of each, 1000 on average.
STOCK = 4000
SHORTEST, LONGEST = 250, 1750
# Two-sided 95 % of Student's t with 31 degrees of freedom.
QUANTILE = 2.04
# Updates before the first that counts: the share at most halves with each.
SETTLING = 8
# A forward pass, of forward and backward, and of all updates but the first.
FORWARD, OTHERS = 1 / 3, 15 / 16


def sequences(count: int, tail: tuple[int, float, float], generator: torch.Generator) -> Inputs:
    """Sequences of tokens whose policy has moved away from the old one."""
    freedom, own, spread = tail
    size = count, LONGEST
    uniform = torch.rand(size, generator=generator)
    # Most probabilities are near 1, as those of text.
    probability = (1 - uniform.pow(4)).clamp(1e-6, 1 - 1e-6)
    normal = torch.randn(size, generator=generator)
    chi = torch.stack([torch.randn(size, generator=generator).square() for _ in range(freedom)]).sum(0)
    heavy = normal * (freedom / chi).sqrt()
    scale = (own * torch.randn(count, 1, generator=generator)).exp()
    log_ratio = ((0.02 + spread * (1 - probability)) * scale * heavy).clamp(-LARGEST, LARGEST)
    length = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    old = probability.log()
    advantages = torch.randn(count, 1, generator=generator).expand(size)
    return Inputs(old + log_ratio, old, advantages, torch.arange(LONGEST) < length)


def pool(count: int, tail: tuple[int, float, float]) -> tuple[dict[str, Tensor], list[float]]:
    """Every sequence's statistics by method, (count, statistics_size), and the ratio's kurtosis in ACPO's bins."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[Tensor]] = {name: [] for name in METHODS}
    deviations: list[list[Tensor]] = [[] for _ in range(METHODS["acpo"].bins)]
    for start in range(0, count, 50):
        part = sequences(min(50, count - start), tail, generator)
        for name, method in METHODS.items():
            found[name].append(of_each_sequence(token_functions(method, None, compiled=False), part))
        ratio, bin = (part.log_prob - part.old_log_prob).exp(), (part.old_log_prob.exp() * len(deviations)).int()
        for k, one in enumerate(deviations):
            one.append(ratio[part.mask & (bin == k)])
    every = [torch.cat(one).double() for one in deviations]
    kurtosis = [float((one - one.mean()).pow(4).mean() / one.var().square()) for one in every]
    return {name: torch.cat(parts) for name, parts in found.items()}, kurtosis


@dataclass
class Found:
    """Of the updates of one cell.

    Args:
        shares: of the sequences, each update's.
        predicted, real: largest standard error and largest error of the bounds, of each update with a sample.
        within: of the bounds, the share whose error is within their own 95 % interval, of the same updates.
    """

    shares: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    real: list[float] = field(default_factory=list)
    within: list[float] = field(default_factory=list)

    def cells(self, precision: float) -> list[str]:
        """Of a row of the table."""
        share = statistics.mean(self.shares)
        if not self.real:
            return [f"{100 * share:.1f} %", "", "", "", "", "", f"{1 + share * FORWARD * OTHERS:.3f}"]
        together = statistics.mean(r <= QUANTILE * p for r, p in zip(self.real, self.predicted, strict=True))
        kept = statistics.mean(error <= precision for error in self.predicted)
        root = math.sqrt(statistics.mean(error**2 for error in self.real))
        return [
            f"{100 * share:.1f} %",
            f"{100 * statistics.mean(self.predicted):.2f} %",
            f"{100 * kept:.0f} %",
            f"{100 * root:.2f} %",
            f"{100 * statistics.mean(self.within):.1f} %",
            f"{100 * together:.1f} %",
            f"{1 + share * FORWARD * OTHERS:.3f}",
        ]


def cell(method: Method, every: Tensor, count: int, precision: float, updates: int) -> Found:
    """Successive updates on mini-batches of a number of sequences.

    Args:
        every: statistics of the sequences to draw from, (sequences, statistics_size).
    """
    generator, found, share = torch.Generator().manual_seed(1), Found(), 1.0
    for update in range(SETTLING + updates):
        if count < LEAST:
            found.shares.append(1.0)
            continue
        chosen = torch.randint(len(every), (count,), generator=generator)
        exact = torch.bincount(chosen, minlength=len(every)).to(every.dtype) @ every
        sample = drawn(count, share, rank=0, ranks=1, seed=str(update))
        groups = by_group(every[chosen[sample.rows]], sample.group)
        passed = len(sample.rows) / count
        errors = standard_errors(method, groups, scale=1 / passed)
        if update >= SETTLING:
            found.shares.append(passed)
            if passed < 1:
                probes = Probes(method, groups.sum(0) / passed)
                real = probes.apart(probes.first, probes.bounds(exact))
                factor = without_end(1.0, passed)
                found.predicted.append(factor * float(errors.max()))
                found.real.append(float(real.max()))
                found.within.append(float((real <= QUANTILE * factor * errors).double().mean()))
        largest = max(float(errors.max()), error_of_parts(method, groups, scale=1 / passed))
        share = next_share(largest, sampled=len(sample.rows), sequences=count, precision=precision)
    return found


def main(
    precision: Annotated[float, typer.Option(help="As clipx.precision.")] = 0.03,
    updates: Annotated[int, typer.Option(min=1, help="Updates a cell.")] = 200,
) -> None:
    """Print the table of docs/performance.md."""
    torch.set_num_threads(1)
    print(f"precision {precision:g}, {updates} updates a cell, {GROUPS} groups, torch {torch.__version__}")
    stocks = {name: pool(STOCK, tail) for name, tail in TAILS.items()}
    for name, (_, kurtosis) in stocks.items():
        print(f"{name}: the ratio's kurtosis in ACPO's bins " + ", ".join(f"{one:.0f}" for one in kurtosis))
    print(
        "\n| method | tails | tokens | sequences passed | predicted error | at most the precision | real error | "
        "within a bound's 95 % | largest within 95 % | of vanilla |\n|" + "---|" * 10
    )
    for name, method in METHODS.items():
        for tail, (every, _) in stocks.items():
            for tokens in (10**4, 10**5, 10**6, 10**7):
                found = cell(method, every[name], tokens * 2 // (SHORTEST + LONGEST), precision, updates)
                cells = [name, tail, f"10^{round(math.log10(tokens))}", *found.cells(precision)]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    typer.run(main)
