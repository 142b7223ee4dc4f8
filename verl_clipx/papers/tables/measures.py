"""Reads the numbers of a table's cells from a run's folder."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from verl_clipx.analysis.runs.folder import RunFolder
from verl_clipx.common.files import read_table
from verl_clipx.common.statistics.collapse import collapse, last_level
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.settings import SamplingSettings
from verl_clipx.papers.tables.definition import (
    AVERAGE,
    BENCHMARK,
    COLLAPSE,
    DATA_FOLDER,
    LEVEL,
    TIMING,
    VALIDATION,
    Column,
    Table,
    TableRow,
)
from verl_clipx.run.keys import VALIDATION_FILES, VALIDATION_SAMPLES


@dataclass(frozen=True)
class Value:
    """A number with the bounds of its 95 % interval.

    Args:
        mean: the number.
        low, high: the bounds; None if there is no interval.
        accuracies_by_benchmark: for each benchmark an array ``[questions]`` with the accuracy on each question. In a
            mean over several benchmarks, they are divided by the number of benchmarks, so that `mean` is the sum of the
            arrays' means. None for a number that is not an accuracy of an evaluation.
    """

    mean: float
    low: float | None = None
    high: float | None = None
    accuracies_by_benchmark: Mapping[str, np.ndarray] | None = field(default=None, compare=False)

    def scaled(self, factor: float) -> "Value":
        """Return all numbers multiplied by a factor."""
        scaled_accuracies = None
        if self.accuracies_by_benchmark is not None:
            scaled_accuracies = {}
            for benchmark, accuracies in self.accuracies_by_benchmark.items():
                scaled_accuracies[benchmark] = accuracies * factor
        return Value(
            mean=self.mean * factor,
            low=None if self.low is None else self.low * factor,
            high=None if self.high is None else self.high * factor,
            accuracies_by_benchmark=scaled_accuracies,
        )


def mean_of(values: Sequence[Value]) -> Value:
    """Return the mean of values. It has no interval, unless it is the mean of a single value.

    The values may be of the same questions. An interval would have to take account of that.
    """
    if len(values) == 1:
        return values[0]
    mean = float(np.mean([value.mean for value in values]))
    if any(value.accuracies_by_benchmark is None for value in values):
        return Value(mean)
    accuracies_by_benchmark: dict[str, np.ndarray] = {}
    for value in values:
        for benchmark, accuracies in value.accuracies_by_benchmark.items():
            # This value's part in the mean.
            share = accuracies / len(values)
            accuracies_by_benchmark[benchmark] = accuracies_by_benchmark.get(benchmark, 0.0) + share
    return Value(mean, accuracies_by_benchmark=accuracies_by_benchmark)


def has_collapsed(values: Sequence[float]) -> bool:
    """Return whether a training collapsed.

    Args:
        values: what the training logged of a metric, in the order of the steps. Only finite values are looked at.
    """
    finite = [value for value in values if np.isfinite(value)]
    return collapse(finite) is not None


REDUCTIONS = {COLLAPSE: has_collapsed, LEVEL: last_level, AVERAGE: np.mean}
"""For each key of a measure that names a metric, the function that turns the metric's logged values into one number."""


class MissingNumber(Exception):
    """Raised if a run does not have a number yet. The message says what is missing."""


def read_value(table: Table, row: TableRow, column: Column, run: RunFolder) -> Value:
    """Read the number that one run has for a cell.

    Args:
        table, row, column: the cell, for which `table.source_of` is not None.
        run: the folder of the training, or of a model's evaluations.

    Returns:
        An accuracy as a fraction; a time in seconds; the mean of a metric over its steps or over the last tenth of
        them, in the unit in which it was logged; or whether the training collapsed, 1 or 0. Only the accuracy of a
        single evaluation has an interval. It is over questions.

    Raises:
        MissingNumber: the run has no such evaluation, validation, timer or metric.
        ValueError: the run's evaluation or validation differs from what the table says; the message names each
            difference.
    """
    settings = table.measure_of(row, column)
    if TIMING in settings:
        first_step, last_step = settings["steps"]
        return mean_time(run, settings[TIMING], first_step, last_step)
    for key, reduction in REDUCTIONS.items():
        if key in settings:
            values = logged_values(run, settings[key])
            return Value(float(reduction(values)))
    if VALIDATION in settings and not row.is_untrained:
        data_source = settings[VALIDATION]
        check_validated_questions(run, data_source, table.benchmarks[data_source]["questions"])
        return Value(best_validation(run, data_source, settings["samples"]))
    # A model that nothing trains has no validations. It is evaluated on their questions, with as many samples.
    metric = settings["metric"] if BENCHMARK in settings else f"avg@{settings['samples']}"
    accuracies = [read_evaluation(table, row, run, benchmark, metric) for benchmark in table.benchmarks_of(row, column)]
    return mean_of(accuracies)


def evaluation_folder(folder: Path, benchmark: str) -> EvaluationFolder:
    """Return the evaluation on a benchmark in a run's folder, whether it exists or not."""
    return EvaluationFolder(folder / "evaluation" / benchmark)


def best_validation(run: RunFolder, data_source: str, samples: int) -> float:
    """Return the highest accuracy among all validations of a training, as a fraction.

    Args:
        data_source: the data source of the validated questions.
        samples: the number of samples of each question.

    Raises:
        MissingNumber: there is no validation with this number of samples a question.
    """
    # If questions have different numbers of samples, verl logs a mean for each number, over the questions that have it.
    # That of the largest number is in the section val-core, and the others are in val-aux, which is not read.
    name = f"val-core/{data_source}/acc/mean@{samples}"
    accuracies = [logged[name] for logged in run.metrics.values() if name in logged]
    if not accuracies:
        raise MissingNumber(f"no {name} in metrics.jsonl; check that {VALIDATION_SAMPLES} is {samples}")
    return max(accuracies)


def check_validated_questions(run: RunFolder, data_source: str, expected_count: int) -> None:
    """Check that a run's validation files have as many questions of a data source as the table says.

    Nothing is checked if the run has no validation files, or if one of them is not on this machine.

    Args:
        expected_count: the number of questions of `data_source` that the table says.

    Raises:
        ValueError: the numbers differ, and the message has both; or a file is not a Parquet file with the column
            `data_source`.
    """
    paths = [Path(path) for path in run.run_record.validation.paths]
    if not paths or not all(path.is_file() for path in paths):
        return
    validated_count = 0
    for path in paths:
        data_sources = read_table(path, ["data_source"])["data_source"].to_pylist()
        validated_count += data_sources.count(data_source)
    if validated_count != expected_count:
        raise ValueError(
            f"{VALIDATION_FILES}: the table says {expected_count} questions of {data_source}, the files have "
            f"{validated_count}"
        )


def mean_time(run: RunFolder, timers: dict[str, float], first: int, last: int) -> Value:
    """Return the mean over steps of a weighted sum of verl's timers, in seconds.

    Args:
        timers: the weight of each timer in the sum, by the timer's metric.
        first, last: the first and the last step that count.

    Raises:
        MissingNumber: a step was not logged, or one of its timers was not.
    """
    totals = []
    for step in range(first, last + 1):
        logged = run.metrics.get(step, {})
        missing = [timer for timer in timers if timer not in logged]
        if missing:
            raise MissingNumber(f"no {', '.join(missing)} of step {step} in metrics.jsonl")
        totals.append(sum(weight * logged[timer] for timer, weight in timers.items()))
    return Value(float(np.mean(totals)))


def logged_values(run: RunFolder, metric: str) -> list[float]:
    """Return a metric's logged values in the order of the steps. There is at least one.

    Raises:
        MissingNumber: no step has the metric.
    """
    values = [float(logged[metric]) for logged in run.metrics.values() if metric in logged]
    if not values:
        raise MissingNumber(f"no {metric} in metrics.jsonl")
    return values


def read_evaluation(table: Table, row: TableRow, run: RunFolder, benchmark: str, metric: str) -> Value:
    """Read an accuracy of an evaluation, with its interval and the accuracy on each question.

    Args:
        metric: the name of the accuracy, such as avg@32.

    Raises:
        MissingNumber: the evaluation has not been run or scored, or lacks the metric.
        ValueError: the evaluation was made with other settings than the table's, or not of the training's last
            checkpoint.
    """
    results = _read_checked_results(table, row, run, benchmark)
    benchmark_results = results["benchmarks"].get(benchmark, {})
    estimates = benchmark_results.get("result", {})
    if metric not in estimates:
        available = ", ".join(estimates) or "another benchmark"
        raise MissingNumber(f"evaluation/{benchmark} has no {metric}, only {available}")
    accuracies = np.asarray(benchmark_results["values"][metric], dtype=np.float64)
    return Value(**estimates[metric], accuracies_by_benchmark={benchmark: accuracies})


def _read_checked_results(table: Table, row: TableRow, run: RunFolder, benchmark: str) -> dict[str, Any]:
    """Return an evaluation's results after checking that they match the table; see `read_evaluation`."""
    evaluation = evaluation_folder(run.path, benchmark)
    if not evaluation.results_path.exists():
        raise MissingNumber(f"no evaluation/{benchmark}/results.json")
    results = evaluation.read_results()
    config = results["config"]
    differences = wrong_settings(table, row, benchmark, config)
    steps = [checkpoint["step"] for checkpoint in config["checkpoints"].values()]
    if run.last_checkpoint is not None and run.last_checkpoint not in steps:
        differences.append(
            f"checkpoints: the last is step {run.last_checkpoint}, but the evaluation is of steps {steps}"
        )
    if differences:
        raise ValueError(f"evaluation/{benchmark}: {'; '.join(differences)}")
    return results


def protocol_of(row: TableRow, settings: Mapping[str, Any]) -> str:
    """Return the protocol with which `clipx papers eval run` evaluates a row on a benchmark.

    Args:
        settings: the table's settings of the benchmark. Their protocol is that of trained rows. It may average several
            checkpoints, of which a model that is not trained has only one.
    """
    if not row.is_untrained:
        return settings["protocol"]
    return "greedy" if settings["temperature"] == 0 else "sampled"


def _template_of(table: Table, row: TableRow) -> str:
    """Return the chat template with which the table evaluates a row.

    It is the last `--template` among the options, or the default of `clipx papers eval run`.
    """
    template = SamplingSettings.template
    words = shlex.split(f"{table.evaluation_options} {row.evaluation_options}")
    for option, value in pairwise(words):
        if option == "--template":
            template = value
    return template


def wrong_settings(table: Table, row: TableRow, benchmark: str, config: Mapping[str, Any]) -> list[str]:
    """Return the differences between the settings of an evaluation and those that the table says, a text each.

    Args:
        config: the evaluation's configuration.
    """
    settings = table.benchmarks[benchmark]
    sampling = config["sampling"]
    wanted = {
        "protocol": protocol_of(row, settings),
        "top_p": settings.get("top_p", 1.0),
        "samples": settings["samples"],
        "temperature": settings["temperature"],
        "max_tokens": settings["max_tokens"],
        "questions": settings["questions"],
        "template": _template_of(table, row),
        # A table's intervals are over questions, not over clusters of them.
        "cluster": None,
    }
    given = {
        "protocol": config["protocol"],
        "top_p": sampling["top_p"],
        "samples": sampling["samples"],
        "temperature": sampling["temperature"],
        "max_tokens": sampling["max_tokens"],
        "questions": config["benchmarks"].get(benchmark, {}).get("questions"),
        "template": sampling.get("template", SamplingSettings.template),
        "cluster": config.get("cluster"),
    }
    # The path of a model in the data folder differs from machine to machine.
    if row.model and DATA_FOLDER not in row.model:
        wanted["model"] = row.model
        given["model"] = config["model"]
    return [f"{key}: table {wanted[key]!r}, evaluation {given[key]!r}" for key in wanted if wanted[key] != given[key]]
