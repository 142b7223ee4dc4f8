"""Reads the numbers of a table's cells from a run's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.common.files import read_table
from verl_clipx.common.statistics.collapse import collapse, last_level
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.tables.definition import (
    AVERAGE,
    BENCHMARK,
    COLLAPSE,
    LEVEL,
    TIMING,
    VALIDATION,
    Column,
    Row,
    Table,
)
from verl_clipx.run.keys import VALIDATION_FILES, VALIDATION_SAMPLES


@dataclass(frozen=True)
class Value:
    """A number with the bounds of its 95 % interval, None if there is no interval."""

    mean: float
    low: float | None = None
    high: float | None = None

    by_question: Mapping[str, np.ndarray] | None = field(default=None, compare=False)
    """Arrays ``[questions]`` by benchmark: `mean` is the sum of their means. None if a number has no questions."""

    def scaled(self, factor: float) -> "Value":
        """Return all numbers multiplied by a factor."""
        by_question = self.by_question
        if by_question is not None:
            by_question = {name: values * factor for name, values in by_question.items()}
        return Value(
            mean=self.mean * factor,
            low=None if self.low is None else self.low * factor,
            high=None if self.high is None else self.high * factor,
            by_question=by_question,
        )


def mean_of(values: Sequence[Value]) -> Value:
    """Return the mean of values, without an interval: several may share questions, which count once."""
    if len(values) == 1:
        return values[0]
    mean = float(np.mean([value.mean for value in values]))
    if any(value.by_question is None for value in values):
        return Value(mean)
    by_question: dict[str, np.ndarray] = {}
    for value in values:
        for name, of_questions in value.by_question.items():
            by_question[name] = by_question.get(name, 0.0) + of_questions / len(values)
    return Value(mean, by_question=by_question)


def has_collapsed(values: Sequence[float]) -> bool:
    """Return whether a training collapsed by a logged metric, of which only finite values count."""
    return collapse([value for value in values if np.isfinite(value)]) is not None


OF_LOGGED = {COLLAPSE: has_collapsed, LEVEL: last_level, AVERAGE: np.mean}
"""What a measure makes of the logged values of a metric."""


class NotThere(Exception):
    """A run has not got that far; the message says what is missing."""


def measure(table: Table, row: Row, column: Column, run: RunFolder) -> Value:
    """Read one run's number for a cell.

    Args:
        table, row, column: the cell, which must be one that is read from a run.
        run: the folder of the training, or of a model's evaluations.

    Returns:
        Accuracies as fractions, times in seconds, logged metrics as logged, 1 for a collapse.
        The interval is the evaluation's, over questions.

    Raises:
        NotThere: the evaluation or the metric is missing.
        ValueError: the evaluation differs from what the table says; the message names each difference.
    """
    how = table.measure_of(row, column)
    if TIMING in how:
        return mean_time(run, how[TIMING], *how["steps"])
    for kind, reduce in OF_LOGGED.items():
        if kind in how:
            return Value(float(reduce(logged_values(run, how[kind]))))
    if VALIDATION in how and not (row.model or row.models):
        check_validated_questions(run, how[VALIDATION], table.benchmarks[how[VALIDATION]]["questions"])
        return Value(best_validation(run, how[VALIDATION], how["samples"]))
    metric = how["metric"] if BENCHMARK in how else f"avg@{how['samples']}"
    values = [evaluated(table, row, run, benchmark, metric) for benchmark in table.benchmarks_of(row, column)]
    return mean_of(values)


def evaluation_of(folder: Path, benchmark: str) -> EvaluationFolder:
    """The evaluation on a benchmark in a run's folder."""
    return EvaluationFolder(folder / "evaluation" / benchmark)


def best_validation(run: RunFolder, data_source: str, samples: int) -> float:
    """Return the highest accuracy among all validations of a training."""
    names = [f"{section}/{data_source}/acc/mean@{samples}" for section in ("val-core", "val-aux")]
    accuracies = [step[name] for step in run.metrics.values() for name in names if name in step]
    if not accuracies:
        raise NotThere(f"no {names[0]} in metrics.jsonl; check that {VALIDATION_SAMPLES} is {samples}")
    return max(accuracies)


def check_validated_questions(run: RunFolder, data_source: str, questions: int) -> None:
    """Refuse a run whose validation file, if it exists here, has a different number of rows for a data source."""
    named = OmegaConf.select(run.config, VALIDATION_FILES)
    if isinstance(named, str):
        named = [named]
    paths = [Path(path) for path in named or []]
    if not paths or not all(path.is_file() for path in paths):
        return
    in_files = 0
    for path in paths:
        in_files += read_table(path, ["data_source"])[0].to_pylist().count(data_source)
    if in_files != questions:
        raise ValueError(f"data.val_files: table {questions} questions of {data_source}, the files have {in_files}")


def mean_time(run: RunFolder, timers: dict[str, float], first: int, last: int) -> Value:
    """Return the mean seconds per step.

    Args:
        timers: verl's timers, each with its weight in the sum.
        first, last: steps to average over, both inclusive.
    """
    totals = []
    for step in range(first, last + 1):
        logged = run.metrics.get(step, {})
        lacking = [timer for timer in timers if timer not in logged]
        if lacking:
            raise NotThere(f"no {', '.join(lacking)} of step {step} in metrics.jsonl")
        totals.append(sum(weight * logged[timer] for timer, weight in timers.items()))
    return Value(float(np.mean(totals)))


def logged_values(run: RunFolder, metric: str) -> list[float]:
    """Return the values of a metric of metrics.jsonl in the order of the steps, at least one."""
    values = [float(logged[metric]) for logged in run.metrics.values() if metric in logged]
    if not values:
        raise NotThere(f"no {metric} in metrics.jsonl")
    return values


def evaluated(table: Table, row: Row, run: RunFolder, benchmark: str, metric: str) -> Value:
    """Read a metric of an evaluation.

    Raises:
        NotThere: the evaluation has not been run or scored, or lacks the metric.
        ValueError: it was run with other settings, or before the training ended.
    """
    results = _checked(table, row, run, benchmark)
    of_benchmark = results["benchmarks"].get(benchmark, {})
    metrics = of_benchmark.get("result", {})
    if metric not in metrics:
        raise NotThere(f"evaluation/{benchmark} has no {metric}, only {', '.join(metrics) or 'another benchmark'}")
    return Value(
        **metrics[metric], by_question={benchmark: np.asarray(of_benchmark["values"][metric], dtype=np.float64)}
    )


def _checked(table: Table, row: Row, run: RunFolder, benchmark: str) -> dict[str, Any]:
    """Return an evaluation's results after checking that they match the table."""
    evaluation = evaluation_of(run.path, benchmark)
    if not evaluation.results.exists():
        raise NotThere(f"no evaluation/{benchmark}/results.json")
    results = evaluation.read_results()
    config = results["config"]
    wrong = wrong_settings(table, row, benchmark, config)
    steps = [checkpoint["step"] for checkpoint in config["checkpoints"].values()]
    if run.last_checkpoint is not None and run.last_checkpoint not in steps:
        wrong.append(f"checkpoints: step {run.last_checkpoint} is the last, but {steps} was evaluated")
    if wrong:
        raise ValueError(f"evaluation/{benchmark}: {'; '.join(wrong)}")
    return results


def protocol_of(row: Row, settings: dict[str, Any]) -> str:
    """Return the protocol of `clipx papers eval run`; one over several checkpoints does not fit an untrained model."""
    if not (row.model or row.models):
        return settings["protocol"]
    return "greedy" if settings["temperature"] == 0 else "sampled"


def wrong_settings(table: Table, row: Row, benchmark: str, config: dict[str, Any]) -> list[str]:
    """Describe how an evaluation differs from what the table says, one line per difference."""
    settings = table.benchmarks[benchmark]
    wanted = {"protocol": protocol_of(row, settings), "top_p": settings.get("top_p", 1.0)}
    wanted |= {key: settings[key] for key in ("samples", "temperature", "max_tokens", "questions")}
    questions = config["benchmarks"].get(benchmark, {}).get("questions")
    evaluated_with = {**config["sampling"], "protocol": config["protocol"], "questions": questions}
    # A table's intervals are over questions, not over clusters of them.
    wanted["cluster"] = None
    evaluated_with["cluster"] = config.get("cluster")
    if row.model and "{data}" not in row.model:
        wanted["model"] = row.model
        evaluated_with["model"] = config["model"]
    return [
        f"{key}: table {wanted[key]!r}, evaluation {evaluated_with[key]!r}"
        for key in wanted
        if wanted[key] != evaluated_with[key]
    ]
