"""`clipx papers eval compare` from the command line, and clustered intervals, on evaluations of chosen outcomes.

Not covered: the formulas (tests/common/statistics), evaluations that a model made (test_commands.py).
"""

import json
from dataclasses import asdict

import numpy as np
import pytest

from tests.analysis.runs.commands import clipx
from tests.papers.evaluation.tiny import evaluation_of, questions_file
from verl_clipx.common.statistics.comparison import compare
from verl_clipx.common.statistics.variance import squared_error

QUESTIONS, SAMPLES = 40, 4


@pytest.fixture(scope="module")
def methods(tmp_path_factory):
    """Folder with three trainings of `a` and of `b`, and the outcomes ``[trainings, questions, samples]`` of both."""
    folder = tmp_path_factory.mktemp("methods")
    generator = np.random.default_rng(0)
    questions = questions_file(folder, QUESTIONS)
    chance = generator.beta(0.7, 0.7, (1, QUESTIONS, 1))
    right = {}
    for name, better in (("a", 0.0), ("b", 0.15)):
        right[name] = generator.random((3, QUESTIONS, SAMPLES)) < np.clip(chance + better, 0, 1)
        for seed, one in enumerate(right[name], 1):
            evaluation_of(folder / f"{name}-seed{seed}", one, questions)
    return folder, questions, right


def test_three_trainings_of_each(methods, tmp_path):
    folder, _, right = methods
    out = tmp_path / "out.json"
    text = clipx("papers", "eval", "compare", folder / "a-seed*", folder / "b-seed*", "--out", out)
    expected = compare(*({"b": right[name].mean(axis=2)} for name in "ab"))
    found = json.loads(out.read_text())
    values = json.loads((folder / "a-seed1" / "results.json").read_text())["benchmarks"]["b"]["values"]
    assert values[f"avg@{SAMPLES}"] == right["a"][0].mean(axis=1).tolist()
    assert found["benchmarks"]["b"]["avg"] == json.loads(json.dumps(asdict(expected)))
    assert f"{expected.difference:+.3f} [{expected.low:+.3f}, {expected.high:+.3f}]" in text
    assert f"b: The accuracy of the second is {expected.verdict} the first." in text and expected.p_text in text
    parts = " and ".join(f"{expected.error[part] ** 0.5:.3f} from {part}s" for part in ("question", "seed"))
    assert f"Standard error of this difference: {parts}." in text
    assert "an interval of 3 seeds holds the true difference in about 64 %" in text
    assert [len(found[side]) for side in ("first", "second")] == [3, 3] and found["first"][0].endswith("a-seed1")


@pytest.mark.parametrize(
    ("first", "second", "over"),
    [("a-seed1", "b-seed1", "questions"), ("a-seed[12]", "b-seed*", None), ("a-seed1", "b-seed*", None)],
)
def test_too_few_trainings_get_no_verdict_on_the_methods(methods, tmp_path, first, second, over):
    folder, *_ = methods
    out = tmp_path / "out.json"
    text = clipx("papers", "eval", "compare", folder / first, folder / second, "--out", out)
    found = json.loads(out.read_text())["benchmarks"]["b"]["avg"]
    assert found["over"] == over and "This does not say which method is better" in text
    assert "training seeds are too few: to say whether a method is better, 3 of each are needed" in found["refused"]
    if over:
        assert found["low"] < found["difference"] < found["high"] and "speaks only of these runs" in text
    else:
        assert found["low"] is found["p_value"] is None
        assert "[" not in text.partition("avg")[2].partition("pass@")[0]


def test_two_checkpoints_with_different_samples_and_those_that_cannot_be_compared(methods, tmp_path):
    folder, questions, right = methods
    first, out = folder / "a-seed1", tmp_path / "out.json"
    second = evaluation_of(tmp_path / "second", right["b"][0][:, :2], questions)
    text = clipx("papers", "eval", "compare", first, second, "--out", out)
    assert "second minus first" in text and "reward/score" not in text
    assert "reward/score" in clipx("papers", "eval", "compare", first, second, "--all")
    found = json.loads(out.read_text())["benchmarks"]["b"]
    assert found["avg"]["first"] == pytest.approx(right["a"][0].mean())
    assert found["avg"]["second"] == pytest.approx(right["b"][0][:, :2].mean())
    assert "pass@2" in found and "pass@4" not in found and "maj@4" not in found
    # The expectation of best@j depends on the number of samples.
    assert "best@2" not in found and "best@2" in result_of(first) and "best@2" in result_of(second)
    other = evaluation_of(tmp_path / "other", right["b"][0][:8], questions_file(tmp_path, 8))
    text = clipx("papers", "eval", "compare", first, other, code=1)
    assert "benchmark b: the evaluations were made on different" in text
    (other / "results.json").unlink()
    assert "not scored yet" in clipx("papers", "eval", "compare", first, other, code=1)


def result_of(evaluation) -> dict:
    return json.loads((evaluation / "results.json").read_text())["benchmarks"]["b"]["result"]


def test_other_settings_of_the_sampling_are_named(methods, tmp_path):
    folder, questions, right = methods
    config = json.loads((folder / "b-seed1" / "config.json").read_text())
    other = evaluation_of(
        tmp_path / "other", right["b"][0], questions, sampling=config["sampling"] | {"max_tokens": 16, "top_p": 0.5}
    )
    text = clipx("papers", "eval", "compare", folder / "a-seed1", other)
    for setting in (f"max_tokens is 8 in {folder / 'a-seed1'} and 16 in {other}:", "top_p is 1.0 in"):
        assert setting in text
    assert text.count("differences may come from this setting.") == 2 and "temperature is" not in text
    assert "may come from this setting" not in clipx(
        "papers", "eval", "compare", folder / "a-seed1", folder / "b-seed1"
    )


def test_one_training_twice_is_not_two(methods, tmp_path):
    folder, questions, right = methods
    config = json.loads((folder / "a-seed1" / "config.json").read_text())
    evaluation_of(tmp_path / "a-seed9", right["a"][0], questions, checkpoints=config["checkpoints"])
    (tmp_path / "a-seed1").symlink_to(folder / "a-seed1")
    text = clipx("papers", "eval", "compare", tmp_path / "a-seed*", folder / "b-seed1", code=1)
    assert (
        "are of the same checkpoint, so they are one training and not two. Put the samples of both seeds into one "
        "evaluation of this checkpoint" in text
    )


def test_clustered_errors_of_an_evaluation_and_a_comparison(methods, tmp_path):
    _, questions, right = methods
    first, second = (evaluation_of(tmp_path / name, right[name][0], questions) for name in "ab")
    before = json.loads((first / "results.json").read_text())
    assert before["interval"] == "95 %, Student's t over questions"
    text = clipx("papers", "eval", "score", first, "--cluster", "family")
    after = json.loads((first / "results.json").read_text())
    assert after["interval"] == "95 %, Student's t over clusters of questions by family" and after["interval"] in text
    accuracy = after["benchmarks"]["b"]["result"][f"avg@{SAMPLES}"]
    # 20 families of two: t with 19 degrees of freedom.
    families = np.arange(QUESTIONS) // 2
    half = 2.093024054 * squared_error(right["a"][0].mean(axis=1), families) ** 0.5
    assert accuracy["high"] - accuracy["mean"] == pytest.approx(half)
    assert accuracy["mean"] == before["benchmarks"]["b"]["result"][f"avg@{SAMPLES}"]["mean"]
    # A field that questions lack is refused, and nothing changes.
    text = clipx("papers", "eval", "score", first, "--cluster", "year", code=1)
    assert "--cluster year: not in extra_info of" in text and "row 0; there are family, index" in text
    assert json.loads((first / "results.json").read_text()) == after
    # One rule for both.
    text = clipx("papers", "eval", "compare", first, second, code=1)
    assert "cluster is 'family' in" in text and "clipx papers eval score" in text
    clipx("papers", "eval", "score", second, "--cluster", "family")
    clipx("papers", "eval", "compare", first, second, "--out", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["benchmarks"]["b"]["avg"]
    expected = compare(*({"b": right[name][:1].mean(axis=2)} for name in "ab"), {"b": families})
    assert (found["low"], found["p_value"]) == pytest.approx((expected.low, expected.p_value))


def test_too_few_clusters_leave_an_evaluation_without_intervals(tmp_path):
    evaluation_of(tmp_path / "e", np.eye(8, 2, dtype=bool), questions_file(tmp_path, 8))
    text = clipx("papers", "eval", "score", tmp_path / "e", "--cluster", "family")
    found = json.loads((tmp_path / "e" / "results.json").read_text())["benchmarks"]["b"]
    assert found["result"]["avg@2"] == {"mean": 0.125, "low": None, "high": None}
    assert "count like 4.0 of equal size" in found["no_interval"] and f"No intervals: {found['no_interval']}." in text
