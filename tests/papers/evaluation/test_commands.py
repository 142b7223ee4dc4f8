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
from tests.messages import assert_names
from tests.papers.evaluation.tiny import answer_as_verl, save_model, save_questions
from verl_clipx.papers.evaluation import validation_run
from verl_clipx.papers.evaluation.checkpoints import find_checkpoints
from verl_clipx.papers.evaluation.folder import EvaluationFolder, read_completions
from verl_clipx.papers.evaluation.settings import PROTOCOLS
from verl_clipx.papers.evaluation.validation_run import compose_base

# Files of completions, below an evaluation's folder.
CHUNKS = "model/test/completions/seed-*/*/0.jsonl"
COUNTDOWN_REWARD = "verl_clipx.papers.tasks.countdown.reward:compute_score"


def is_even(data_source, solution_str, ground_truth, extra_info):
    """A reward that a stand-in sometimes gets: an even number of characters."""
    return {"score": 1.0 if len(solution_str) % 2 == 0 else -1.0, "format": float(bool(solution_str))}


def fail_on_text(data_source, solution_str, ground_truth, extra_info):
    return 1 / (len(solution_str) == 0)


EASY_REWARD = f"{__name__}:is_even"


@pytest.fixture(scope="module", autouse=True)
def launches():
    """Launches that the stand-in for verl answered, a folder each. What has been composed is not composed again."""
    folders = []

    def answer(folder, platform):
        folders.append(folder)
        answer_as_verl(folder, platform)

    @functools.cache
    def compose_once(overrides: tuple[str, ...]):
        return compose_base(overrides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation_run, "_launch", answer)
        patch.setattr(validation_run, "compose_base", lambda overrides: compose_once(tuple(overrides)))
        yield folders


@pytest.fixture(scope="module")
def run(inputs):
    """Runs `clipx papers eval run` into an evaluation's folder, with further options; returns what it prints."""
    default_model, default_questions = inputs

    def run(out, *options, samples=4, code=0, model=default_model, questions=default_questions):
        words = ("run", model, "+hardware=cpu", "--benchmark", questions, "--out", out, "--max-tokens", 6)
        return clipx("papers", "eval", *words, "--samples", samples, "--reward", EASY_REWARD, *options, code=code)

    return run


def read_results(out) -> dict:
    return json.loads((out / "results.json").read_text())


def read_samples(out, *, questions: int = 6, seeds=(0,), benchmark="test"):
    """Return the completions of an evaluation of one model, four a question and seed."""
    folder = EvaluationFolder(out)
    return read_completions(
        [folder.completions_folder("model", benchmark, seed) for seed in seeds], questions, samples=4
    )


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """A finished evaluation in chunks of two questions; its completions must stay."""
    out = tmp_path_factory.mktemp("finished")
    run(out, "--chunk-size", 9)
    return out


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished evaluation that a test may change."""
    return shutil.copytree(finished, tmp_path / "out")


def test_a_run_reports_what_its_completions_say(inputs, finished):
    _, questions = inputs
    results = read_results(finished)
    benchmark = results["benchmarks"]["test"]
    samples = read_samples(finished)
    is_right = samples["text"].map(len) % 2 == 0
    assert 0 < is_right.mean() < 1
    means = {metric: interval["mean"] for metric, interval in benchmark["result"].items()}
    assert means["avg@4"] == pytest.approx(is_right.mean())
    assert means["pass@4"] == is_right.groupby(samples["question"]).any().mean()
    assert means["reward/score"] == pytest.approx(2 * is_right.mean() - 1)
    assert means["length"] == samples["length"].mean()
    assert benchmark["result"] == benchmark["checkpoints"]["model"]
    config = results["config"]
    assert config["sampling"]["seeds"] == [0]
    assert config["overrides"] == ["+hardware=cpu"]
    assert config["versions"]["torch"] == version("torch")
    assert config["benchmarks"]["test"]["path"] == str(questions)
    assert [path.parent.name for path in sorted(finished.glob(CHUNKS))] == ["000000", "000002", "000004"]


def test_the_same_command_samples_nothing_and_shows_the_main_metrics_or_all(run, finished, launches):
    results_before = read_results(finished)["benchmarks"]
    launches_before = len(launches)
    main_metrics = run(finished)
    # Also on another number of GPUs.
    all_metrics = run(finished, "trainer.nnodes=2", "--all")
    assert read_results(finished)["benchmarks"] == results_before
    assert len(launches) == launches_before
    for metric in ("avg@4", "pass@4", "maj@4", "length", "truncated"):
        assert metric in main_metrics
        assert metric in all_metrics
    for metric in ("pass@2", "best@4", "format", "reward/score"):
        assert metric not in main_metrics
        assert metric in all_metrics


def read_times(out) -> dict:
    """Return when each file of completions was written."""
    return {path: path.stat().st_mtime_ns for path in out.glob(CHUNKS)}


def test_an_interrupted_run_goes_on_where_it_stopped(run, finished, tmp_path, launches, monkeypatch):
    def interrupt_after_the_first_chunk(folder, platform):
        if folder.with_name("000000").is_dir():
            raise KeyboardInterrupt
        answer_as_verl(folder, platform)

    with monkeypatch.context() as patch:
        patch.setattr(validation_run, "_launch", interrupt_after_the_first_chunk)
        run(tmp_path, "--chunk-size", 8, code=None)
    times_of_kept = read_times(tmp_path)
    assert len(times_of_kept) == 1
    assert not (tmp_path / "results.json").exists()
    assert list(tmp_path.glob("model/test/completions/seed-0/unfinished"))
    launches_before = len(launches)
    run(tmp_path, "--chunk-size", 100)
    assert len(launches) == launches_before + 1
    assert not list(tmp_path.rglob("unfinished"))
    assert times_of_kept.items() <= read_times(tmp_path).items()
    # However it was cut up, the completions and all that follows from them are those of a run in one go.
    assert read_results(tmp_path)["benchmarks"] == read_results(finished)["benchmarks"]


def test_another_seed_adds_samples_to_those_there(run, finished, copy, launches):
    launches_before = len(launches)
    run(copy, "--seed", 0, "--seed", 3)
    assert len(launches) == launches_before + 1
    results = read_results(copy)
    assert "avg@8" in results["benchmarks"]["test"]["result"]
    assert results["config"]["sampling"]["samples"] == 8
    assert results["config"]["sampling"]["seeds"] == [0, 3]
    of_both_seeds = read_samples(copy, seeds=(0, 3))
    of_first_seed = of_both_seeds[of_both_seeds["sample"] < 4].reset_index(drop=True)
    assert of_first_seed.equals(read_samples(finished))
    assert set(of_both_seeds["seed"]) > set(of_first_seed["seed"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0.6"], "temperature was 1.0 and is now 0.6"),
        (["--max-tokens", "7"], "max_tokens was 6 and is now 7"),
        (["--template", "plain"], "template was 'chat' and is now 'plain'"),
        (["--samples", "5"], "samples was 4 and is now 5"),
        (["actor_rollout_ref.rollout.dtype=float32"], "overrides was"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(run, finished, options, message):
    assert_refuses_to_mix(run, finished, message, *options)


def test_another_model_does_not_mix_with_what_is_there(run, finished, tmp_path):
    assert_refuses_to_mix(run, finished, "model was", model=save_model(tmp_path / "model", seed=1))


def test_other_questions_do_not_mix_with_what_is_there(run, finished, tmp_path):
    assert_refuses_to_mix(run, finished, "benchmark was", questions=save_questions(tmp_path, 5))


def assert_refuses_to_mix(run, finished, message, *options, **changes):
    """Assert that a run into a finished evaluation's folder is refused, and changes nothing."""
    results_before = (finished / "results.json").read_bytes()
    output = run(finished, *options, code=1, **changes)
    assert message in output
    assert "Choose another folder with --out" in output
    assert (finished / "results.json").read_bytes() == results_before


def test_completions_without_their_settings_are_refused(run, copy):
    config = copy / "config.json"
    settings = json.loads(config.read_text())
    # An evaluation of a version that did not record the template.
    del settings["sampling"]["template"]
    config.write_text(json.dumps(settings))
    assert "template was None and is now 'chat'" in run(copy, code=1)
    config.unlink()
    output = run(copy, code=1)
    assert_names(output, "contains completions", "not the settings of their sampling", "--out")


def test_a_run_that_stored_nothing_binds_nobody(run, copy):
    shutil.rmtree(copy / "model/test/completions")
    run(copy, "--temperature", 0.5, samples=1)
    assert read_results(copy)["config"]["sampling"]["temperature"] == 0.5


def test_a_reward_that_fails_loses_no_completion(finished, copy, launches):
    launches_before = len(launches)
    output = clipx("papers", "eval", "score", copy, "--reward", f"{__name__}:fail_on_text", code=1)
    assert "question 0, sample 0 (ZeroDivisionError" in output
    assert "All completions are kept" in output
    assert not (copy / "results.json").exists()
    clipx("papers", "eval", "score", copy, "--reward", EASY_REWARD)
    assert read_results(copy)["benchmarks"] == read_results(finished)["benchmarks"]
    assert len(launches) == launches_before


def test_scoring_again_with_another_reward_samples_nothing_and_is_not_compared(finished, copy, launches):
    launches_before = len(launches)
    clipx("papers", "eval", "score", copy, "--reward", COUNTDOWN_REWARD)
    results = read_results(copy)
    assert len(launches) == launches_before
    assert results["config"]["reward"] == COUNTDOWN_REWARD
    assert results["benchmarks"]["test"]["result"]["avg@4"]["mean"] == 0.0
    output = clipx("papers", "eval", "compare", finished, copy, code=1)
    assert_names(output, "reward", repr(EASY_REWARD), repr(COUNTDOWN_REWARD), "clipx papers eval score")


@pytest.fixture
def saved_run(tmp_path):
    """Checkpoints of a run at steps 10 to 40, as with checkpoint.save_contents=[hf_model]."""
    folder = tmp_path / "run"
    for step in (10, 20, 30, 40):
        # The stand-in answers by the length of the folder's name.
        save_model(folder / f"global_step_{step}" / "actor" / "huggingface", seed=step)
    return folder


def test_mean_of_last_three_is_that_of_the_last_three_checkpoints(run, saved_run, tmp_path):
    out = tmp_path / "evaluation"
    run(out, "--protocol", "mean-of-last-three", "--temperature", 1, model=saved_run)
    benchmark = read_results(out)["benchmarks"]["test"]
    assert [*benchmark["checkpoints"]] == ["global_step_20", "global_step_30", "global_step_40"]
    means = [result["avg@4"]["mean"] for result in benchmark["checkpoints"].values()]
    assert benchmark["result"]["avg@4"]["mean"] == pytest.approx(sum(means) / 3)


@pytest.mark.parametrize("protocol", ["greedy", "sampled"])
def test_greedy_and_sampled_choose_the_last_checkpoint(saved_run, protocol):
    chosen = PROTOCOLS[protocol].choose(find_checkpoints(str(saved_run)))
    assert [checkpoint.step for checkpoint in chosen] == [40]


def test_several_benchmarks_have_samples_and_results_of_their_own(run, inputs, tmp_path):
    _, six_questions = inputs
    three_questions = save_questions(tmp_path / "data", 3, seed=1)
    output = run(tmp_path, "--benchmark", f"second={three_questions}", questions=f"first={six_questions}")
    assert "first: 6 questions" in output
    assert "second: 3 questions" in output
    results = read_results(tmp_path)["benchmarks"]
    for benchmark, questions in (("first", 6), ("second", 3)):
        samples = read_samples(tmp_path, questions=questions, benchmark=benchmark)
        is_right = samples["text"].map(len) % 2 == 0
        assert results[benchmark]["result"]["avg@4"]["mean"] == pytest.approx(is_right.mean())


def test_a_benchmark_that_has_changed_is_not_scored(run, tmp_path):
    questions = save_questions(tmp_path / "data", 3, seed=1)
    run(tmp_path, questions=f"second={questions}")
    shutil.copy(save_questions(tmp_path / "other", 3, seed=2), questions)
    assert "has changed since benchmark second was evaluated" in clipx("papers", "eval", "score", tmp_path, code=1)
