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

SETTINGS_OF_SCORING = ("reward", "cluster")
"""Evaluations can be compared only if these agree. `clipx papers eval score` can make them agree."""

SETTINGS_OF_SAMPLING = ("max_tokens", "temperature", "top_p", "template")
"""Evaluations may differ in these, because a user may want to compare them. `describe_different_sampling` says so."""

ACCURACY = "avg"
"""The name of avg@k in a comparison. avg@k estimates the same quantity for every k, so that evaluations with different
k can be compared; maj@k does not."""

BEST = "best@"
"""Prefix of metrics that can be compared only between equal numbers of samples: see `best_at_k`."""

Comparisons = dict[str, dict[str, Comparison]]
"""Comparisons, second minus first, by benchmark and metric."""


def find_evaluations(pattern: str) -> list[Path]:
    """Find the folders of evaluations that match a pattern.

    Args:
        pattern: a folder, or a pattern of folders such as `runs/grpo-seed*/evaluation/aime24`.

    Returns:
        At least one folder, in alphabetical order.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    # The name of a folder may contain the special characters of a pattern.
    if Path(pattern).is_dir():
        return [Path(pattern)]
    paths = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
    if not paths:
        raise FileNotFoundError(f"{pattern}: there is no such folder, and no folder matches it as a pattern")
    return [Path(path) for path in paths]


def compare_evaluations(first: Sequence[Path], second: Sequence[Path]) -> Comparisons:
    """Compare two methods, or two checkpoints, on the benchmarks that all their evaluations share.

    If a protocol averages several checkpoints, the evaluation's value for a question is the mean over them.

    Args:
        first: the folders of the first method's scored evaluations, one for each training.
        second: the same for the second method.

    Returns:
        By benchmark and metric, the comparison of the second method with the first. avg@k has the key "avg", whatever k
        is. Metrics that some evaluations lack are left out, such as pass@8 if one has 4 samples. So is best@j unless
        all evaluations have the same number of samples.

    Raises:
        FileNotFoundError: an evaluation has no results.
        ValueError: the evaluations share no benchmark, benchmarks of the same name have different questions, they were
            scored by different rules, or two evaluations of one method are of the same checkpoint.
    """
    first_results = {path: EvaluationFolder(path).read_results() for path in first}
    second_results = {path: EvaluationFolder(path).read_results() for path in second}
    first_configs = {path: results["config"] for path, results in first_results.items()}
    second_configs = {path: results["config"] for path, results in second_results.items()}
    configs = {**first_configs, **second_configs}
    _check_settings_of_scoring(configs)
    _check_checkpoints_differ(first_configs)
    _check_checkpoints_differ(second_configs)
    sample_counts = {config["sampling"]["samples"] for config in configs.values()}
    comparisons = {}
    for benchmark, benchmark_config in _shared_benchmarks(configs).items():
        first_values = _stack_trainings(
            [results["benchmarks"][benchmark]["values"] for results in first_results.values()]
        )
        second_values = _stack_trainings(
            [results["benchmarks"][benchmark]["values"] for results in second_results.values()]
        )
        metrics = [metric for metric in first_values if metric in second_values]
        if len(sample_counts) > 1:
            metrics = [metric for metric in metrics if not metric.startswith(BEST)]
        clusters = benchmark_config.get("clusters")
        # `compare` takes all values by benchmark, because it can add up several; here it gets one.
        clusters_by_benchmark = {benchmark: np.asarray(clusters)} if clusters else None
        comparisons[benchmark] = {}
        for metric in metrics:
            comparisons[benchmark][metric] = compare(
                {benchmark: first_values[metric]}, {benchmark: second_values[metric]}, clusters_by_benchmark
            )
    return comparisons


def _check_settings_of_scoring(configs: dict[Path, dict[str, Any]]) -> None:
    """Raise ValueError if two evaluations were not scored by the same rule."""
    (first, first_config), *others = configs.items()
    for second, second_config in others:
        for key in SETTINGS_OF_SCORING:
            first_value = first_config.get(key)
            second_value = second_config.get(key)
            if first_value != second_value:
                raise ValueError(
                    f"{key} is {first_value!r} in {first} and {second_value!r} in {second}: score one of them again "
                    "(clipx papers eval score), so that both use the same rule"
                )


def _check_checkpoints_differ(configs: dict[Path, dict[str, Any]]) -> None:
    """Raise ValueError if two evaluations of one method are of the same checkpoint.

    Two checkpoints of one training are not recognised: a fingerprint does not say which training it is of.

    Args:
        configs: the configurations of the method's evaluations.
    """
    path_by_fingerprint: dict[str, Path] = {}
    for path, config in configs.items():
        for checkpoint in config["checkpoints"].values():
            first_path = path_by_fingerprint.setdefault(checkpoint["fingerprint"], path)
            if first_path != path:
                raise ValueError(
                    f"{first_path} and {path} are of the same checkpoint, so they are one training and not two. Put "
                    "the samples of both seeds into one evaluation of this checkpoint: clipx papers eval run … --seed "
                    "0 --seed 1"
                )


def _shared_benchmarks(configs: dict[Path, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the benchmarks that all configurations have, with the entries of the first configuration.

    Raises:
        ValueError: there is none, or the configurations have different questions under its name.
    """
    first, *others = [config["benchmarks"] for config in configs.values()]
    shared = {}
    for name, benchmark_config in first.items():
        if all(name in benchmarks for benchmarks in others):
            shared[name] = benchmark_config
    if not shared:
        lists = [f"{path} has {', '.join(config['benchmarks'])}" for path, config in configs.items()]
        raise ValueError(f"the evaluations have no common benchmark: {'; '.join(lists)}")
    for name, benchmark_config in shared.items():
        if any(benchmarks[name]["sha256"] != benchmark_config["sha256"] for benchmarks in others):
            raise ValueError(f"benchmark {name}: the evaluations were made on different questions")
    return shared


def _stack_trainings(trainings: list[dict[str, list[float]]]) -> dict[str, np.ndarray]:
    """Stack the values of each metric that all trainings have.

    Args:
        trainings: for each training the values of each metric on the questions of a benchmark.

    Returns:
        For each metric an array ``[trainings, questions]`` float64.
    """
    with_common_names = []
    for values in trainings:
        with_common_names.append({_common_name(metric): column for metric, column in values.items()})
    stacked = {}
    for metric in with_common_names[0]:
        if all(metric in values for values in with_common_names):
            stacked[metric] = np.array([values[metric] for values in with_common_names], dtype=np.float64)
    return stacked


def _common_name(metric: str) -> str:
    """Return a metric's name in a comparison. That of avg@k loses k, which may differ between trainings."""
    return ACCURACY if metric.startswith(f"{ACCURACY}@") else metric


def describe_different_sampling(paths: Sequence[Path]) -> list[str]:
    """Return a sentence for each setting of the sampling that is not the same in all evaluations.

    Args:
        paths: the folders of the evaluations of both methods.
    """
    sampling_by_path = {path: EvaluationFolder(path).read_results()["config"]["sampling"] for path in paths}
    sentences = []
    for key in SETTINGS_OF_SAMPLING:
        path_by_value: dict[Any, Path] = {}
        for path, sampling in sampling_by_path.items():
            # An evaluation of an older version may not say it.
            if key in sampling:
                path_by_value.setdefault(sampling[key], path)
        if len(path_by_value) > 1:
            values = " and ".join(f"{value!r} in {path}" for value, path in path_by_value.items())
            sentences.append(f"{key} is {values}: differences may come from this setting.")
    return sentences


def verdicts(comparisons: Comparisons) -> list[str]:
    """Return sentences on what the accuracies mean, with p-values after Holm's correction for several benchmarks."""
    sides = ("the first", "the second")
    accuracies = correct_family([metrics[ACCURACY] for metrics in comparisons.values()])
    lines = []
    for benchmark, accuracy in zip(comparisons, accuracies, strict=True):
        questions = accuracy.wins + accuracy.losses + accuracy.ties
        judgement = judge(accuracy, "accuracy", f"over {questions} questions", sides, sides, family=len(comparisons))
        lines.append(f"{benchmark}: {judgement.head} {judgement.text} {judgement.caveat}".strip())
        if accuracy.error:
            parts = [f"{squared_error**0.5:.3f} from {part}s" for part, squared_error in accuracy.error.items()]
            lines.append(f"Standard error of this difference: {' and '.join(parts)}.")
    # A caution that holds for several benchmarks is said once.
    cautions: dict[str, None] = {}
    for accuracy in accuracies:
        caution_text = caution(min(accuracy.seeds)) if accuracy.verdict else None
        if caution_text:
            cautions[caution_text] = None
    lines += [f"{caution_text}." for caution_text in cautions]
    return lines
