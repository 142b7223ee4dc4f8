"""`clipx papers eval run` and `score` from the command line, with a stand-in for verl: run, go on, add samples, score
again.

Not covered: verl itself (tests/end_to_end/evaluation_round.py), what `compare` says (test_comparison.py).
"""

import functools
import json
import shutil
from importlib.metadata import version

import pytest

from tests.analysis.runs.commands import clipx
from tests.papers.evaluation.tiny import answer_as_verl, save_model, save_questions
from verl_clipx.papers.evaluation import validation_run
from verl_clipx.papers.evaluation.checkpoints import find_checkpoints
from verl_clipx.papers.evaluation.folder import EvaluationFolder, read_completions
from verl_clipx.papers.evaluation.settings import PROTOCOLS
from verl_clipx.papers.evaluation.validation_run import compose_base

CHUNKS = "model/test/completions/seed-*/*/0.jsonl"
COUNTDOWN = "verl_clipx.papers.tasks.countdown.reward:compute_score"


def is_even(data_source, solution_str, ground_truth, extra_info):
    """A reward that a stand-in sometimes gets: an even number of characters."""
    return {"score": 1.0 if len(solution_str) % 2 == 0 else -1.0, "format": float(bool(solution_str))}


def fail_on_text(data_source, solution_str, ground_truth, extra_info):
    return 1 / (len(solution_str) == 0)


EASY = f"{__name__}:is_even"


@pytest.fixture(scope="module", autouse=True)
def verl():
    """Launches that the stand-in answered, a folder each. What has been composed is not composed again."""
    launched, compose = [], functools.cache(lambda *overrides: compose_base(overrides))

    def answer(folder, platform):
        launched.append(folder)
        answer_as_verl(folder, platform)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation_run, "_launch", answer)
        patch.setattr(validation_run, "compose_base", lambda overrides: compose(*overrides))
        yield launched


@pytest.fixture(scope="module")
def run(inputs):
    """A function from an evaluation's folder and further options to what `clipx papers eval run` prints."""

    def run(out, *more, samples=4, code=0, model=inputs[0], questions=inputs[1]):
        words = ("run", model, "+hardware=cpu", "--benchmark", questions, "--out", out, "--max-tokens", 6)
        return clipx("papers", "eval", *words, "--samples", samples, "--reward", EASY, *more, code=code)

    return run


def results_of(out) -> dict:
    return json.loads((out / "results.json").read_text())


def completions_of(out, questions: int = 6, seeds=(0,), names=("model", "test")):
    return read_completions([EvaluationFolder(out).completions_folder(*names, seed) for seed in seeds], questions, 4)


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory):
    """A finished evaluation in chunks of two questions; its completions must stay."""
    out = tmp_path_factory.mktemp("whole")
    run(out, "--chunk-size", 9)
    return out


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "out")


def test_a_run_reports_what_its_completions_say_and_the_same_command_samples_nothing(inputs, run, whole, verl):
    results = results_of(whole)
    found = results["benchmarks"]["test"]
    samples = completions_of(whole)
    right = samples["text"].map(len) % 2 == 0
    assert 0 < right.mean() < 1
    assert {metric: found["result"][metric]["mean"] for metric in ("avg@4", "pass@4", "reward/score", "length")} == {
        "avg@4": pytest.approx(right.mean()),
        "pass@4": right.groupby(samples["question"]).any().mean(),
        "reward/score": pytest.approx(2 * right.mean() - 1),
        "length": samples["length"].mean(),
    }
    assert found["result"] == found["checkpoints"]["model"]
    config = results["config"]
    assert config["sampling"]["seeds"] == [0] and config["overrides"] == ["+hardware=cpu"]
    assert config["versions"]["torch"] == version("torch")
    assert config["benchmarks"]["test"]["path"] == str(inputs[1])
    assert [path.parent.name for path in sorted(whole.glob(CHUNKS))] == ["000000", "000002", "000004"]
    before = len(verl)
    # Also on another number of GPUs.
    shown, all_of_it = run(whole), run(whole, "trainer.nnodes=2", "--all")
    assert (results_of(whole)["benchmarks"], len(verl)) == (results["benchmarks"], before)
    for metric in ("avg@4", "pass@4", "maj@4", "length", "truncated"):
        assert metric in shown and metric in all_of_it
    for metric in ("pass@2", "best@4", "format", "reward/score"):
        assert metric not in shown and metric in all_of_it


def test_an_interrupted_run_goes_on_where_it_stopped(run, whole, tmp_path, verl, monkeypatch):
    def die(folder, platform):
        if folder.with_name("000000").is_dir():
            raise KeyboardInterrupt
        answer_as_verl(folder, platform)

    with monkeypatch.context() as patch:
        patch.setattr(validation_run, "_launch", die)
        run(tmp_path, "--chunk-size", 8, code=None)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob(CHUNKS)}
    assert len(kept) == 1 and not (tmp_path / "results.json").exists()
    assert list(tmp_path.glob("model/test/completions/seed-0/unfinished"))
    before = len(verl)
    run(tmp_path, "--chunk-size", 100)
    assert len(verl) == before + 1 and not list(tmp_path.rglob("unfinished"))
    assert kept.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.glob(CHUNKS)}.items()
    # However it was cut up, the completions and all that follows from them are those of a run in one go.
    assert results_of(tmp_path)["benchmarks"] == results_of(whole)["benchmarks"]


def test_another_seed_adds_samples_to_those_there(run, whole, copy, verl):
    before = len(verl)
    run(copy, "--seed", 0, "--seed", 3)
    assert len(verl) == before + 1
    results = results_of(copy)
    assert "avg@8" in results["benchmarks"]["test"]["result"]
    assert (results["config"]["sampling"]["samples"], results["config"]["sampling"]["seeds"]) == (8, [0, 3])
    both = completions_of(copy, seeds=(0, 3))
    first = both[both["sample"] < 4].reset_index(drop=True)
    assert first.equals(completions_of(whole)) and set(both["seed"]) > set(first["seed"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature", "0.6"], "temperature was 1.0 and is now 0.6"),
        (["--max-tokens", "7"], "max_tokens was 6 and is now 7"),
        (["--template", "plain"], "template was 'chat' and is now 'plain'"),
        (["--samples", "5"], "samples was 4 and is now 5"),
        (["actor_rollout_ref.rollout.dtype=float32"], "overrides was"),
        (["model"], "model was"),
        (["questions"], "benchmark was"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(run, whole, tmp_path, change, named):
    before = (whole / "results.json").read_bytes()
    others = {"model": lambda: save_model(tmp_path / "model", seed=1), "questions": lambda: save_questions(tmp_path, 5)}
    (first, *_), more = change, {key: other() for key, other in others.items() if key in change}
    message = run(whole, *([] if first in others else change), code=1, **more)
    assert named in message and "Choose another folder with --out" in message
    assert (whole / "results.json").read_bytes() == before


def test_completions_without_their_settings_are_refused(run, copy):
    config = copy / "config.json"
    settings = json.loads(config.read_text())
    # An evaluation of a version that did not record the template.
    del settings["sampling"]["template"]
    config.write_text(json.dumps(settings))
    assert "template was None and is now 'chat'" in run(copy, code=1)
    config.unlink()
    message = run(copy, code=1)
    assert "contains completions, but not the settings of their sampling" in message and "with --out" in message


def test_a_run_that_stored_nothing_binds_nobody(run, copy):
    shutil.rmtree(copy / "model/test/completions")
    run(copy, "--temperature", 0.5, samples=1)
    assert results_of(copy)["config"]["sampling"]["temperature"] == 0.5


def test_scoring_again_with_another_reward_samples_nothing_and_one_that_fails_loses_no_completion(whole, copy, verl):
    before = len(verl)
    message = clipx("papers", "eval", "score", copy, "--reward", f"{__name__}:fail_on_text", code=1)
    assert "question 0, sample 0 (ZeroDivisionError" in message and "All completions are kept" in message
    assert not (copy / "results.json").exists()
    clipx("papers", "eval", "score", copy, "--reward", COUNTDOWN)
    results = results_of(copy)
    assert results["config"]["reward"] == COUNTDOWN
    assert results["benchmarks"]["test"]["result"]["avg@4"]["mean"] == 0.0
    message = clipx("papers", "eval", "compare", whole, copy, code=1)
    assert f"reward is {EASY!r} in" in message and f"and {COUNTDOWN!r} in" in message
    assert "clipx papers eval score" in message
    clipx("papers", "eval", "score", copy, "--reward", EASY)
    assert results_of(copy)["benchmarks"] == results_of(whole)["benchmarks"] and len(verl) == before


def test_the_protocols_of_a_whole_run(run, tmp_path):
    saved, last = tmp_path / "run", tmp_path / "last"
    for step in (10, 20, 30, 40):
        # As with checkpoint.save_contents=[hf_model]. The stand-in answers by the length of the folder's name.
        save_model(saved / f"global_step_{step}" / "actor" / "huggingface", seed=step)
    run(last, "--protocol", "mean-of-last-three", "--temperature", 1, model=saved)
    found = results_of(last)["benchmarks"]["test"]
    assert [*found["checkpoints"]] == ["global_step_20", "global_step_30", "global_step_40"]
    means = [one["avg@4"]["mean"] for one in found["checkpoints"].values()]
    assert found["result"]["avg@4"]["mean"] == pytest.approx(sum(means) / 3)
    for protocol in ("greedy", "sampled"):
        assert [one.step for one in PROTOCOLS[protocol].choose(find_checkpoints(str(saved)))] == [40]


def test_several_benchmarks_have_samples_and_results_of_their_own(run, inputs, tmp_path):
    first, second = f"first={inputs[1]}", f"second={save_questions(tmp_path / 'data', 3, seed=1)}"
    text = run(tmp_path, "--benchmark", second, questions=first)
    assert "first: 6 questions" in text and "second: 3 questions" in text
    for name, count in (("first", 6), ("second", 3)):
        right = completions_of(tmp_path, count, names=("model", name))["text"].map(len) % 2 == 0
        assert results_of(tmp_path)["benchmarks"][name]["result"]["avg@4"]["mean"] == pytest.approx(right.mean())
    shutil.copy(save_questions(tmp_path / "other", 3, seed=2), tmp_path / "data" / "test.parquet")
    assert "has changed since benchmark second was evaluated" in clipx("papers", "eval", "score", tmp_path, code=1)
