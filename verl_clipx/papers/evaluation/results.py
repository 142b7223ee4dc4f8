"""Scores an evaluation's completions and writes the results file."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from verl_clipx.common.files import replacing, write_json
from verl_clipx.common.statistics.estimate import estimate
from verl_clipx.common.statistics.variance import too_few_units
from verl_clipx.papers.evaluation.benchmark import Benchmark, read_benchmark, sources_of
from verl_clipx.papers.evaluation.completions import read_completions
from verl_clipx.papers.evaluation.estimators import question_values
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.scores import check_ground_truths, load_member, score_samples
from verl_clipx.papers.evaluation.settings import BEST_VALIDATION

QuestionValues = dict[str, np.ndarray]
"""Arrays ``[questions]`` by metric."""


def benchmarks_of(config: dict[str, Any]) -> list[Benchmark]:
    """Read the benchmarks that an evaluation used.

    Raises:
        ValueError: a benchmark's file has changed since then.
    """
    benchmarks = []
    for name, entry in config["benchmarks"].items():
        benchmark = read_benchmark(Path(entry["path"]), name, limit=entry["questions"])
        if benchmark.sha256 != entry["sha256"]:
            raise ValueError(
                f"{entry['path']}: has changed since benchmark {name} was evaluated; put the file back, or evaluate "
                "anew with another --out"
            )
        benchmarks.append(benchmark)
    return benchmarks


def check_scoring(benchmarks: list[Benchmark], reward: str, cluster: str | None) -> None:
    """Raise errors that would otherwise surface only after all completions have been sampled."""
    function = load_member(reward, "--reward", Callable)
    for benchmark in benchmarks:
        if cluster:
            sources_of(benchmark, cluster)
        check_ground_truths(benchmark, function)


def score(folder: EvaluationFolder) -> dict[str, Any]:
    """Score all completions with the configured reward and write the results.

    Returns:
        The configuration and, per benchmark, the estimates of every checkpoint and of the protocol.
    """
    config = folder.read_config()
    reward = load_member(config["reward"], "--reward", Callable)
    seeds, field = config["sampling"]["seeds"], config.get("cluster")
    over = f"clusters of questions by {field}" if field else "questions"
    results: dict[str, Any] = {"config": config, "interval": f"95 %, Student's t over {over}", "benchmarks": {}}
    # If this is interrupted, no results may remain that no longer match the scores.
    folder.results.unlink(missing_ok=True)
    for benchmark in benchmarks_of(config):
        name, questions = benchmark.name, len(benchmark.questions)
        clusters = np.asarray(sources_of(benchmark, field)) if field else None
        config["benchmarks"][name]["clusters"] = None if clusters is None else clusters.tolist()
        values: dict[str, QuestionValues] = {}
        for label in config["checkpoints"]:
            samples = config["sampling"]["samples"] // len(seeds)
            completions = read_completions(
                folder.completions(label, name), questions=questions, samples=samples, seeds=seeds
            )
            scores = score_samples(completions, benchmark, reward)
            with replacing(folder.scores(label, name)) as partial:
                scores.to_parquet(partial, index=False)
            values[label] = question_values(scores)
        combined, used = combine(config["protocol"], values)
        results["benchmarks"][name] = {
            "questions": questions,
            "no_interval": too_few_units(questions, clusters),
            "result": _as_json(combined, clusters),
            "values": {metric: column.tolist() for metric, column in combined.items()},
            "from_checkpoints": used,
            "checkpoints": {label: _as_json(one, clusters) for label, one in values.items()},
        }
    write_json(folder.results, results)
    return results


def combine(protocol: str, values: dict[str, QuestionValues]) -> tuple[QuestionValues, list[str]]:
    """Return what the protocol reports.

    Reporting the best checkpoint is optimistic: the maximum of noisy means exceeds the mean of the best checkpoint.
    If all checkpoints are equally good and the standard error is s, the bias is about 0.85 s for three, 1.54 s for ten.

    Args:
        values: values by checkpoint, in training order.

    Returns:
        Arrays ``[questions]`` by metric, and the checkpoints behind them. Under "best-validation" these are the values
        of the checkpoint with the highest accuracy (the earliest if tied), otherwise the mean over the checkpoints.
    """
    metrics = next(iter(values.values()))
    if protocol == BEST_VALIDATION.name:
        accuracy = next(metric for metric in metrics if metric.startswith("avg@"))
        best = max(values, key=lambda label: float(np.mean(values[label][accuracy])))
        return values[best], [best]
    mean = {metric: np.mean([one[metric] for one in values.values()], axis=0) for metric in metrics}
    return mean, list(values)


def _as_json(values: QuestionValues, clusters: np.ndarray | None) -> dict[str, dict[str, float | None]]:
    return {metric: asdict(estimate(column, clusters)) for metric, column in values.items()}
