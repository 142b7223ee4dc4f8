"""False claims where there is no difference (A/A): how often the verdict tells runs of one setting apart.

Run: python benchmarks/no_difference.py [--repeats 4000]    prints the numbers of docs/dev; minutes on one core
"""

from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas
import typer
from scipy import stats
from simulation import LOGS, World, one_sided_collapse

from verl_clipx.common.statistics.collapse import COVERAGE, collapse
from verl_clipx.common.statistics.comparison import ALIKE, LEVEL, Comparison, compare, compare_means, compare_shares

STORED = Path(__file__).parents[1] / "docs" / "results" / "cpu_small_steps.csv"
STEPS = (8, 40, 200, 2000)
SEEDS = ((3, 3), (5, 5), (10, 10), (3, 10))

Judge = Callable[[np.ndarray, np.ndarray], Comparison]

Draw = Callable[[int, np.random.Generator], np.ndarray]
"""From a number of seeds and a generator to rewards ``[seeds, steps]`` of one setting."""


@cache
def stored_runs() -> dict[str, np.ndarray]:
    """The rewards of the stored logs ``[seeds, steps]``, by preset."""
    table = pandas.read_csv(STORED)
    return {
        name: one.pivot(index="seed", columns="step", values="reward").to_numpy()
        for name, one in table.groupby("preset")
    }


def of_stored_logs(seeds: int, generator: np.random.Generator) -> np.ndarray:
    """Logs of a setting that has the deviations of the stored ones from their setting's mean.

    Each is of another setting, as those of one add up to 0; of three seeds a deviation has 2/3 of the variance.
    """
    runs = stored_runs()
    chosen = generator.choice(len(runs), seeds, replace=seeds > len(runs) // 2)
    every = [list(runs.values())[index] for index in chosen]
    return np.stack([0.5 + np.sqrt(1.5) * (one - one.mean(axis=0))[generator.integers(len(one))] for one in every])


def worlds() -> dict[tuple[str, int], Draw]:
    """By name and steps what trainings of one setting look like."""
    found: dict[tuple[str, int], Draw] = {
        (name, steps): lambda seeds, generator, draw=draw, steps=steps: draw(seeds, steps, generator)
        for name, draw in LOGS.items()
        for steps in STEPS
    }
    return {("deviations of the stored logs", 20): of_stored_logs} | found


def of_rewards(first: np.ndarray, second: np.ndarray) -> Comparison:
    """The verdict of the page on rewards in training ``[seeds, steps]``."""
    return compare_means(first.mean(axis=1), second.mean(axis=1))


def of_collapses(first: np.ndarray, second: np.ndarray) -> Comparison:
    """The verdict on the shares of trainings that collapsed."""
    return compare_shares(*([collapse(run) is not None for run in side] for side in (first, second)))


JUDGES = (of_rewards, of_collapses)


def is_claim(found: Comparison) -> bool:
    """Whether it says that the methods differ."""
    return found.verdict not in (None, ALIKE)


def false_claims(draw: Draw, seeds: tuple[int, int], repeats: int, judged: Judge = of_rewards) -> float:
    """The share of pairs of settings without a difference that are told apart."""
    generator = np.random.default_rng(0)
    return float(np.mean([is_claim(judged(*(draw(count, generator) for count in seeds))) for _ in range(repeats)]))


def by_independent_steps(draw: Draw, repeats: int) -> float:
    """What two single runs would give if steps were taken as independent: the reason for not doing so."""
    generator = np.random.default_rng(0)
    pairs = (draw(2, generator) for _ in range(repeats))
    return float(np.mean([stats.ttest_rel(*pair).pvalue < LEVEL for pair in pairs]))


def of_normal_numbers(seeds: tuple[int, int], deviations: tuple[float, float], repeats: int) -> tuple[float, float]:
    """False claims with seeds whose spreads differ, and those of Welch's test without the limit."""
    generator = np.random.default_rng(0)
    both = zip(seeds, deviations, strict=True)
    first, second = (deviation * generator.standard_normal((repeats, count)) for count, deviation in both)
    claims = np.mean([is_claim(compare_means(*pair)) for pair in zip(first, second, strict=True)])
    return float(claims), float(np.mean(stats.ttest_ind(first, second, axis=1, equal_var=False).pvalue < LEVEL))


def coverage(seeds: int, repeats: int) -> float:
    """The share of intervals that hold the true difference where a fifth of one method's trainings collapse."""
    generator = np.random.default_rng(0)
    found = [compare_means(*one_sided_collapse(seeds, generator)) for _ in range(repeats)]
    return float(np.mean([one.low <= -0.06 <= one.high for one in found]))


def main(repeats: Annotated[int, typer.Option(min=1, help="Pairs of settings a cell.")] = 4000) -> None:
    """Print false claims by world, of evaluations and of collapses, and what a collapse leaves of an interval."""
    print(f"{repeats} pairs a cell: standard error of 5 % {100 * np.sqrt(0.05 * 0.95 / repeats):.2f} points\n")
    pairs = [pair for runs in stored_runs().values() for pair in combinations(runs, 2)]
    claims = sum(is_claim(of_rewards(*(run[None] for run in pair))) for pair in pairs)
    steps = sum(stats.ttest_rel(*pair).pvalue < LEVEL for pair in pairs)
    print(f"Stored logs: {len(pairs)} pairs of seeds of one setting, {claims} claims; by independent steps {steps}.\n")
    headings = ["trainings differ by", "steps", *(f"{one} and {other} seeds" for one, other in SEEDS)]
    print("| " + " | ".join([*headings, "1 and 1, by independent steps"]) + " |\n" + "|---" * (len(headings) + 1) + "|")
    for (name, steps), draw in worlds().items():
        shares = [false_claims(draw, seeds, repeats) for seeds in SEEDS]
        cells = [f"{100 * one:.1f}" for one in [*shares, by_independent_steps(draw, repeats)]]
        print("| " + " | ".join([name, str(steps), *cells]) + " |", flush=True)
    world = World(effect=0.0, method=0.0, seeds=(0.2, 0.2))
    shares = []
    for seeds in SEEDS:
        generator = np.random.default_rng(0)
        drawn = (world.draw(seeds, 256, 8, generator) for _ in range(repeats))
        shares.append(np.mean([is_claim(compare({"b": first}, {"b": second})) for first, second, _ in drawn]))
    print("| evaluations, 256 x 8, by 2.7 points | | " + " | ".join(f"{100 * one:.1f}" for one in shares) + " | |")
    shares = [false_claims(worlds()["collapses of a fifth", 40], seeds, repeats // 10, of_collapses) for seeds in SEEDS]
    print("| shares of collapses, a fifth | 40 | " + " | ".join(f"{100 * one:.1f}" for one in shares) + " | |")
    print("\n| seeds, normal numbers | standard deviations | told apart | without the limit |\n|---|---|---|---|")
    for seeds, deviations in (((10, 10), (1, 1)), ((3, 10), (1, 1)), ((3, 10), (2, 1)), ((3, 3), (2, 1))):
        cells = [f"{100 * one:.1f}" for one in of_normal_numbers(seeds, deviations, 10 * repeats)]
        print(f"| {seeds} | {deviations} | " + " | ".join(cells) + " |", flush=True)
    print("\n| seeds of each | intervals that hold the truth, a fifth of one method's trainings collapse |\n|---|---|")
    for count in COVERAGE:
        print(f"| {count} | {100 * coverage(count, repeats):.0f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
