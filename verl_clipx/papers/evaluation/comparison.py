"""Compares scored evaluations of two checkpoints, or of two methods with several training runs each."""

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_clipx.common.statistics.collapse import caution
from verl_clipx.common.statistics.comparison import Comparison, compare, correct_family
from verl_clipx.common.statistics.verdict import judge
from verl_clipx.papers.evaluation.folder import EvaluationFolder

RULES = ("reward", "cluster")
"""Settings on which two evaluations must agree to be compared."""

ACCURACY = "avg"
"""avg@k estimates the same quantity for every k, so that runs with different k can be compared; maj@k does not."""

Compared = dict[str, dict[str, Comparison]]
"""Comparisons over questions, second minus first, by benchmark and metric."""


def find_evaluations(pattern: str) -> list[Path]:
    """Find the evaluations that a folder or a pattern such as `runs/grpo-seed*/evaluation/aime24` stands for."""
    paths = [pattern] if Path(pattern).is_dir() else sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not paths:
        raise FileNotFoundError(f"{pattern}: there is no such folder, and no folder matches it as a pattern")
    return [Path(path) for path in paths]


def compare_evaluations(first: Sequence[Path], second: Sequence[Path]) -> Compared:
    """Compare two methods, or two checkpoints, on the benchmarks that all their evaluations share.

    Each evaluation enters as its protocol reports it.

    Args:
        first, second: the folder of one scored evaluation per training.

    Returns:
        The comparisons. Metrics that some evaluations lack (pass@8 with 4 samples) are left out.

    Raises:
        FileNotFoundError: an evaluation has no results.
        ValueError: the evaluations share no benchmark, benchmarks of the same name have different questions, they were
            scored by different rules, or a method has the same checkpoint twice.
    """
    sides = [{path: EvaluationFolder(path).read_results() for path in side} for side in (first, second)]
    configs = {path: results["config"] for side in sides for path, results in side.items()}
    _check_rules(configs)
    for side in sides:
        _check_trainings({path: configs[path] for path in side})
    compared = {}
    for benchmark, shared in _shared_benchmarks(configs).items():
        values = [_stacked([results["benchmarks"][benchmark]["values"] for results in side.values()]) for side in sides]
        clusters = {benchmark: np.asarray(shared["clusters"])} if shared.get("clusters") else None
        compared[benchmark] = {
            metric: compare({benchmark: values[0][metric]}, {benchmark: values[1][metric]}, clusters)
            for metric in values[0]
            if metric in values[1]
        }
    return compared


def _check_rules(configs: dict[Path, dict[str, Any]]) -> None:
    (first, one), *others = configs.items()
    for second, other in others:
        for key in RULES:
            if one.get(key) != other.get(key):
                raise ValueError(
                    f"{key} is {one.get(key)!r} in {first} and {other.get(key)!r} in {second}: score one of them again "
                    "(clipx papers eval score), so that both use the same rule"
                )


def _check_trainings(configs: dict[Path, dict[str, Any]]) -> None:
    seen: dict[str, Path] = {}
    for path, config in configs.items():
        for checkpoint in config["checkpoints"].values():
            other = seen.setdefault(checkpoint["fingerprint"], path)
            if other != path:
                raise ValueError(
                    f"{other} and {path} are of the same checkpoint, so they are one training and not two. "
                    "Sample it with both seeds in one evaluation: clipx papers eval run … --seed 0 --seed 1"
                )


def _shared_benchmarks(configs: dict[Path, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the benchmarks that all configurations have, as the first one has them."""
    first, *others = (config["benchmarks"] for config in configs.values())
    shared = {name: entry for name, entry in first.items() if all(name in benchmarks for benchmarks in others)}
    if not shared:
        named = "; ".join(f"{path} has {', '.join(config['benchmarks'])}" for path, config in configs.items())
        raise ValueError(f"the evaluations have no common benchmark: {named}")
    for name, entry in shared.items():
        if any(benchmarks[name]["sha256"] != entry["sha256"] for benchmarks in others):
            raise ValueError(f"benchmark {name}: the evaluations were made on different questions")
    return shared


def _stacked(trainings: list[dict[str, list[float]]]) -> dict[str, np.ndarray]:
    """Return arrays ``[trainings, questions]`` by metric; metrics that some trainings lack are left out."""
    named = [
        {ACCURACY if metric.startswith("avg@") else metric: column for metric, column in values.items()}
        for values in trainings
    ]
    everywhere = [metric for metric in named[0] if all(metric in values for values in named)]
    return {metric: np.array([values[metric] for values in named], dtype=np.float64) for metric in everywhere}


def verdicts(compared: Compared) -> list[str]:
    """Say what the accuracies on each benchmark mean, with Holm's p-values where there are several benchmarks."""
    sides = ("the first", "the second")
    accuracies = correct_family([metrics[ACCURACY] for metrics in compared.values()])
    lines = []
    for benchmark, accuracy in zip(compared, accuracies, strict=True):
        basis = f"over {accuracy.wins + accuracy.losses + accuracy.ties} questions"
        said = judge(accuracy, "accuracy", basis, sides, sides, family=len(compared))
        lines.append(f"{benchmark}: {said.head} {said.text} {said.caveat}".strip())
        if accuracy.error:
            parts = " and ".join(f"{share**0.5:.3f} from {part}s" for part, share in accuracy.error.items())
            lines.append(f"Standard error of this difference: {parts}.")
    doubts = dict.fromkeys(caution(min(one.seeds)) for one in accuracies if one.verdict)
    return [*lines, *(f"{doubt}." for doubt in doubts if doubt)]
