"""Scores and the values of every metric on every question, by hand.

Not covered: the estimators themselves (test_estimators.py).
"""

import numpy as np
import pandas
import pytest

from verl_clipx.papers.evaluation.answers import extract_answer
from verl_clipx.papers.evaluation.benchmark import Benchmark, Question
from verl_clipx.papers.evaluation.results import combine
from verl_clipx.papers.evaluation.scores import load_function, read_scores, score_samples, write_scores
from verl_clipx.papers.evaluation.summary import question_values

TEXTS = [
    ["<answer>4</answer>", "<answer>5</answer>", "<answer>5</answer>", "what?"],
    ["<answer>7</answer>", "<answer>7</answer>", "", "<answer> 7</answer>"],
]
BENCHMARK = Benchmark("sums", None, "", [Question("s", [], truth, {"index": i}) for i, truth in enumerate("47")])
SAMPLES = pandas.DataFrame(
    [
        {"question": q, "sample": s, "text": text, "length": 10 * q + s, "truncated": text == "", "seed": 7}
        for q, row in enumerate(TEXTS)
        for s, text in enumerate(row)
    ]
)


def reward(data_source, solution_str, ground_truth, extra_info):
    answer = extract_answer(solution_str)
    assert data_source == "s" and BENCHMARK.questions[extra_info["index"]].ground_truth == ground_truth
    return {
        "score": {None: -3.0, ground_truth: 3.0}.get(answer, -0.5),
        "correct": answer == ground_truth,
        "format": -1 if answer is None else 1,
        "comment": "not a number",
    }


@pytest.fixture
def scores():
    return score_samples(SAMPLES, BENCHMARK, reward, extract_answer)


def test_scores_keep_every_numeric_part_and_the_answer(scores):
    parts = ["answer", "reward/score", "reward/correct", "reward/format"]
    assert list(scores) == ["question", "sample", "seed", "length", "truncated", *parts]
    answers = [None if pandas.isna(answer) else answer for answer in scores["answer"]]
    assert answers == ["4", "5", "5", None, "7", "7", None, "7"]
    assert scores["reward/score"].tolist() == [3.0, -0.5, -0.5, -3.0, 3.0, 3.0, -3.0, 3.0]
    assert scores["reward/correct"].tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def test_every_metric_by_hand(scores):
    values = {metric: column.tolist() for metric, column in question_values(scores).items()}
    assert values == {
        "avg@4": [0.25, 0.75],
        "pass@1": [0.25, 0.75],
        "pass@2": [0.5, 1.0],
        "pass@4": [1.0, 1.0],
        "best@1": [0.25, 0.75],
        "best@2": [0.4375, 0.9375],
        "best@4": [0.68359375, 0.99609375],
        "maj@4": [0.0, 1.0],
        "length": [1.5, 11.5],
        "truncated": [0.0, 0.25],
        "format": [0.75, 0.75],
        "reward/score": [-0.25, 1.5],
        "reward/correct": [0.25, 0.75],
        "reward/format": [0.5, 0.5],
    }


def test_what_counts_as_right_can_be_chosen(scores):
    # Knights and knaves: right is a reward of 3.
    chosen = question_values(scores, correct_part="score", correct_from=3.0)
    assert chosen["avg@4"].tolist() == [0.25, 0.75]
    assert question_values(scores, correct_part="score", correct_from=-0.5)["avg@4"].tolist() == [0.75, 0.75]
    with pytest.raises(
        ValueError, match="--correct verdict: the reward does not return this part, but only score, correct, format"
    ):
        question_values(scores, correct_part="verdict")


def test_a_reward_that_returns_a_number_alone(scores):
    plain = score_samples(SAMPLES, BENCHMARK, lambda **row: row["solution_str"] == "what?", extract_answer)
    values = question_values(plain)
    assert values["avg@4"].tolist() == [0.25, 0.0]
    assert "format" not in values


def test_parts_that_not_every_completion_has_are_left_out():
    def uneven(solution_str, **_):
        return {"score": 1.0} if solution_str else {"score": 0.0, "empty": 1.0}

    scores = score_samples(SAMPLES, BENCHMARK, uneven, extract_answer)
    assert [column for column in scores if column.startswith("reward/")] == ["reward/score"]


@pytest.mark.parametrize(
    "broken",
    [lambda **_: 1 / 0, lambda **_: {"acc": 1.0}, lambda **_: "1.0", lambda **_: {"score": 1.0, "x": float("nan")}],
)
def test_a_broken_reward_names_the_completion(broken):
    with pytest.raises(RuntimeError, match="benchmark sums, question 0, sample 0"):
        score_samples(SAMPLES, BENCHMARK, broken, extract_answer)


def test_a_broken_answer_function_names_the_completion():
    with pytest.raises(RuntimeError, match=r"benchmark sums, question 0, sample 3 \(ValueError"):
        score_samples(SAMPLES, BENCHMARK, reward, lambda text: text.index("answer"))


def test_scores_survive_the_disk(scores, tmp_path):
    with pytest.raises(FileNotFoundError, match="clipx eval score"):
        read_scores(tmp_path / "scores.parquet")
    write_scores(tmp_path / "scores.parquet", scores)
    back = question_values(read_scores(tmp_path / "scores.parquet"))
    for metric, column in question_values(scores).items():
        assert np.array_equal(back[metric], column), metric


def test_functions_by_name():
    assert load_function("verl_clipx.papers.evaluation.answers:extract_answer", "--answer") is extract_answer
    for name in ("verl_clipx.papers.evaluation.answers", ":f", "no.such.module:f", "math:no_such_function", "math:pi"):
        with pytest.raises(ValueError, match=f"--reward {name}"):
            load_function(name, "--reward")


def test_the_mean_of_checkpoints_and_the_best_one():
    values = {
        "global_step_20": {"avg@2": np.array([1.0, 0.5]), "length": np.array([4.0, 4.0])},
        "global_step_40": {"avg@2": np.array([0.0, 1.0]), "length": np.array([8.0, 2.0])},
    }
    mean, used = combine("mean-of-last-three", values)
    assert ({metric: column.tolist() for metric, column in mean.items()}, used) == (
        {"avg@2": [0.5, 0.75], "length": [6.0, 3.0]},
        ["global_step_20", "global_step_40"],
    )
    best, used = combine("best-validation", values)
    assert (best["length"].tolist(), used) == ([4.0, 4.0], ["global_step_20"])
