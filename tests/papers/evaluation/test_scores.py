r"""Scores of completions; the answer that votes, from tags and from `\boxed{}`.

Not covered: rewards read answers in their own ways; this one only groups responses for maj@k. Megabytes of hostile text
(tests/papers/tasks/test_rewards.py, by the same functions).
"""

from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml

from tests.papers.evaluation.tiny import make_validation_rows, write_questions, write_rows
from verl_clipx.common.files import hash_of_file
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.scores import MAX_ANSWER_LENGTH, extract_answer, import_object, score, score_samples

TEXTS = [["<answer>4</answer>", "what?"], ["", "<answer> 7</answer>"]]
QUESTIONS = [
    {"data_source": "s", "reward_model": {"ground_truth": truth}, "extra_info": {"index": index}}
    for index, truth in enumerate("47")
]
BENCHMARK = Benchmark("sums", None, "", QUESTIONS)
SAMPLES = pandas.DataFrame(
    [
        {"question": q, "sample": s, "text": text, "length": 10 * q + s, "truncated": text == "", "seed": 7}
        for q, row in enumerate(TEXTS)
        for s, text in enumerate(row)
    ]
)


def reward(data_source, solution_str, ground_truth, extra_info):
    """Return parts of which one is no number, and one is of an empty completion alone."""
    assert data_source == "s" and ground_truth == "47"[extra_info["index"]]
    is_right = ground_truth in solution_str
    parts = {"score": 3.0 if is_right else -3.0, "correct": is_right, "comment": "not a number"}
    if not solution_str:
        parts["empty"] = 1.0
    return parts


def test_scores_keep_every_numeric_part_that_all_have_and_the_answer():
    scores = score_samples(SAMPLES, BENCHMARK, reward)
    sampled_columns = {"question", "sample", "seed", "length", "truncated"}
    assert {*scores} == sampled_columns | {"answer", "reward/score", "reward/correct"}
    assert scores[[*sampled_columns]].equals(SAMPLES[[*sampled_columns]])
    assert [None if pandas.isna(answer) else answer for answer in scores["answer"]] == ["4", None, None, "7"]
    assert scores["reward/score"].tolist() == [3.0, -3.0, -3.0, 3.0]
    assert scores["reward/correct"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_reward_that_is_a_number_is_the_score():
    scores = score_samples(SAMPLES, BENCHMARK, lambda **row: 2)
    assert scores["reward/score"].tolist() == [2.0] * 4


def test_an_answer_that_the_reward_returns_has_the_vote_as_in_verls_validation():
    scores = score_samples(SAMPLES, BENCHMARK, lambda **row: {"score": 0.0, "pred": row["ground_truth"]})
    assert scores["answer"].tolist() == ["4", "4", "7", "7"]


def test_a_boolean_of_numpy_is_a_part():
    scores = score_samples(SAMPLES, BENCHMARK, lambda **row: {"score": -3.0, "correct": np.True_})
    assert scores["reward/correct"].tolist() == [1.0] * 4


def reward_with_a_part_of_long_answers(data_source, solution_str, ground_truth, extra_info):
    parts = {"score": float(len(solution_str))}
    if len(solution_str) > 2:
        parts["long"] = 1.0
    return parts


@pytest.mark.parametrize(("completion_of_a", "completion_of_b"), [("long", "no"), ("no", "long")])
def test_a_part_that_one_checkpoint_lacks_is_left_out_for_all(tmp_path, completion_of_a, completion_of_b):
    evaluation = EvaluationFolder(tmp_path / "evaluation")
    questions = write_questions(tmp_path, 4)
    for label, completion in (("a", completion_of_a), ("b", completion_of_b)):
        rows = [row | {"output": completion} for row in make_validation_rows(range(4), samples=1)]
        write_rows(evaluation.completions_folder(label, "b", 0) / "000000" / "1.jsonl", rows)
    evaluation.write_config(
        {
            "model": "m",
            "protocol": "sampled",
            "versions": {},
            "reward": f"{__name__}:reward_with_a_part_of_long_answers",
            "checkpoints": {label: {"source": "m", "step": 1, "fingerprint": label * 64} for label in "ab"},
            "sampling": {"samples": 1, "seeds": [0], "max_tokens": 8, "temperature": 1.0, "top_p": 1.0},
            "benchmarks": {"b": {"path": str(questions), "sha256": hash_of_file(questions), "questions": 4}},
        }
    )
    benchmark = score(evaluation)["benchmarks"]["b"]
    # Answers of four and of two characters.
    assert benchmark["values"]["reward/score"] == [3.0] * 4
    for estimates in (benchmark["result"], *benchmark["checkpoints"].values()):
        assert "reward/long" not in estimates


@pytest.mark.parametrize(
    "broken_reward",
    [
        pytest.param(lambda **_: 1 / 0, id="an error"),
        pytest.param(lambda **_: {"acc": 1.0}, id="no score"),
        pytest.param(lambda **_: "1.0", id="a text"),
        pytest.param(lambda **_: {"score": 1.0, "x": float("nan")}, id="a part that is NaN"),
        # Nothing can count votes for a list.
        pytest.param(lambda **_: {"score": 1.0, "pred": ["4"]}, id="an answer that is a list"),
    ],
)
def test_a_broken_reward_names_the_completion(broken_reward):
    with pytest.raises(RuntimeError, match="benchmark sums, question 0, sample 0"):
        score_samples(SAMPLES, BENCHMARK, broken_reward)


def test_an_object_is_imported_by_its_name():
    assert import_object("verl_clipx.papers.evaluation.scores:extract_answer", "--reward", object) is extract_answer


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("verl_clipx.papers.evaluation.scores", id="no object"),
        pytest.param(":f", id="no module"),
        pytest.param("no.such.module:f", id="an unknown module"),
        pytest.param("math:no_such_function", id="an unknown object"),
        pytest.param("math:pi", id="an object of another type"),
    ],
)
def test_a_name_of_no_object_of_the_type_is_refused(name):
    with pytest.raises(ValueError, match=f"--reward {name}"):
        import_object(name, "--reward", str)


def test_a_module_that_fails_while_it_is_imported_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_reward.py").write_text("no_such_name")
    with pytest.raises(ValueError, match=r"--reward broken_reward:f: cannot .*NameError: name 'no_such_name'"):
        import_object("broken_reward:f", "--reward", object)


LAST_ANSWERS = yaml.safe_load(Path(__file__).with_name("last_answers.yaml").read_text())
LAST_ANSWERS["<answer>" + "1" * (MAX_ANSWER_LENGTH + 1) + "</answer>"] = None


@pytest.mark.parametrize(("text", "answer"), LAST_ANSWERS.items())
def test_the_last_answer(text, answer):
    assert extract_answer(text) == answer
