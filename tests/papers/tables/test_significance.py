"""Comparing a table's rows with its baseline: what is compared with what, Holm's correction by column and baseline, and
how it is printed.

Not covered: the formulas (tests/common/statistics), reading runs (test_collect.py).
"""

from dataclasses import asdict

import numpy as np

from tests.papers.tables.tables import made_table
from verl_clipx.common.statistics.comparison import compare, compare_means
from verl_clipx.papers.tables.measures import Value, mean_of
from verl_clipx.papers.tables.render import render
from verl_clipx.papers.tables.significance import compare_rows

TABLE = made_table("significance")


def with_questions(values: np.ndarray, **changes) -> dict[int, Value]:
    """A cell's numbers by seed, from ``[seeds, questions]``."""
    numbers = {}
    for seed, one in enumerate(values, 1):
        numbers[seed] = Value(float(one.mean()), accuracies_by_benchmark={"b": one}, **changes)
    return numbers


def drawn(better: float, seeds: int = 3) -> np.ndarray:
    generator = np.random.default_rng(round(100 * better))
    return 40 + 100 * better + np.array([0, 10, 20, 5, 8]) + generator.normal(0, 2, (seeds, 5))


def compare_with_base(column: str, base: dict, ours: dict) -> dict:
    (found,) = compare_rows(TABLE, {("base", column): base, ("x", column): ours})
    return found


def differences(comparisons: list[dict] | None) -> str:
    """The table of differences that follows the table of numbers; empty without one."""
    results = comparisons and {
        **{"table": "small", "runs": [], "collected_with": {"commit": None}, "missing": [], "refused": []},
        **{"cells": [], "comparisons": comparisons},
    }
    return render(TABLE, results).partition("differences from the baseline")[2]


def test_every_row_is_compared_with_its_own_baseline():
    values = {name: drawn(better) for name, better in (("base", 0.0), ("x", 0.1), ("y", 0.02), ("z", 0.05))}
    by_seed = {(name, "one"): with_questions(one) for name, one in values.items()}
    by_seed["model", "one"] = {-1: Value(10.0)}
    found = compare_rows(TABLE, by_seed)
    pairs = [("x", "base", "one"), ("y", "base", "one"), ("z", "y", "one")]
    assert [(one["row"], one["baseline"], one["column"]) for one in found] == pairs
    for one in found:
        expected = asdict(compare({"b": values[one["baseline"]]}, {"b": values[one["row"]]}))
        assert {key: one[key] for key in expected} == expected


def test_numbers_without_questions_are_compared_over_seeds():
    base, ours = [40.0, 42.0, 41.0], [50.0, 49.0, 52.0, 51.0]
    found = compare_with_base("two", *({n: Value(one) for n, one in enumerate(side)} for side in (base, ours)))
    assert found["p_value"] == compare_means(base, ours).p_value and found["over"] == "seeds"


def comparison_of(row: str, p_value: float | None, baseline: str = "base", column: str = "one", **changes) -> dict:
    known = {"row": row, "baseline": baseline, "column": column, "difference": -1.24, "p_value": p_value}
    known |= {"first": 3.0, "second": 1.76, "seeds": [3, 3]}
    ends = {"low": -3.0, "high": 0.52, "over": "seeds and questions"} if p_value is not None else {"over": None}
    return known | ends | {"refused": None} | changes


def test_holm_is_over_the_methods_of_a_column_with_one_baseline():
    found = [comparison_of("x", 0.02), comparison_of("y", 0.0004), comparison_of("z", 0.04, baseline="y")]
    text = differences([*found, comparison_of("x", 0.03, column="two")])
    assert "| x | **−1.2 [−3.0, +0.5], p 0.020** | **−1.2 [−3.0, +0.5], p 0.030** |" in text
    assert "| y | **−1.2 [−3.0, +0.5], p < 0.001** |" in text and "| z | **−1.2 [−3.0, +0.5], p 0.040** |" in text
    assert "Each row minus base or y." in text and "95 % intervals over training seeds and questions together." in text
    # Twice 0.03 is no longer below 0.05.
    assert "| x | −1.2 [−3.0, +0.5], p 0.060 |" in differences([comparison_of("x", 0.03), comparison_of("y", 0.9)])
    assert differences([]) == differences(None) == ""


def test_what_is_refused_says_so():
    reason = "1 and 1 training seeds are too few: to say whether a method is better, 3 of each are needed"
    text = differences([comparison_of("x", None, refused=reason)])
    assert f"There is no interval and no p: {reason}." in text and "Holm" not in text and "p 0" not in text


def test_one_seed_of_each_gets_the_difference_without_a_verdict():
    """`compare` has an interval over questions then, of these two checkpoints."""
    found = compare_with_base("one", *(with_questions(drawn(better, 1)) for better in (0.0, 0.5)))
    assert found["p_value"] < 0.001 and found["over"] == "questions"
    text = differences([found])
    assert "**" not in text and "p <" not in text.replace("p < 0.05", "") and "1 and 1 training seeds" in text


def test_a_mean_of_columns_counts_a_question_once():
    one = Value(2.0, accuracies_by_benchmark={"b": np.array([1.0, 3.0])})
    other = Value(5.0, accuracies_by_benchmark={"b": np.array([4.0, 6.0]), "c": np.array([0.0])})
    found = mean_of([one, other])
    assert found.mean == 3.5 and found.low is None
    assert found.accuracies_by_benchmark["b"].tolist() == [2.5, 4.5]
    assert found.accuracies_by_benchmark["c"].tolist() == [0.0]
    assert mean_of([one, Value(1.0)]).accuracies_by_benchmark is None and mean_of([one]) is one
    assert one.scaled(100.0).accuracies_by_benchmark["b"].tolist() == [100.0, 300.0]
