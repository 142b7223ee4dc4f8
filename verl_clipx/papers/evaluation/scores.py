"""Scores stored completions with a reward function, and writes an evaluation's results."""

import math
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from verl_clipx.common.files import replacing, write_json
from verl_clipx.common.statistics.estimate import estimate
from verl_clipx.common.statistics.variance import too_few_units
from verl_clipx.papers.evaluation.benchmark import Benchmark, read_benchmark, sources_of
from verl_clipx.papers.evaluation.estimators import PART, QuestionValues, question_values
from verl_clipx.papers.evaluation.folder import EvaluationFolder, read_completions
from verl_clipx.papers.responses import final_part, find_last_boxed, tagged_answer

MAX_ANSWER_LENGTH = 2000


def load_member(name: str, option: str, kind: Any) -> Any:
    """Import a function or a constant.

    Args:
        name: `package.module:name`; modules of the working directory count.
        kind: type of what is wanted.

    Raises:
        ValueError: the name is malformed, or there is no such module or member of this type.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        member = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option} {name}: cannot import it as package.module:name ({error})") from error
    if not isinstance(member, kind):
        raise ValueError(f"{option} {name}: is of the type {type(member).__name__}, not {kind.__name__}")
    return member


def load_reward(name: str, benchmarks: list[Benchmark], cluster: str | None) -> Callable[..., Any]:
    """Load a reward function, and raise errors that would otherwise surface only after all completions were sampled.

    Args:
        name: the reward function as `package.module:name`; see `load_member`.
        benchmarks: the questions that it will score.
        cluster: the key of extra_info that each question must have, or None.

    Raises:
        ValueError: there is no such function, a question lacks the cluster's key, or the reward cannot use a
            question's ground truth.
    """
    reward = load_member(name, "--reward", Callable)
    for benchmark in benchmarks:
        if cluster:
            # Only for the error that it raises where a question lacks the key.
            sources_of(benchmark, cluster)
        _check_ground_truths(benchmark, reward)
    return reward


def _check_ground_truths(benchmark: Benchmark, reward: Callable[..., Any]) -> None:
    """Raise ValueError for a ground truth that the reward cannot use.

    This is what `check_ground_truth(data_source, ground_truth)` in the reward's module raises; a module need not have
    this function.
    """
    check = getattr(sys.modules[reward.__module__], "check_ground_truth", None)
    if check is None:
        return
    for row, question in enumerate(benchmark.questions):
        try:
            check(question["data_source"], question["reward_model"]["ground_truth"])
        except ValueError as error:
            raise ValueError(f"--benchmark {benchmark.path}, row {row}: {error}") from None


def score(folder: EvaluationFolder, reward: str | None = None, cluster: str | None = None) -> dict[str, Any]:
    """Score all completions and write the results.

    Args:
        reward, cluster: in place of the configured ones.

    Returns:
        The configuration and, per benchmark, the estimates of every checkpoint and of the protocol.

    Raises:
        ValueError: a benchmark's file has changed, a completion is missing, or the reward cannot score the questions.
        RuntimeError: see `score_samples`.
    """
    config = folder.read_config()
    config |= {"reward": reward or config["reward"], "cluster": cluster or config.get("cluster")}
    benchmarks = [
        read_benchmark(Path(entry["path"]), name, entry["sha256"]) for name, entry in config["benchmarks"].items()
    ]
    function = load_reward(config["reward"], benchmarks, config["cluster"])
    folder.write_config(config)
    seeds = config["sampling"]["seeds"]
    field = config["cluster"]
    over = f"clusters of questions by {field}" if field else "questions"
    results: dict[str, Any] = {"config": config, "interval": f"95 %, Student's t over {over}", "benchmarks": {}}
    for benchmark in benchmarks:
        name = benchmark.name
        questions = len(benchmark.questions)
        clusters = np.asarray(sources_of(benchmark, field)) if field else None
        config["benchmarks"][name]["clusters"] = None if clusters is None else clusters.tolist()
        values: dict[str, QuestionValues] = {}
        for label in config["checkpoints"]:
            of_seeds = [folder.completions(label, name, seed) for seed in seeds]
            completions = read_completions(of_seeds, questions, config["sampling"]["samples"] // len(seeds))
            scores = score_samples(completions, benchmark, function)
            with replacing(folder.scores(label, name)) as partial:
                scores.to_parquet(partial, index=False)
            values[label] = question_values(scores)
        metrics = next(iter(values.values()))
        combined = {
            metric: np.mean([values_of_checkpoint[metric] for values_of_checkpoint in values.values()], axis=0)
            for metric in metrics
        }
        results["benchmarks"][name] = {
            "questions": questions,
            "no_interval": too_few_units(questions, clusters),
            "result": _estimates(combined, clusters),
            "values": {metric: column.tolist() for metric, column in combined.items()},
            "checkpoints": {
                label: _estimates(values_of_checkpoint, clusters) for label, values_of_checkpoint in values.items()
            },
        }
    write_json(folder.results, results)
    return results


def _estimates(values: QuestionValues, clusters: np.ndarray | None) -> dict[str, dict[str, float | None]]:
    return {metric: asdict(estimate(column, clusters)) for metric, column in values.items()}


def score_samples(samples: pandas.DataFrame, benchmark: Benchmark, reward: Callable[..., Any]) -> pandas.DataFrame:
    """Score every completion as verl's reward manager would.

    Args:
        samples: from `read_completions`.
        reward: called with data_source, solution_str, ground_truth, extra_info; returns a number or a dict with the key
            "score". Numbers in a dict are kept; keys that some completions lack are left out. If the dict has "pred",
            this is the answer that votes, as in verl's validation.

    Returns:
        The samples with the column `answer` in place of `text`, and a float column `reward/<part>` for every part.

    Raises:
        RuntimeError: the reward raised, or did not return a finite number; the message names the completion.
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
            answers.append(parts["pred"] if "pred" in parts else extract_answer(sample.text))
            numbers.append(_numbers(parts))
        except Exception as error:
            raise RuntimeError(
                f"the reward failed on benchmark {benchmark.name}, question {sample.question}, sample {sample.sample} "
                f"({type(error).__name__}: {error}). All completions are kept. Fix it and run "
                "`clipx papers eval score`."
            ) from error
    # All numbers are finite, so that NaN stands only where a key is lacking.
    of_all = pandas.DataFrame(numbers).dropna(axis="columns").add_prefix(PART)
    return samples.drop(columns="text").assign(answer=answers).join(of_all)


def _numbers(parts: dict[str, Any]) -> dict[str, float]:
    numbers = {key: float(value) for key, value in parts.items() if isinstance(value, Real)}
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
    return re.sub(r"\s+", "", (tagged if boxed is None else boxed) or "") or None
