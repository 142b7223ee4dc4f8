"""How often the 95 % interval of `clipx eval compare` holds the true difference, in made-up evaluations.

Run: python benchmarks/coverage.py [--repeats 4000]    prints the numbers of docs/dev; minutes on one core
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np
import typer
from simulation import World

from verl_clipx.common.statistics import comparison, variance
from verl_clipx.common.statistics.comparison import Comparison, compare

WORLDS = {
    "trainings do not differ": World(seeds=(0.0, 0.0), interaction=0.0),
    "trainings differ by 1.4 points": World(),
    "by 2.7 points": World(seeds=(0.2, 0.2)),
    "by 1.4 and 4 points": World(seeds=(0.1, 0.3)),
    "by 2.7 points, questions alike": World(seeds=(0.2, 0.2), method=0.0),
}
SIZES = ((30, 16), (256, 8), (500, 1))
"""Questions and samples."""

SEEDS = ((2, 2), (3, 3), (5, 5), (10, 10), (3, 10))

CLUSTERED = World(cluster_size=6.0, shared=0.5, seeds=(0.0, 0.0), method=0.6)


def coverage(repeats: int, world: World, experiment: Callable[[np.random.Generator], Comparison]) -> float:
    """Share of the intervals that hold the truth."""
    truth = world.true_difference()
    generator = np.random.default_rng(1)
    found = [experiment(generator) for _ in range(repeats)]
    return float(np.mean([one.low <= truth <= one.high for one in found if one.low is not None]))


def experiment_in(
    world: World, seeds: tuple[int, int], questions: int, samples: int, clustered: bool = False
) -> Callable[[np.random.Generator], Comparison]:
    """A function that makes one experiment and compares its methods."""

    def experiment(generator: np.random.Generator) -> Comparison:
        first, second, sources = world.draw(seeds, questions, samples, generator)
        return compare({"b": first}, {"b": second}, {"b": sources} if clustered else None)

    return experiment


def bootstrap(world: World, seeds: tuple[int, int], questions: int, samples: int, repeats: int) -> float:
    """Coverage of the percentile bootstrap that draws seeds and questions anew, 400 times."""
    truth, generator, held = world.true_difference(), np.random.default_rng(1), 0
    for _ in range(repeats):
        first, second, _ = world.draw(seeds, questions, samples, generator)
        # A draw with replacement is a weight on each seed and on each question.
        on_questions = generator.multinomial(questions, np.full(questions, 1 / questions), 400) / questions
        means = [
            (
                (generator.multinomial(len(one), np.full(len(one), 1 / len(one)), 400) / len(one)) @ one * on_questions
            ).sum(1)
            for one in (first, second)
        ]
        low, high = np.quantile(means[1] - means[0], [0.025, 0.975])
        held += low <= truth <= high
    return held / repeats


def main(repeats: Annotated[int, typer.Option(min=1, help="Experiments a cell.")] = 4000) -> None:
    """Print coverage by seeds, by clusters, and of the percentile bootstrap."""
    # What is refused otherwise, to show why.
    comparison.MIN_SEEDS, variance.MIN_CLUSTERS = 2, 2
    error = 100 * np.sqrt(0.95 * 0.05 / repeats)
    print(f"{repeats} experiments a cell: standard error {error:.2f} points\n")
    print("| " + " | ".join(["seeds", "questions x samples", *WORLDS]) + " |")
    print("|---" * (2 + len(WORLDS)) + "|")
    for seeds in SEEDS:
        for questions, samples in SIZES:
            cells = [
                coverage(repeats, world, experiment_in(world, seeds, questions, samples)) for world in WORLDS.values()
            ]
            texts = [f"{seeds[0]} and {seeds[1]}", f"{questions} x {samples}", *(f"{100 * one:.1f}" for one in cells)]
            print("| " + " | ".join(texts) + " |", flush=True)
    print("\n| clusters, about | questions x samples | clustered | as if independent |\n|---|---|---|---|")
    for clusters in (3, 5, 10, 20, 50):
        questions = int(clusters * CLUSTERED.cluster_size)
        pair = [
            coverage(repeats, CLUSTERED, experiment_in(CLUSTERED, (1, 1), questions, 8, clustered))
            for clustered in (True, False)
        ]
        print(f"| {clusters} | {questions} x 8 | " + " | ".join(f"{100 * one:.1f}" for one in pair) + " |", flush=True)
    print("\n| seeds | percentile bootstrap, 256 x 8, trainings differ by 2.7 points |\n|---|---|")
    for count in (3, 5, 10):
        held = bootstrap(WORLDS["by 2.7 points"], (count, count), 256, 8, max(1, repeats // 4))
        print(f"| {count} | {100 * held:.1f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
