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


@dataclass(frozen=True)
class Side:
    """One method on one benchmark."""

    values: dict[str, np.ndarray]
    """Arrays ``[trainings, questions]`` by metric; metrics that some trainings lack are left out."""

    samples: int | None
    """Samples behind each share of correct ones; None if trainings differ or it is a mean over checkpoints."""

    def split(self) -> Split | None:
        """Return the variance of the accuracy, or None if there is only one question."""
        accuracy = self.values[ACCURACY]
        return split_variance(accuracy, self.samples) if accuracy.shape[1] > 1 else None


@dataclass(frozen=True)
class Compared:
    """The comparison on one benchmark."""

    metrics: dict[str, Comparison]
    variance: dict[str, Split | None]
    """Variance of the accuracy, for "first" and "second"."""

    questions: int
    seeds: tuple[int, int]
    samples: tuple[int | None, int | None]

    def variance_as_dict(self) -> dict[str, Any]:
        """Return JSON values: for "first" and "second", each component of the variance of one sample's score, and what
        it contributes to the squared standard error of the accuracy."""
        found: dict[str, Any] = {}
        for (name, split), seeds, samples in zip(self.variance.items(), self.seeds, self.samples, strict=True):
            found[name] = split and {
                "of_one_sample": asdict(split),
                "of_the_mean": split.of_mean(self.questions, seeds, samples or 1),
            }
        return found


def find_evaluations(pattern: str) -> list[EvaluationFolder]:
    """Find the evaluations that a name stands for.

    Args:
        pattern: a folder, or a pattern such as `runs/grpo-seed*/evaluation/aime24`.
    """
    found = [pattern] if Path(pattern).is_dir() else sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not found:
        raise FileNotFoundError(f"{pattern}: there is no such folder, and no folder matches it as a pattern")
    return [EvaluationFolder(Path(path)) for path in found]


def read_sides(*methods: Sequence[EvaluationFolder]) -> dict[str, tuple[list[Side], np.ndarray | None]]:
    """Read each method's values on the benchmarks that all evaluations share.

    Returns:
        By benchmark, one side per method, and the source labels of its questions.

    Raises:
        FileNotFoundError: an evaluation has no results.
        ValueError: the evaluations share no benchmark, benchmarks of the same name have different questions, they were
            scored by different rules, or a method has the same checkpoint twice.
    """
    folders = [folder for method in methods for folder in method]
    configs = {folder.path: _config_of(folder) for folder in folders}
    base = folders[0]
    for folder in folders[1:]:
        _check_rules(base.path, configs[base.path], folder.path, configs[folder.path])
    for method in methods:
        _check_trainings(method, configs)
    every = [set(config["benchmarks"]) for config in configs.values()]
    shared = [name for name in configs[base.path]["benchmarks"] if all(name in names for names in every)]
    if not shared:
        named = "; ".join(f"{path} has {', '.join(config['benchmarks'])}" for path, config in configs.items())
        raise ValueError(f"the evaluations have no common benchmark: {named}")
    for name in shared:
        entries = [config["benchmarks"][name] for config in configs.values()]
        if len({(entry["sha256"], entry["questions"]) for entry in entries}) > 1:
            raise ValueError(f"benchmark {name}: the evaluations were made on different questions")
    return {
        name: ([_side(method, configs, name) for method in methods], clusters_of(configs[base.path], name))
        for name in shared
    }


def compare_evaluations(first: Sequence[EvaluationFolder], second: Sequence[EvaluationFolder]) -> dict[str, Compared]:
    """Compare two methods, or two checkpoints, on the benchmarks that their evaluations share.

    Each evaluation enters as its protocol reports it. Note that a run under "best-validation" has an advantage over any
    other.

    Args:
        first, second: one scored evaluation per training; differences are second minus first.

    Returns:
        The comparison by benchmark. Metrics that some evaluations lack (pass@8 with 4 samples) are left out.
    """
    found = {}
    for name, ((one, other), clusters) in read_sides(first, second).items():
        found[name] = Compared(
            metrics={
                metric: compare(
                    {name: one.values[metric]},
                    {name: other.values[metric]},
                    None if clusters is None else {name: clusters},
                )
                for metric in one.values
                if metric in other.values
            },
            variance={"first": one.split(), "second": other.split()},
            questions=one.values[ACCURACY].shape[1],
            seeds=(len(first), len(second)),
            samples=(one.samples, other.samples),
        )
    return found


def _config_of(folder: EvaluationFolder) -> dict[str, Any]:
    config = folder.read_config()
    # Without results, the scores may come from two rewards if rescoring was interrupted.
    if not folder.results.is_file():
        raise FileNotFoundError(f"{folder.path}: not scored yet; run `clipx eval score` on it")
    return config


def _check_rules(first: Path, one: dict[str, Any], second: Path, other: dict[str, Any]) -> None:
    for key in RULES:
        if one.get(key) != other.get(key):
            raise ValueError(
                f"{key} is {one.get(key)!r} in {first} and {other.get(key)!r} in {second}: score one of them again "
                "(clipx eval score), so that both use the same rule"
            )


def _check_trainings(method: Sequence[EvaluationFolder], configs: dict[Path, dict[str, Any]]) -> None:
    seen: dict[str, Path] = {}
    for folder in method:
        for checkpoint in configs[folder.path]["checkpoints"].values():
            other = seen.setdefault(checkpoint["fingerprint"], folder.path)
            if other != folder.path:
                raise ValueError(
                    f"{other} and {folder.path} are of the same checkpoint, so they are one training and not two"
                )


def _side(method: Sequence[EvaluationFolder], configs: dict[Path, dict[str, Any]], benchmark: str) -> Side:
    reported: list[QuestionValues] = []
    samples = set()
    for folder in method:
        config = configs[folder.path]
        values, _ = combine(config["protocol"], values_of_checkpoints(folder, config, benchmark))
        reported.append({ACCURACY if name.startswith("avg@") else name: column for name, column in values.items()})
        samples.add(None if config["protocol"] == MEAN_OF_LAST_THREE.name else config["sampling"]["samples"])
    everywhere = [metric for metric in reported[0] if all(metric in values for values in reported)]
    return Side(
        values={metric: np.stack([values[metric] for values in reported]) for metric in everywhere},
        samples=samples.pop() if len(samples) == 1 else None,
    )
