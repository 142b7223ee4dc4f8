"""Scores stored completions with a reward function, and writes an evaluation's results."""

import math
import pkgutil
import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from verl_clipx.common.files import replacing, write_json
from verl_clipx.common.statistics.estimate import estimate
from verl_clipx.common.statistics.variance import explain_missing_interval
from verl_clipx.papers.evaluation.benchmark import Benchmark, read_benchmark, read_clusters
from verl_clipx.papers.evaluation.estimators import PART_PREFIX, QuestionValues, question_values
from verl_clipx.papers.evaluation.folder import EvaluationFolder, read_completions
from verl_clipx.papers.responses import final_part, find_last_boxed, tagged_answer

MAX_ANSWER_LENGTH = 2000
"""In characters. A longer text does not vote."""


def import_object(name: str, option: str, expected_type: Any) -> Any:
    """Import what an option of the command line names, such as a reward function.

    Args:
        name: `package.module:name`. Modules in the working directory are found, too.
        option: the option that gave the name, for error messages.
        expected_type: the type that the object must have.

    Raises:
        ValueError: the module cannot be imported, has no such name, or what it has is of another type.
    """
    # The command clipx does not put the working directory on the path, as `python -m` does.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        imported = pkgutil.resolve_name(name)
    # A module of the user's may raise anything while it is imported.
    except Exception as error:
        raise ValueError(
            f"{option} {name}: cannot import it as package.module:name ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(imported, expected_type):
        raise ValueError(f"{option} {name}: is of the type {type(imported).__name__}, not {expected_type.__name__}")
    return imported


def load_reward(name: str, benchmarks: list[Benchmark], cluster: str | None) -> Callable[..., Any]:
    """Load a reward function, and raise errors that would otherwise surface only after all completions were sampled.

    Args:
        name: the reward function as `package.module:name`; see `import_object`.
        benchmarks: the questions that it will score.
        cluster: the key of extra_info by which questions are clustered; None if they are not.

    Raises:
        ValueError: there is no such function, a question has no value under the key `cluster`, or the reward cannot use
            a question's ground truth.
    """
    reward = import_object(name, "--reward", Callable)
    for benchmark in benchmarks:
        if cluster:
            # Called only to raise ValueError if a question has no cluster.
            read_clusters(benchmark, cluster)
        _check_ground_truths(benchmark, reward)
    return reward


def _check_ground_truths(benchmark: Benchmark, reward: Callable[..., Any]) -> None:
    """Raise ValueError for a ground truth that the reward cannot use.

    The check is the function `check_ground_truth(data_source, ground_truth)` in the reward's module. Without that
    function, nothing is checked.
    """
    check = getattr(sys.modules[reward.__module__], "check_ground_truth", None)
    if check is None:
        return
    for row, question in enumerate(benchmark.questions):
        try:
            check(question["data_source"], question["reward_model"]["ground_truth"])
        except ValueError as error:
            raise ValueError(f"{benchmark.path}, row {row}: {error}") from None


def score(folder: EvaluationFolder, reward: str | None = None, cluster: str | None = None) -> dict[str, Any]:
    """Score all completions of an evaluation and write the results.

    Args:
        folder: the evaluation.
        reward: the name of a reward function; None for the one in the evaluation's configuration.
        cluster: the key of extra_info by which questions are clustered; None for the one in the configuration.

    Returns:
        The results as they are written: the configuration, what the intervals are over, and for each benchmark what
        `_score_benchmark` returns.

    Raises:
        ValueError: a benchmark's file has changed, a completion is missing, or `load_reward` refuses the reward.
        RuntimeError: see `score_samples`.
    """
    config = folder.read_config()
    config["reward"] = reward or config["reward"]
    config["cluster"] = cluster or config.get("cluster")
    benchmarks = []
    for name, benchmark_config in config["benchmarks"].items():
        benchmarks.append(read_benchmark(Path(benchmark_config["path"]), name, benchmark_config["sha256"]))
    reward_function = load_reward(config["reward"], benchmarks, config["cluster"])
    folder.write_config(config)
    cluster_key = config["cluster"]
    units = f"clusters of questions by {cluster_key}" if cluster_key else "questions"
    results: dict[str, Any] = {"config": config, "interval": f"95 %, Student's t over {units}", "benchmarks": {}}
    for benchmark in benchmarks:
        clusters = np.asarray(read_clusters(benchmark, cluster_key)) if cluster_key else None
        config["benchmarks"][benchmark.name]["clusters"] = None if clusters is None else clusters.tolist()
        results["benchmarks"][benchmark.name] = _score_benchmark(folder, config, benchmark, reward_function, clusters)
    write_json(folder.results_path, results)
    return results


def _score_benchmark(
    folder: EvaluationFolder,
    config: dict[str, Any],
    benchmark: Benchmark,
    reward: Callable[..., Any],
    clusters: np.ndarray | None,
) -> dict[str, Any]:
    """Score the completions of all checkpoints on a benchmark, and write the scores.

    Args:
        config: the evaluation's configuration.
        clusters: ``[questions]`` the label of each question's cluster; None for independent questions.

    Returns:
        The benchmark's part of the results, by these keys:
        `questions`, the number of questions;
        `no_interval`, why there are no intervals, or None;
        `result`, the estimate of each metric over all checkpoints together;
        `values`, the value of each metric on each question, as a mean over all checkpoints;
        `checkpoints`, the estimates of each checkpoint.

    Raises:
        ValueError: a completion is missing.
        RuntimeError: see `score_samples`.
    """
    seeds = config["sampling"]["seeds"]
    # The configuration counts the samples of all seeds together.
    samples_per_seed = config["sampling"]["samples"] // len(seeds)
    scores_by_checkpoint = {}
    for label in config["checkpoints"]:
        seed_folders = [folder.completions_folder(label, benchmark.name, seed) for seed in seeds]
        completions = read_completions(seed_folders, len(benchmark.questions), samples_per_seed)
        scores = score_samples(completions, benchmark, reward)
        with replacing(folder.scores_path(label, benchmark.name)) as partial:
            scores.to_parquet(partial, index=False)
        scores_by_checkpoint[label] = scores
    shared_columns = set.intersection(*(set(scores.columns) for scores in scores_by_checkpoint.values()))
    values_by_checkpoint: dict[str, QuestionValues] = {}
    for label, scores in scores_by_checkpoint.items():
        # A part of the reward that another checkpoint lacks is left out, so that all are judged by the same parts.
        values_by_checkpoint[label] = question_values(scores[[name for name in scores if name in shared_columns]])
    # The evaluation's result is about all checkpoints together: a question's value is the mean over them.
    metrics = next(iter(values_by_checkpoint.values()))
    mean_by_metric = {}
    for metric in metrics:
        columns = [values[metric] for values in values_by_checkpoint.values()]
        mean_by_metric[metric] = np.mean(columns, axis=0)
    estimates_by_checkpoint = {}
    for label, values in values_by_checkpoint.items():
        estimates_by_checkpoint[label] = _estimates(values, clusters)
    return {
        "questions": len(benchmark.questions),
        "no_interval": explain_missing_interval(len(benchmark.questions), clusters),
        "result": _estimates(mean_by_metric, clusters),
        "values": {metric: column.tolist() for metric, column in mean_by_metric.items()},
        "checkpoints": estimates_by_checkpoint,
    }


def _estimates(values: QuestionValues, clusters: np.ndarray | None) -> dict[str, dict[str, float | None]]:
    """Return each metric's mean over questions with the ends of its interval, as JSON values."""
    return {metric: asdict(estimate(column, clusters)) for metric, column in values.items()}


def score_samples(samples: pandas.DataFrame, benchmark: Benchmark, reward: Callable[..., Any]) -> pandas.DataFrame:
    """Score every completion as verl's reward manager would.

    Args:
        samples: from `read_completions`.
        benchmark: the questions that the completions answer.
        reward: called with the keyword arguments data_source, solution_str, ground_truth and extra_info; returns a
            number or a dict with the key "score". The value of the key "pred", if there is one, is the answer that
            votes, as in verl's validation.

    Returns:
        The samples with the column `answer` in place of `text`, and a float column `reward/<part>` for every number or
        boolean that the reward returned for all completions.

    Raises:
        RuntimeError: the reward raised an exception, or returned a score that is not a finite number or an answer that
            cannot vote; the message names the completion.
    """
    answers = []
    numbers = []
    for sample in samples.itertuples():
        question = benchmark.questions[sample.question]
        try:
            returned = reward(
                data_source=question["data_source"],
                solution_str=sample.text,
                ground_truth=question["reward_model"]["ground_truth"],
                extra_info=dict(question["extra_info"]),
            )
            parts = returned if isinstance(returned, dict) else {"score": returned}
            answers.append(_read_answer(parts, sample.text))
            numbers.append(_read_numbers(parts))
        except Exception as error:
            raise RuntimeError(
                f"the reward failed on benchmark {benchmark.name}, question {sample.question}, sample {sample.sample} "
                f"({type(error).__name__}: {error}). All completions are kept. Fix the reward and run "
                "`clipx papers eval score`."
            ) from error
    reward_columns = pandas.DataFrame(numbers, index=samples.index).add_prefix(PART_PREFIX)
    # A NaN means that a completion has no such key: a number that is not finite has been refused above.
    reward_columns = reward_columns.dropna(axis="columns")
    return samples.drop(columns="text").assign(answer=answers).join(reward_columns)


def _read_answer(parts: dict[str, Any], text: str) -> Any:
    """Return the answer that votes: the one that the reward returns, or else the last one in the response.

    Args:
        parts: what the reward returned.
        text: the response.

    Raises:
        ValueError: votes for the reward's answer cannot be counted, because it is not hashable, such as a list.
    """
    if "pred" not in parts:
        return extract_answer(text)
    answer = parts["pred"]
    if not isinstance(answer, Hashable):
        raise ValueError(f"returned pred={answer!r}, for which votes cannot be counted; it must be a text or a number")
    return answer


def _read_numbers(parts: dict[str, Any]) -> dict[str, float]:
    """Return the numbers and booleans among the parts of a reward.

    Args:
        parts: what the reward returned.

    Raises:
        ValueError: a number is not finite, or no part `score` is a number.
    """
    # numpy registers its integers and floats as real numbers, but not its booleans.
    numbers = {key: float(value) for key, value in parts.items() if isinstance(value, Real | np.bool_)}
    if "score" not in numbers or not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"returned {parts!r}, which is not a finite number `score` with other finite numbers")
    return numbers


def extract_answer(text: str) -> str | None:
    r"""Return a response's last answer: the content of its last `<answer>…</answer>`, else of its last `\boxed{…}`.

    As in the rewards, text before the last `</think>` or inside an unclosed `<think>` is ignored; otherwise truncated
    responses would vote. A box inside the tags is unwrapped. White space is removed, so that "1, 2" and "1,2" are the
    same vote. Nothing is evaluated: answers that are equal only mathematically are different votes.

    Returns:
        The answer, or None if it is missing, empty or longer than `MAX_ANSWER_LENGTH`.
    """
    tagged = tagged_answer(text, MAX_ANSWER_LENGTH)
    boxed = find_last_boxed(final_part(text) if tagged is None else tagged, MAX_ANSWER_LENGTH)
    answer = tagged if boxed is None else boxed
    if answer is None:
        return None
    return re.sub(r"\s+", "", answer) or None
