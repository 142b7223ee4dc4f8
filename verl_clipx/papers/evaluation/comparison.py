"""Compares scored evaluations of two checkpoints, or of two methods with several training runs each."""

import glob
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_clipx.common.statistics.comparison import Comparison, compare
from verl_clipx.common.statistics.variance import Split, split_variance
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.protocols import MEAN_OF_LAST_THREE
from verl_clipx.papers.evaluation.results import QuestionValues, clusters_of, combine, values_of_checkpoints

RULES = ("reward", "correct", "correct_from", "answer", "cluster")
"""Settings on which two evaluations must agree to be compared."""

ACCURACY = "avg"
"""avg@k estimates the same quantity for every k, so that runs with different k can be compared; maj@k does not."""

Configs = dict[Path, dict[str, Any]]


@dataclass(frozen=True)
class Side:
    """One method on one benchmark.

    Args:
        values: arrays ``[trainings, questions]`` by metric; metrics that some trainings lack are left out.
        samples: samples behind each share of correct ones; None if trainings differ or it is a mean over checkpoints.
    """

    values: dict[str, np.ndarray]
    samples: int | None

    def split(self) -> Split | None:
        """Return the variance of the accuracy, or None if there is only one question."""
        accuracy = self.values[ACCURACY]
        return split_variance(accuracy, self.samples) if accuracy.shape[1] > 1 else None


@dataclass(frozen=True)
class Compared:
    """The comparison on one benchmark.

    Args:
        metrics: differences, second minus first.
        sides: "first" and "second".
    """

    metrics: dict[str, Comparison]
    sides: dict[str, Side]

    @property
    def seeds(self) -> tuple[int, ...]:
        """Number of trainings of each side."""
        return tuple(len(side.values[ACCURACY]) for side in self.sides.values())

    @property
    def questions(self) -> int:
        """Number of questions."""
        return self.sides["first"].values[ACCURACY].shape[1]

    def variance(self) -> dict[str, Any]:
        """Return for each side the components of the variance of one sample's score, and what each contributes to the
        squared standard error of the accuracy; None where there is only one question."""
        parts: dict[str, Any] = {}
        for (name, side), seeds in zip(self.sides.items(), self.seeds, strict=True):
            split = side.split()
            parts[name] = split and {
                "of_one_sample": asdict(split),
                "of_the_mean": split.of_mean(self.questions, seeds, side.samples or 1),
            }
        return parts


def find_evaluations(pattern: str) -> list[EvaluationFolder]:
    """Find the evaluations that a folder or a pattern such as `runs/grpo-seed*/evaluation/aime24` stands for."""
    paths = [pattern] if Path(pattern).is_dir() else sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not paths:
        raise FileNotFoundError(f"{pattern}: there is no such folder, and no folder matches it as a pattern")
    return [EvaluationFolder(Path(path)) for path in paths]


def compare_evaluations(first: Sequence[EvaluationFolder], second: Sequence[EvaluationFolder]) -> dict[str, Compared]:
    """Compare two methods, or two checkpoints, on the benchmarks that all their evaluations share.

    Each evaluation enters as its protocol reports it. Note that a run under "best-validation" has an advantage over any
    other.

    Args:
        first, second: one scored evaluation per training; differences are second minus first.

    Returns:
        The comparison by benchmark. Metrics that some evaluations lack (pass@8 with 4 samples) are left out.

    Raises:
        FileNotFoundError: an evaluation has no results.
        ValueError: the evaluations share no benchmark, benchmarks of the same name have different questions, they were
            scored by different rules, or a method has the same checkpoint twice.
    """
    configs: Configs = {folder.path: _config_of(folder) for folder in (*first, *second)}
    _check_rules(configs)
    for method in (first, second):
        _check_trainings(method, configs)
    compared = {}
    for benchmark in _shared_benchmarks(configs):
        sides = {"first": _side(first, configs, benchmark), "second": _side(second, configs, benchmark)}
        values = [side.values for side in sides.values()]
        clusters = clusters_of(configs[first[0].path], benchmark)
        labels = None if clusters is None else {benchmark: clusters}
        metrics = {
            metric: compare({benchmark: values[0][metric]}, {benchmark: values[1][metric]}, labels)
            for metric in values[0]
            if metric in values[1]
        }
        compared[benchmark] = Compared(metrics, sides)
    return compared


def _config_of(folder: EvaluationFolder) -> dict[str, Any]:
    config = folder.read_config()
    # Without results, the scores may come from two rewards if rescoring was interrupted.
    if not folder.results.is_file():
        raise FileNotFoundError(f"{folder.path}: not scored yet; run `clipx eval score` on it")
    return config


def _check_rules(configs: Configs) -> None:
    (first, one), *others = configs.items()
    for second, other in others:
        for key in RULES:
            if one.get(key) != other.get(key):
                raise ValueError(
                    f"{key} is {one.get(key)!r} in {first} and {other.get(key)!r} in {second}: score one of them again "
                    "(clipx eval score), so that both use the same rule"
                )


def _check_trainings(method: Sequence[EvaluationFolder], configs: Configs) -> None:
    seen: dict[str, Path] = {}
    for folder in method:
        for checkpoint in configs[folder.path]["checkpoints"].values():
            other = seen.setdefault(checkpoint["fingerprint"], folder.path)
            if other != folder.path:
                raise ValueError(
                    f"{other} and {folder.path} are of the same checkpoint, so they are one training and not two. "
                    "Sample it with both seeds in one evaluation: clipx eval run … --seed 0 --seed 1"
                )


def _shared_benchmarks(configs: Configs) -> list[str]:
    first, *others = (config["benchmarks"] for config in configs.values())
    shared = [name for name in first if all(name in benchmarks for benchmarks in others)]
    if not shared:
        named = "; ".join(f"{path} has {', '.join(config['benchmarks'])}" for path, config in configs.items())
        raise ValueError(f"the evaluations have no common benchmark: {named}")
    for name in shared:
        if len({(one[name]["sha256"], one[name]["questions"]) for one in (first, *others)}) > 1:
            raise ValueError(f"benchmark {name}: the evaluations were made on different questions")
    return shared


def _side(method: Sequence[EvaluationFolder], configs: Configs, benchmark: str) -> Side:
    reported: list[QuestionValues] = []
    samples = set()
    for folder in method:
        config = configs[folder.path]
        values, _ = combine(config["protocol"], values_of_checkpoints(folder, config, benchmark))
        reported.append({ACCURACY if name.startswith("avg@") else name: column for name, column in values.items()})
        samples.add(None if config["protocol"] == MEAN_OF_LAST_THREE.name else config["sampling"]["samples"])
    everywhere = [metric for metric in reported[0] if all(metric in values for values in reported)]
    stacked = {metric: np.stack([values[metric] for values in reported]) for metric in everywhere}
    return Side(stacked, samples.pop() if len(samples) == 1 else None)
