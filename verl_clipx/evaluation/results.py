"""Scoring an evaluation's completions, and the file of results."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from verl_clipx.evaluation.answers import extract_answer
from verl_clipx.evaluation.benchmark import Benchmark, read_benchmark
from verl_clipx.evaluation.comparison import Comparison, paired_bootstrap
from verl_clipx.evaluation.files import hash_of_json
from verl_clipx.evaluation.folder import EvaluationFolder
from verl_clipx.evaluation.protocols import BEST_VALIDATION, best_checkpoint, mean_over_checkpoints
from verl_clipx.evaluation.samples import read_samples
from verl_clipx.evaluation.scores import (
    check_ground_truths,
    load_function,
    read_scores,
    score_samples,
    write_scores,
)
from verl_clipx.evaluation.summary import estimates, is_correct, question_values
from verl_clipx.files import write_json

QuestionValues = dict[str, np.ndarray]
"""By metric, ``[questions]``."""


def benchmarks_of(config: dict[str, Any]) -> list[Benchmark]:
    """Read the benchmarks that an evaluation was made on.

    Raises:
        ValueError: a benchmark's file has changed since.
    """
    found = []
    for name, entry in config["benchmarks"].items():
        benchmark = read_benchmark(Path(entry["path"]), name, limit=entry["limit"])
        if benchmark.sha256 != entry["sha256"]:
            raise ValueError(
                f"{entry['path']}: has changed since benchmark {name} was evaluated; put the file back, or evaluate "
                "anew with another --out"
            )
        found.append(benchmark)
    return found


def check_scoring(config: dict[str, Any], benchmarks: list[Benchmark]) -> None:
    """Refuse what else would show only after all completions have been sampled.

    Args:
        config: of the evaluation, or its keys reward, answer, correct and correct_from.
        benchmarks: what it is about.

    Raises:
        ValueError: a function cannot be imported, the reward cannot use a ground truth or has no such part, or
            `correct_from` is no number.
        RuntimeError: the reward fails on an empty response.
    """
    reward = load_function(config["reward"], "--reward")
    answer = load_function(config["answer"], "--answer") if config["answer"] else extract_answer
    if not math.isfinite(config["correct_from"]):
        raise ValueError(f"--correct-from {config['correct_from']}: must be a finite number")
    for benchmark in benchmarks:
        check_ground_truths(benchmark, reward)
        if config["correct"] is not None:
            nothing = pandas.DataFrame([{"question": 0, "sample": 0, "text": ""}])
            is_correct(score_samples(nothing, benchmark, reward, answer), config["correct"], config["correct_from"])


def score(
    folder: EvaluationFolder, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Score all completions with the configured reward and write the results.

    Args:
        folder: of the evaluation; every completion must be there.
        on_progress: called with the completions scored and their number in all.

    Returns:
        The results, as written to `results.json`.

    Raises:
        ValueError: completions are missing, or a benchmark or function cannot be read.
        RuntimeError: the reward failed; names the completion.
    """
    config = folder.read_config()
    reward = load_function(config["reward"], "--reward")
    answer = load_function(config["answer"], "--answer") if config["answer"] else extract_answer
    benchmarks = benchmarks_of(config)
    k = config["sampling"]["samples"]
    total = k * len(config["checkpoints"]) * sum(len(benchmark.questions) for benchmark in benchmarks)
    done = 0

    def scored() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    # Results that no longer fit the scores must not be found if this is interrupted.
    folder.results.unlink(missing_ok=True)
    for benchmark in benchmarks:
        for label in config["checkpoints"]:
            completions = folder.completions(label, benchmark.name)
            samples = read_samples(completions, questions=len(benchmark.questions), samples=k)
            write_scores(
                folder.scores(label, benchmark.name), score_samples(samples, benchmark, reward, answer, scored)
            )
    results = summarise(folder)
    write_json(folder.results, results)
    return results


def values_of_checkpoints(
    folder: EvaluationFolder, config: dict[str, Any], benchmark: str
) -> dict[str, QuestionValues]:
    """By checkpoint, every metric's value on every question of a benchmark.

    Raises:
        FileNotFoundError: it has not been scored.
    """
    entry = config["benchmarks"][benchmark]
    values = {}
    for label in config["checkpoints"]:
        samples = read_samples(
            folder.completions(label, benchmark), questions=entry["questions"], samples=config["sampling"]["samples"]
        )
        scores = read_scores(folder.scores(label, benchmark))
        values[label] = question_values(
            samples, scores, correct_part=config["correct"], correct_from=config["correct_from"]
        )
    return values


def combine(protocol: str, values: dict[str, QuestionValues]) -> tuple[QuestionValues, list[str]]:
    """What the protocol reports.

    Args:
        protocol: its name.
        values: by checkpoint in training order.

    Returns:
        By metric, ``[questions]``: of the best checkpoint under "best-validation", else the mean over the checkpoints;
        and the checkpoints that it comes from.
    """
    metrics = next(iter(values.values()))
    if protocol == BEST_VALIDATION.name:
        accuracy = next(metric for metric in metrics if metric.startswith("avg@"))
        best = best_checkpoint({label: found[accuracy] for label, found in values.items()})
        return values[best], [best]
    return {
        metric: mean_over_checkpoints({label: found[metric] for label, found in values.items()}) for metric in metrics
    }, list(values)


def summarise(folder: EvaluationFolder) -> dict[str, Any]:
    """The results of a scored evaluation: its configuration, and per benchmark the estimates of every checkpoint and of
    the protocol. `hash` covers all of it."""
    config = folder.read_config()
    results: dict[str, Any] = {"config": config, "interval": "95 %, Student's t over questions", "benchmarks": {}}
    for name in config["benchmarks"]:
        values = values_of_checkpoints(folder, config, name)
        combined, used = combine(config["protocol"], values)
        results["benchmarks"][name] = {
            "questions": config["benchmarks"][name]["questions"],
            "result": _as_json(combined),
            "from_checkpoints": used,
            "checkpoints": {label: _as_json(found) for label, found in values.items()},
            "completions": {label: hash_of_completions(folder, config, label, name) for label in values},
        }
    return results | {"hash": hash_of_json(results)}


def hash_of_completions(folder: EvaluationFolder, config: dict[str, Any], checkpoint: str, benchmark: str) -> str:
    """SHA-256 over the tokens of all completions in order: equal for two evaluations that sampled the same."""
    samples = read_samples(
        folder.completions(checkpoint, benchmark),
        questions=config["benchmarks"][benchmark]["questions"],
        samples=config["sampling"]["samples"],
    )
    return hash_of_json([tokens.tolist() for tokens in samples["tokens"]])


def _as_json(values: QuestionValues) -> dict[str, dict[str, float]]:
    return {metric: estimate.as_dict() for metric, estimate in estimates(values).items()}


def compare(first: EvaluationFolder, second: EvaluationFolder, *, seed: int = 0) -> dict[str, dict[str, Comparison]]:
    """Compare two scored evaluations on the benchmarks that both have.

    Each enters as its protocol reports it. Note that a run under "best-validation" has an advantage over any other.

    Args:
        first, second: their folders; differences are second minus first.
        seed: seed of the bootstrap.

    Returns:
        By benchmark and metric; metrics that only one of them has (pass@8 of a run with 4 samples) are left out.

    Raises:
        FileNotFoundError: one of them has no results.
        ValueError: they share no benchmark, one of the same name has other questions, or they were scored by different
            rules.
    """
    configs = [folder.read_config() for folder in (first, second)]
    for folder in (first, second):
        # Without them the scores may be of two rewards, one of them interrupted.
        if not folder.results.is_file():
            raise FileNotFoundError(f"{folder.path}: not scored yet; run `clipx eval score` on it")
    for key in ("reward", "correct", "correct_from", "answer"):
        one, other = (config[key] for config in configs)
        if one != other:
            raise ValueError(
                f"{key} is {one!r} in {first.path} and {other!r} in {second.path}: score one of them again "
                "(clipx eval score), so that both were judged by one rule"
            )
    shared = [name for name in configs[0]["benchmarks"] if name in configs[1]["benchmarks"]]
    if not shared:
        raise ValueError(
            f"no common benchmark: {first.path} has {', '.join(configs[0]['benchmarks'])}, "
            f"{second.path} has {', '.join(configs[1]['benchmarks'])}"
        )
    found: dict[str, dict[str, Comparison]] = {}
    for name in shared:
        questions = [
            (config["benchmarks"][name]["sha256"], config["benchmarks"][name]["questions"]) for config in configs
        ]
        if questions[0] != questions[1]:
            raise ValueError(f"benchmark {name}: the two evaluations were made on different questions")
        reported = [
            combine(config["protocol"], values_of_checkpoints(folder, config, name))[0]
            for folder, config in zip((first, second), configs, strict=True)
        ]
        one, other = [_without_k(values) for values in reported]
        found[name] = {
            metric: paired_bootstrap(one[metric], other[metric], seed=seed) for metric in one if metric in other
        }
    return found


def _without_k(values: QuestionValues) -> QuestionValues:
    """avg@k estimates the same thing for every k, so runs of different k can be compared; maj@k does not."""
    return {"avg" if metric.startswith("avg@") else metric: column for metric, column in values.items()}
