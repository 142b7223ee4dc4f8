"""Compares scored evaluations of two checkpoints, or of two methods with several training runs each."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_clipx.common.statistics.comparison import Comparison, compare
from verl_clipx.papers.evaluation.folder import EvaluationFolder

RULES = ("reward", "cluster")
"""Settings on which two evaluations must agree to be compared."""

ACCURACY = "avg"
"""avg@k estimates the same quantity for every k, so that runs with different k can be compared; maj@k does not."""

Results = dict[Path, dict[str, Any]]
"""The content of results.json, by the folder of the evaluation."""


@dataclass(frozen=True)
class Compared:
    """The comparison on one benchmark: by metric, second minus first, over so many questions."""

    metrics: dict[str, Comparison]
    questions: int


def find_evaluations(pattern: str) -> list[Path]:
    """Find the evaluations that a folder or a pattern such as `runs/grpo-seed*/evaluation/aime24` stands for."""
    paths = [pattern] if Path(pattern).is_dir() else sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not paths:
        raise FileNotFoundError(f"{pattern}: there is no such folder, and no folder matches it as a pattern")
    return [Path(path) for path in paths]


def compare_evaluations(first: Sequence[Path], second: Sequence[Path]) -> dict[str, Compared]:
    """Compare two methods, or two checkpoints, on the benchmarks that all their evaluations share.

    Each evaluation enters as its protocol reports it. Note that a run under "best-validation" has an advantage over any
    other.

    Args:
        first, second: the folder of one scored evaluation per training.

    Returns:
        The comparison by benchmark. Metrics that some evaluations lack (pass@8 with 4 samples) are left out.

    Raises:
        FileNotFoundError: an evaluation has no results.
        ValueError: the evaluations share no benchmark, benchmarks of the same name have different questions, they were
            scored by different rules, or a method has the same checkpoint twice.
    """
    sides: list[Results] = [{path: EvaluationFolder(path).read_results() for path in side} for side in (first, second)]
    configs = {path: results["config"] for side in sides for path, results in side.items()}
    _check_rules(configs)
    for side in sides:
        _check_trainings({path: configs[path] for path in side})
    compared = {}
    for benchmark in _shared_benchmarks(configs):
        values = [_stacked(side, benchmark) for side in sides]
        shared = next(iter(configs.values()))["benchmarks"][benchmark]
        clusters = {benchmark: np.asarray(shared["clusters"])} if shared.get("clusters") else None
        metrics = {
            metric: compare({benchmark: values[0][metric]}, {benchmark: values[1][metric]}, clusters)
            for metric in values[0]
            if metric in values[1]
        }
        compared[benchmark] = Compared(metrics, shared["questions"])
    return compared


def _check_rules(configs: Results) -> None:
    (first, one), *others = configs.items()
    for second, other in others:
        for key in RULES:
            if one.get(key) != other.get(key):
                raise ValueError(
                    f"{key} is {one.get(key)!r} in {first} and {other.get(key)!r} in {second}: score one of them again "
                    "(clipx eval score), so that both use the same rule"
                )


def _check_trainings(configs: Results) -> None:
    seen: dict[str, Path] = {}
    for path, config in configs.items():
        for checkpoint in config["checkpoints"].values():
            other = seen.setdefault(checkpoint["fingerprint"], path)
            if other != path:
                raise ValueError(
                    f"{other} and {path} are of the same checkpoint, so they are one training and not two. "
                    "Sample it with both seeds in one evaluation: clipx eval run … --seed 0 --seed 1"
                )


def _shared_benchmarks(configs: Results) -> list[str]:
    first, *others = (config["benchmarks"] for config in configs.values())
    shared = [name for name in first if all(name in benchmarks for benchmarks in others)]
    if not shared:
        named = "; ".join(f"{path} has {', '.join(config['benchmarks'])}" for path, config in configs.items())
        raise ValueError(f"the evaluations have no common benchmark: {named}")
    for name in shared:
        if len({(one[name]["sha256"], one[name]["questions"]) for one in (first, *others)}) > 1:
            raise ValueError(f"benchmark {name}: the evaluations were made on different questions")
    return shared


def _stacked(side: Results, benchmark: str) -> dict[str, np.ndarray]:
    """Return arrays ``[trainings, questions]`` by metric; metrics that some trainings lack are left out."""
    reported = [
        {ACCURACY if name.startswith("avg@") else name: column for name, column in one["values"].items()}
        for one in (results["benchmarks"][benchmark] for results in side.values())
    ]
    everywhere = [metric for metric in reported[0] if all(metric in values for values in reported)]
    return {metric: np.array([values[metric] for values in reported], dtype=np.float64) for metric in everywhere}
