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

    An evaluation whose protocol averages several checkpoints enters with their mean, question by question.

    Args:
        first: the folders of the first method's scored evaluations, one for each training.
        second: those of the second method.

    Returns:
        The comparisons. Metrics that some evaluations lack (pass@8 with 4 samples) are left out.

    Raises:
        FileNotFoundError: an evaluation has no results.
        ValueError: the evaluations share no benchmark, benchmarks of the same name have different questions, they were
            scored by different rules, or a method has the same checkpoint twice.
    """
    first_results = {path: EvaluationFolder(path).read_results() for path in first}
    second_results = {path: EvaluationFolder(path).read_results() for path in second}
    first_configs = {path: results["config"] for path, results in first_results.items()}
    second_configs = {path: results["config"] for path, results in second_results.items()}
    configs = {**first_configs, **second_configs}
    _check_rules(configs)
    _check_trainings(first_configs)
    _check_trainings(second_configs)
    compared = {}
    for benchmark, entry in _shared_benchmarks(configs).items():
        first_values = [results["benchmarks"][benchmark]["values"] for results in first_results.values()]
        second_values = [results["benchmarks"][benchmark]["values"] for results in second_results.values()]
        compared[benchmark] = _compare_metrics(
            benchmark, _stacked(first_values), _stacked(second_values), entry.get("clusters")
        )
    return compared


def _compare_metrics(
    benchmark: str, first: dict[str, np.ndarray], second: dict[str, np.ndarray], clusters: list[str] | None
) -> dict[str, Comparison]:
    """Compare two methods on one benchmark, in each metric that both have.

    Args:
        benchmark: its name.
        first, second: values ``[trainings, questions]`` by metric.
        clusters: ``[questions]`` labels; None or empty where questions share no source.
    """
    # `compare` takes all values by benchmark, because it can add up several; here it gets one.
    by_benchmark = {benchmark: np.asarray(clusters)} if clusters else None
    return {
        metric: compare({benchmark: first[metric]}, {benchmark: second[metric]}, by_benchmark)
        for metric in first
        if metric in second
    }


def _check_rules(configs: dict[Path, dict[str, Any]]) -> None:
    """Raises ValueError if two evaluations were not scored by the same rule."""
    (first, first_config), *others = configs.items()
    for second, second_config in others:
        for key in RULES:
            of_first = first_config.get(key)
            of_second = second_config.get(key)
            if of_first != of_second:
                raise ValueError(
                    f"{key} is {of_first!r} in {first} and {of_second!r} in {second}: score one of them again "
                    "(clipx papers eval score), so that both use the same rule"
                )


def _check_trainings(configs: dict[Path, dict[str, Any]]) -> None:
    """Raises ValueError if two evaluations are of the same checkpoint."""
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
    first, *others = [config["benchmarks"] for config in configs.values()]
    shared = {}
    for name, entry in first.items():
        if all(name in benchmarks for benchmarks in others):
            shared[name] = entry
    if not shared:
        named = "; ".join(f"{path} has {', '.join(config['benchmarks'])}" for path, config in configs.items())
        raise ValueError(f"the evaluations have no common benchmark: {named}")
    for name, entry in shared.items():
        if any(benchmarks[name]["sha256"] != entry["sha256"] for benchmarks in others):
            raise ValueError(f"benchmark {name}: the evaluations were made on different questions")
    return shared


def _stacked(trainings: list[dict[str, list[float]]]) -> dict[str, np.ndarray]:
    """Return arrays ``[trainings, questions]`` by metric; metrics that some trainings lack are left out."""
    named = []
    for values in trainings:
        # Trainings with other numbers of samples have their accuracy under other names.
        named.append({ACCURACY if metric.startswith("avg@") else metric: column for metric, column in values.items()})
    stacked = {}
    for metric in named[0]:
        if all(metric in values for values in named):
            stacked[metric] = np.array([values[metric] for values in named], dtype=np.float64)
    return stacked


def verdicts(compared: Compared) -> list[str]:
    """Say what the accuracies on each benchmark mean, with Holm's p-values where there are several benchmarks."""
    sides = ("the first", "the second")
    accuracies = correct_family([metrics[ACCURACY] for metrics in compared.values()])
    lines = []
    for benchmark, accuracy in zip(compared, accuracies, strict=True):
        basis = f"over {accuracy.wins + accuracy.losses + accuracy.ties} questions"
        judgement = judge(accuracy, "accuracy", basis, sides, sides, family=len(compared))
        lines.append(f"{benchmark}: {judgement.head} {judgement.text} {judgement.caveat}".strip())
        if accuracy.error:
            parts = " and ".join(f"{share**0.5:.3f} from {part}s" for part, share in accuracy.error.items())
            lines.append(f"Standard error of this difference: {parts}.")
    doubts = dict.fromkeys(
        caution(min(accuracy_of_benchmark.seeds))
        for accuracy_of_benchmark in accuracies
        if accuracy_of_benchmark.verdict
    )
    return [*lines, *(f"{doubt}." for doubt in doubts if doubt)]
