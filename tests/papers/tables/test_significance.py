"""Comparing a table's rows with its baseline: what is compared with what, Holm's correction by column and baseline, and
how it is printed.

Not covered: the formulas (tests/common/statistics), reading runs (test_collect.py).
"""

from dataclasses import asdict

import numpy as np

from tests.papers.tables.tables import make_table
from verl_clipx.common.statistics.comparison import compare, compare_means
from verl_clipx.papers.tables.measures import Value, mean_of
from verl_clipx.papers.tables.render import render
from verl_clipx.papers.tables.significance import compare_rows

TABLE = make_table("significance")


def make_cell(values: np.ndarray) -> dict[int, Value]:
    """Return a cell's numbers by seed, from ``[seeds, questions]``."""
    return {
        seed: Value(float(of_questions.mean()), accuracies_by_benchmark={"b": of_questions})
        for seed, of_questions in enumerate(values, 1)
    }


def make_cell_without_questions(means: list[float]) -> dict[int, Value]:
    return {seed: Value(mean) for seed, mean in enumerate(means, 1)}


def draw_values(better_by: float, seeds: int = 3) -> np.ndarray:
    """Return random accuracies of five questions in percent, ``[seeds, questions]``; better_by: a fraction."""
    generator = np.random.default_rng(round(100 * better_by))
    return 40 + 100 * better_by + np.array([0, 10, 20, 5, 8]) + generator.normal(0, 2, (seeds, 5))


def compare_with_base(column: str, base: dict, x: dict) -> dict:
    """Return the comparison of the row x with the baseline."""
    (comparison,) = compare_rows(TABLE, {("base", column): base, ("x", column): x})
    return comparison


def render_differences(comparisons: list[dict]) -> str:
    """Return the table of differences that follows the table of numbers; empty without one."""
    results = {
        "table": "small",
        "runs": [],
        "collected_with": {"commit": None},
        "missing": [],
        "refused": [],
        "cells": [],
        "comparisons": comparisons,
    }
    return find_differences(render(TABLE, results))


def find_differences(text: str) -> str:
    return text.partition("differences from the baseline")[2]


def test_every_row_is_compared_with_its_own_baseline():
    values = {"base": draw_values(0.0), "x": draw_values(0.1), "y": draw_values(0.02), "z": draw_values(0.05)}
    cells = {(name, "one"): make_cell(of_row) for name, of_row in values.items()}
    cells["model", "one"] = {-1: Value(10.0)}
    comparisons = compare_rows(TABLE, cells)
    pairs = [(comparison["row"], comparison["baseline"]) for comparison in comparisons]
    assert pairs == [("x", "base"), ("y", "base"), ("z", "y")]
    for comparison in comparisons:
        assert comparison["column"] == "one"
        expected = asdict(compare({"b": values[comparison["baseline"]]}, {"b": values[comparison["row"]]}))
        assert {key: comparison[key] for key in expected} == expected


def test_numbers_without_questions_are_compared_over_seeds():
    base = [40.0, 42.0, 41.0]
    x = [50.0, 49.0, 52.0, 51.0]
    comparison = compare_with_base("two", make_cell_without_questions(base), make_cell_without_questions(x))
    assert comparison["over"] == "seeds"
    assert comparison["p_value"] == compare_means(base, x).p_value


def make_comparison(row: str, p_value: float, baseline: str = "base", column: str = "one") -> dict:
    return {
        "row": row,
        "baseline": baseline,
        "column": column,
        "first": 3.0,
        "second": 1.76,
        "difference": -1.24,
        "low": -3.0,
        "high": 0.52,
        "p_value": p_value,
        "over": "seeds and questions",
        "seeds": [3, 3],
        "refused": None,
    }


def test_holm_is_over_the_methods_of_a_column_with_one_baseline():
    text = render_differences(
        [
            make_comparison("x", 0.02),
            make_comparison("y", 0.0004),
            make_comparison("z", 0.04, baseline="y"),
            make_comparison("x", 0.03, column="two"),
        ]
    )
    assert "| x | **−1.2 [−3.0, +0.5], p 0.020** | **−1.2 [−3.0, +0.5], p 0.030** |" in text
    assert "| y | **−1.2 [−3.0, +0.5], p < 0.001** |" in text
    assert "| z | **−1.2 [−3.0, +0.5], p 0.040** |" in text
    assert "Each row minus base or y." in text
    assert "95 % intervals over training seeds and questions together." in text


def test_what_is_no_longer_below_5_percent_after_holm_is_not_bold():
    text = render_differences([make_comparison("x", 0.03), make_comparison("y", 0.9)])
    assert "| x | −1.2 [−3.0, +0.5], p 0.060 |" in text


def test_without_comparisons_there_is_no_table_of_differences():
    assert render_differences([]) == ""
    assert find_differences(render(TABLE, None)) == ""


def test_what_is_refused_says_so():
    reason = "1 and 1 training seeds are too few: to say whether a method is better, 3 of each are needed"
    comparison = make_comparison("x", 0.0) | {"p_value": None, "over": None, "refused": reason}
    del comparison["low"], comparison["high"]
    text = render_differences([comparison])
    assert f"There is no interval and no p: {reason}." in text
    assert "Holm" not in text
    assert "p 0" not in text


def test_one_seed_of_each_gets_the_difference_without_a_verdict():
    """`compare` has an interval over questions then, of these two checkpoints."""
    comparison = compare_with_base("one", make_cell(draw_values(0.0, seeds=1)), make_cell(draw_values(0.5, seeds=1)))
    assert comparison["over"] == "questions"
    assert comparison["p_value"] < 0.001
    text = render_differences([comparison])
    assert "1 and 1 training seeds" in text
    assert "**" not in text
    assert "p <" not in text.replace("p < 0.05", "")


def test_a_mean_of_columns_counts_a_question_once():
    first = Value(2.0, accuracies_by_benchmark={"b": np.array([1.0, 3.0])})
    second = Value(5.0, accuracies_by_benchmark={"b": np.array([4.0, 6.0]), "c": np.array([0.0])})
    mean = mean_of([first, second])
    assert mean.mean == 3.5
    assert mean.low is None
    assert mean.accuracies_by_benchmark["b"].tolist() == [2.5, 4.5]
    assert mean.accuracies_by_benchmark["c"].tolist() == [0.0]


def test_a_mean_with_a_column_without_questions_has_none():
    with_questions = Value(2.0, accuracies_by_benchmark={"b": np.array([1.0, 3.0])})
    assert mean_of([with_questions, Value(1.0)]).accuracies_by_benchmark is None


def test_the_mean_of_one_column_is_its_value():
    value = Value(2.0, accuracies_by_benchmark={"b": np.array([1.0, 3.0])})
    assert mean_of([value]) is value


def test_a_scaled_value_scales_its_questions():
    value = Value(2.0, accuracies_by_benchmark={"b": np.array([1.0, 3.0])})
    assert value.scaled(100.0).accuracies_by_benchmark["b"].tolist() == [100.0, 300.0]
