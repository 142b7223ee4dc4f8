"""`clipx papers eval compare` from the command line, and clustered intervals, on evaluations of chosen outcomes.

Not covered: the formulas (tests/common/statistics), evaluations that a model made (test_commands.py).
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.analysis.runs.commands import clipx
from tests.messages import assert_names
from tests.papers.evaluation.tiny import write_evaluation, write_questions
from verl_clipx.common.statistics.comparison import compare
from verl_clipx.common.statistics.variance import compute_squared_error

QUESTIONS = 40
SAMPLES = 4


@dataclass(frozen=True)
class Methods:
    """Evaluations of two methods' trainings.

    Args:
        folder: of the evaluations, called a-seed1 to a-seed3 and b-seed1 to b-seed3.
        questions: the benchmark's file.
        right_of_a, right_of_b: whether each sample is right, ``[trainings, questions, samples]``.
    """

    folder: Path
    questions: Path
    right_of_a: np.ndarray
    right_of_b: np.ndarray

    @property
    def first_of_a(self) -> Path:
        return self.folder / "a-seed1"

    @property
    def first_of_b(self) -> Path:
        return self.folder / "b-seed1"


@pytest.fixture(scope="module")
def methods(tmp_path_factory):
    """Three trainings of method a and three of method b, evaluated on one benchmark."""
    folder = tmp_path_factory.mktemp("methods")
    generator = np.random.default_rng(0)
    questions = write_questions(folder, QUESTIONS)
    chance = generator.beta(0.7, 0.7, (1, QUESTIONS, 1))
    right_of_a = generator.random((3, QUESTIONS, SAMPLES)) < np.clip(chance, 0, 1)
    right_of_b = generator.random((3, QUESTIONS, SAMPLES)) < np.clip(chance + 0.15, 0, 1)
    for seed in (1, 2, 3):
        write_evaluation(folder / f"a-seed{seed}", right_of_a[seed - 1], questions)
        write_evaluation(folder / f"b-seed{seed}", right_of_b[seed - 1], questions)
    return Methods(folder=folder, questions=questions, right_of_a=right_of_a, right_of_b=right_of_b)


def compare_evaluations(first, second, *options, code=0) -> str:
    """Run `clipx papers eval compare`, and return its output."""
    return clipx("papers", "eval", "compare", first, second, *options, code=code)


def read_benchmark_results(evaluation) -> dict:
    return json.loads((evaluation / "results.json").read_text())["benchmarks"]["b"]


def test_three_trainings_of_each_are_compared_over_questions_and_seeds(methods, tmp_path):
    out = tmp_path / "out.json"
    output = compare_evaluations(methods.folder / "a-seed*", methods.folder / "b-seed*", "--out", out)
    expected = compare({"b": methods.right_of_a.mean(axis=2)}, {"b": methods.right_of_b.mean(axis=2)})
    values = read_benchmark_results(methods.first_of_a)["values"]
    assert values[f"avg@{SAMPLES}"] == methods.right_of_a[0].mean(axis=1).tolist()
    comparison = json.loads(out.read_text())
    assert comparison["benchmarks"]["b"]["avg"] == json.loads(json.dumps(asdict(expected)))
    assert len(comparison["first"]) == len(comparison["second"]) == 3
    assert comparison["first"][0].endswith("a-seed1")
    assert f"{expected.difference:+.3f} [{expected.low:+.3f}, {expected.high:+.3f}]" in output
    assert f"b: The accuracy of the second is {expected.verdict} the first." in output
    assert expected.p_text in output
    error_of_questions = f"{expected.error['question'] ** 0.5:.3f} from questions"
    error_of_seeds = f"{expected.error['seed'] ** 0.5:.3f} from seeds"
    assert_names(output, "Standard error of this difference", error_of_questions, error_of_seeds)
    assert "an interval of 3 seeds holds the true difference in about 64 %" in output


@pytest.mark.parametrize(
    ("first", "second", "over"),
    [("a-seed1", "b-seed1", "questions"), ("a-seed[12]", "b-seed*", None), ("a-seed1", "b-seed*", None)],
)
def test_too_few_trainings_get_no_verdict_on_the_methods(methods, tmp_path, first, second, over):
    out = tmp_path / "out.json"
    output = compare_evaluations(methods.folder / first, methods.folder / second, "--out", out)
    comparison = json.loads(out.read_text())["benchmarks"]["b"]["avg"]
    assert comparison["over"] == over
    assert_names(comparison["refused"], "training seeds are too few", "3 of each are needed")
    assert "This does not say which method is better" in output
    if over:
        assert comparison["low"] < comparison["difference"] < comparison["high"]
        assert "speaks only of these runs" in output
    else:
        assert comparison["low"] is comparison["p_value"] is None
        assert "[" not in output.partition("avg")[2].partition("pass@")[0]


def test_two_checkpoints_with_different_numbers_of_samples_are_compared_in_what_both_have(methods, tmp_path):
    out = tmp_path / "out.json"
    first = methods.first_of_a
    two_samples_of_b = methods.right_of_b[0][:, :2]
    second = write_evaluation(tmp_path / "second", two_samples_of_b, methods.questions)
    output = compare_evaluations(first, second, "--out", out)
    assert "second minus first" in output
    comparison = json.loads(out.read_text())["benchmarks"]["b"]
    assert comparison["avg"]["first"] == pytest.approx(methods.right_of_a[0].mean())
    assert comparison["avg"]["second"] == pytest.approx(two_samples_of_b.mean())
    assert "pass@2" in comparison
    assert "pass@4" not in comparison
    assert "maj@4" not in comparison
    # The expectation of best@j depends on the number of samples.
    assert "best@2" not in comparison
    assert "best@2" in read_benchmark_results(first)["result"]
    assert "best@2" in read_benchmark_results(second)["result"]


def test_with_all_the_parts_of_the_reward_are_compared_too(methods):
    assert "reward/score" not in compare_evaluations(methods.first_of_a, methods.first_of_b)
    assert "reward/score" in compare_evaluations(methods.first_of_a, methods.first_of_b, "--all")


def test_evaluations_on_different_questions_are_not_compared(methods, tmp_path):
    other = write_evaluation(tmp_path / "other", methods.right_of_b[0][:8], write_questions(tmp_path, 8))
    output = compare_evaluations(methods.first_of_a, other, code=1)
    assert "benchmark b: the evaluations were made on different" in output


def test_an_evaluation_that_is_not_scored_is_not_compared(methods, tmp_path):
    other = write_evaluation(tmp_path / "other", methods.right_of_b[0], methods.questions)
    (other / "results.json").unlink()
    assert "not scored yet" in compare_evaluations(methods.first_of_a, other, code=1)


def test_other_settings_of_the_sampling_are_named(methods, tmp_path):
    config = json.loads((methods.first_of_b / "config.json").read_text())
    other_sampling = config["sampling"] | {"max_tokens": 16, "top_p": 0.5}
    other = write_evaluation(tmp_path / "other", methods.right_of_b[0], methods.questions, sampling=other_sampling)
    output = compare_evaluations(methods.first_of_a, other)
    assert f"max_tokens is 8 in {methods.first_of_a} and 16 in {other}:" in output
    assert "top_p is 1.0 in" in output
    assert "temperature is" not in output
    assert output.count("differences may come from this setting.") == 2
    assert "may come from this setting" not in compare_evaluations(methods.first_of_a, methods.first_of_b)


def test_one_training_twice_is_not_two(methods, tmp_path):
    config = json.loads((methods.first_of_a / "config.json").read_text())
    write_evaluation(tmp_path / "a-seed9", methods.right_of_a[0], methods.questions, checkpoints=config["checkpoints"])
    (tmp_path / "a-seed1").symlink_to(methods.first_of_a)
    output = compare_evaluations(tmp_path / "a-seed*", methods.first_of_b, code=1)
    assert_names(output, "the same checkpoint", "one training and not two")
    assert "Put the samples of both seeds into one evaluation of this checkpoint" in output


FAMILIES = np.arange(QUESTIONS) // 2


def test_an_evaluation_gets_the_intervals_of_clusters(methods, tmp_path):
    evaluation = write_evaluation(tmp_path / "a", methods.right_of_a[0], methods.questions)
    over_questions = json.loads((evaluation / "results.json").read_text())
    assert over_questions["interval"] == "95 %, Student's t over questions"
    output = clipx("papers", "eval", "score", evaluation, "--cluster", "family")
    over_clusters = json.loads((evaluation / "results.json").read_text())
    assert over_clusters["interval"] == "95 %, Student's t over clusters of questions by family"
    assert over_clusters["interval"] in output
    accuracy = over_clusters["benchmarks"]["b"]["result"][f"avg@{SAMPLES}"]
    # 20 families of two: t with 19 degrees of freedom.
    half_width = 2.093024054 * compute_squared_error(methods.right_of_a[0].mean(axis=1), FAMILIES) ** 0.5
    assert accuracy["high"] - accuracy["mean"] == pytest.approx(half_width)
    assert accuracy["mean"] == over_questions["benchmarks"]["b"]["result"][f"avg@{SAMPLES}"]["mean"]


def test_clusters_by_a_field_that_questions_lack_are_refused_and_change_nothing(methods, tmp_path):
    evaluation = write_evaluation(tmp_path / "a", methods.right_of_a[0], methods.questions)
    results_before = (evaluation / "results.json").read_bytes()
    output = clipx("papers", "eval", "score", evaluation, "--cluster", "year", code=1)
    assert "--cluster year: not in extra_info of" in output
    assert "row 0; there are family, index" in output
    assert (evaluation / "results.json").read_bytes() == results_before


def test_evaluations_are_compared_if_both_are_clustered_alike(methods, tmp_path):
    out = tmp_path / "out.json"
    first = write_evaluation(tmp_path / "a", methods.right_of_a[0], methods.questions)
    second = write_evaluation(tmp_path / "b", methods.right_of_b[0], methods.questions)
    clipx("papers", "eval", "score", first, "--cluster", "family")
    output = compare_evaluations(first, second, code=1)
    assert "cluster is 'family' in" in output
    assert "clipx papers eval score" in output
    clipx("papers", "eval", "score", second, "--cluster", "family")
    compare_evaluations(first, second, "--out", out)
    comparison = json.loads(out.read_text())["benchmarks"]["b"]["avg"]
    expected = compare(
        {"b": methods.right_of_a[:1].mean(axis=2)}, {"b": methods.right_of_b[:1].mean(axis=2)}, {"b": FAMILIES}
    )
    assert comparison["low"] == pytest.approx(expected.low)
    assert comparison["p_value"] == pytest.approx(expected.p_value)


def test_too_few_clusters_leave_an_evaluation_without_intervals(tmp_path):
    evaluation = write_evaluation(tmp_path / "e", np.eye(8, 2, dtype=bool), write_questions(tmp_path, 8))
    output = clipx("papers", "eval", "score", evaluation, "--cluster", "family")
    benchmark = read_benchmark_results(evaluation)
    assert benchmark["result"]["avg@2"] == {"mean": 0.125, "low": None, "high": None}
    assert "count like 4.0 of equal size" in benchmark["no_interval"]
    assert f"No intervals: {benchmark['no_interval']}." in output
