"""Adaptive bounds at scale, on paper and by simulation: docs/dev/measurements.md. Run: python benchmarks/scale.py

Virtual ranks sum the methods' statistics over micro-batches of tokens with heavy tails. What all sums decide is
compared with one pass over the same float32 ratios, in float64 and by other formulas. The all-reduces are gloo's
between processes of this machine: what a call costs at least, without a network.
"""

import tempfile
import time
from pathlib import Path

import numpy
import torch
import typer

from verl_clipx.base.tokens import Inputs, Tokens, tokens_of
from verl_clipx.loss.loss import statistics_of
from verl_clipx.loss.token_trace import TokenTrace
from verl_clipx.methods.acpo import Acpo
from verl_clipx.methods.bapo import Bapo
from verl_clipx.methods.m2po import OCTAVES, M2po
from verl_clipx.worker.state import ControllerState, description, write_state
from verl_clipx.worker.trace_writer import CAPACITY

ACPO, BAPO, M2PO = METHODS = Acpo(), Bapo(), M2po(behaviour="old")
# Tokens of a micro-batch; of a rollout batch, a rank's responses, their length, and the updates.
MICRO_BATCH, RESPONSES, LENGTH, UPDATES = 2**16, 128, 4096, 16


def micro_batches(rank: int, tokens: int):
    """The micro-batches of a rank with about so many tokens."""
    generator, count = torch.Generator().manual_seed(rank), -(-tokens // MICRO_BATCH)
    for _ in range(count):
        drawn = torch.rand(4, 16, tokens // count // 16, generator=generator).clamp(1e-4, 1 - 1e-4)
        old, advantages = drawn[0].log(), drawn[1] - 0.57
        moved = 0.2 * (1.2 - drawn[0]) * (drawn[2].logit() + 2 * advantages) / drawn[3].pow(0.2)
        yield Inputs(old + moved, old, advantages, torch.ones_like(old, dtype=torch.bool))


class OnePass:
    """The bounds from one pass: spreads merged by Chan's formula, histograms by binary search."""

    def __init__(self) -> None:
        self.spread = numpy.zeros((3, ACPO.bins))
        self.upper, self.lower = (BAPO._candidates(side).numpy() for side in ("upper", "lower"))
        self.edges = OCTAVES.edges("cpu").numpy()
        # Of each interval between edges: the sum of weights, and of weights times values.
        self.sums = [numpy.zeros((2, len(edges) + 1)) for edges in (self.upper, self.lower, self.edges)]

    def add(self, t: Tokens) -> None:
        bin = (t.old_log_prob.exp() * ACPO.bins).long()
        for k, (n, mean, squares) in enumerate(self.spread.T.copy()):
            r = t.ratio[bin == k].double().numpy()
            away, total = r.mean() - mean, n + r.size
            squares += ((r - r.mean()) ** 2).sum() + away**2 * n * r.size / total
            self.spread[:, k] = total, mean + away * r.size / total, squares
        A, r, x = (values.flatten().numpy() for values in (t.advantages, t.ratio, t.log_prob - t.old_log_prob))
        weight, up, down, x = A * t.old_log_prob.exp().flatten().numpy(), A > 0, A < 0, numpy.abs(x[A * x > 0])
        places = self.upper.astype("f4").searchsorted(r[up]), self.lower.astype("f4").searchsorted(r[down], "right")
        weights, values = (weight[up], -weight[down], numpy.ones_like(x)), (r[up], r[down], x.astype("f8") ** 2)
        for sums, place, w, v in zip(self.sums, (*places, self.edges.searchsorted(x)), weights, values, strict=True):
            sums += [numpy.bincount(place, of, sums.shape[1]) for of in (w, w.astype("f8") * v)]

    def bounds(self) -> list[list[float]]:
        (pw, pv), (nw, nv), (number, square) = (sums.cumsum(1) for sums in self.sums)
        P = pv[:-1] + self.upper * (pw[-1] - pw[:-1])
        upper = (P / (P + nv[-1] - nv[0] + self.lower[0] * nw[0]) < BAPO.target).argmin()
        tau = self.edges[(square / numpy.maximum(number, 1) <= M2PO.threshold).argmin() - 1]
        epsilon = ACPO.alpha * numpy.sqrt(self.spread[2] / self.spread[0]) + ACPO.epsilon_base
        return [list(epsilon), [self.lower[0], self.upper[upper]], [tau]]


def simulate(ranks: int, tokens: int) -> None:
    """Prints the bounds of all ranks' sums, and how far they are from the one pass's, relatively."""
    of_ranks, one_pass = [], OnePass()
    for rank in range(ranks):
        own = [torch.zeros(method.statistics_size, dtype=torch.float64) for method in METHODS]
        for inputs in micro_batches(rank, tokens // ranks):
            t = tokens_of(inputs, 20.0)
            own = [total + statistics_of(method, t, None) for method, total in zip(METHODS, own, strict=True)]
            one_pass.add(t)
        of_ranks.append(own)
    print(f"{one_pass.spread[0].sum():,.0f} tokens on {ranks} ranks")
    for dtype in (torch.float64, torch.float32):
        for method, vectors, other in zip(METHODS, zip(*of_ranks, strict=True), one_pass.bounds(), strict=True):
            decided = method.decide(torch.stack(vectors).to(dtype).sum(0).double()).tolist()
            bounds = {"acpo": decided[ACPO.bins :], "bapo": decided[:2], "m2po": decided[:1]}[method.name]
            away = max(abs(one / another - 1) for one, another in zip(bounds, other, strict=True))
            print(f"| {method.name}, {dtype} | {', '.join(f'{bound:.6g}' for bound in bounds)} | {away:.1e} |")


def reduce_vectors(rank: int, world: int, meeting: str, repeats: int) -> None:
    """A process of `world`, the first of which prints how long an all-reduce takes."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for method in METHODS:
        vector, ms = torch.zeros(method.statistics_size, dtype=torch.float64), []
        for _ in range(repeats + 10):
            started = time.perf_counter()
            torch.distributed.all_reduce(vector)
            ms.append(1e3 * (time.perf_counter() - started))
        if rank == 0:
            name = f"{method.name}, {vector.nbytes} bytes, {world} processes"
            print(f"| {name} | {numpy.median(ms[10:]):.2f} ms | {min(ms[10:]):.2f} ms |")


def main(tokens: float = 1e7, ranks: int = 1024, repeats: int = 200) -> None:
    """Print the simulation's bounds, times of all-reduces, and bytes of traces and checkpoints."""
    torch.set_num_threads(1)
    simulate(ranks, int(tokens))
    with tempfile.TemporaryDirectory() as folder:
        for world in (2, 4, 8):
            given = (world, f"{folder}/{world}", repeats)
            torch.multiprocessing.start_processes(reduce_vectors, given, world, start_method="fork")
        for method in METHODS:
            drawn = [torch.rand(method.statistics_size, dtype=torch.float64) for _ in range(UPDATES)]
            state = ControllerState(statistics={f"update_{number}": one for number, one in enumerate(drawn)})
            size = write_state(Path(folder), state, description(method)).stat().st_size
            print(f"| {method.name}, lagged, state of {UPDATES} updates | {size:,} bytes |")
    size = RESPONSES * LENGTH * (len(TokenTrace._fields) + 1) * 4
    print(f"| trace of a rank's {RESPONSES} responses of {LENGTH} tokens | {size:,} bytes, at most {CAPACITY:,} |")


if __name__ == "__main__":
    typer.run(main)
