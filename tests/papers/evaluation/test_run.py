"""`clipx eval` from the command line on a random policy: run, resume after a kill, more samples, score, compare.

Not covered: GPUs and vLLM, the hub, a policy that learnt anything.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.metadata import version

import pandas
import pytest
import torch
from typer.testing import CliRunner

from tests.papers.evaluation.tiny import REWARD, save_model, save_questions
from verl_clipx.cli import app
from verl_clipx.common import command_line
from verl_clipx.papers.evaluation.commands import DEFAULT_REWARD
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.samples import read_samples
from verl_clipx.papers.evaluation.scores import load_function

torch.set_num_threads(1)
SHARDS = "model/test/completions/*.parquet"


def any_tag(data_source, solution_str, ground_truth, extra_info):
    """A reward that a random policy sometimes gets: an even number of characters."""
    return {"score": 1.0 if len(solution_str) % 2 == 0 else -1.0, "format": float(bool(solution_str))}


EASY = f"{__name__}:any_tag"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return save_model(folder / "model"), save_questions(folder / "data", 6)


def options(inputs, out, *more: str, samples: int = 4) -> list[str]:
    model, questions = map(str, inputs)
    return [
        *("eval", "run", model, "--benchmark", questions, "--out", str(out), "--backend", "cpu"),
        *("--max-tokens", "6", "--samples", str(samples), "--reward", EASY, *more),
    ]


def invoke(*arguments: str) -> str:
    """Run the command; its output. Long lines are not wrapped."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def refuse(*arguments: str) -> str:
    """Run a command that must end with an error message; its output."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(arguments))
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    return result.output


def results_of(out) -> dict:
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A finished evaluation; do not change it."""
    out = tmp_path_factory.mktemp("whole")
    invoke(*options(inputs, out, "--shard-size", "7"))
    return out


def test_a_run_reports_what_its_completions_say(inputs, whole):
    results = results_of(whole)
    found = results["benchmarks"]["test"]
    samples = read_samples(EvaluationFolder(whole).completions("model", "test"), questions=6, samples=4)
    right = samples["text"].map(len) % 2 == 0
    assert 0 < right.mean() < 1
    assert found["result"]["avg@4"]["mean"] == pytest.approx(right.mean())
    assert found["result"]["pass@4"]["mean"] == right.groupby(samples["question"]).any().mean()
    assert found["result"]["reward/score"]["mean"] == pytest.approx(2 * right.mean() - 1)
    assert found["result"]["length"]["mean"] == samples["length"].mean()
    assert found["result"]["truncated"]["mean"] == samples["truncated"].mean()
    assert found["result"] == found["checkpoints"]["model"]
    assert samples["length"].max() == 6
    config = results["config"]
    assert config["sampling"]["seed"] == 0 and config["versions"]["torch"] == version("torch")
    assert config["benchmarks"]["test"]["path"] == str(inputs[1])
    assert len(results["hash"]) == 64
    # 24 completions in shards of 7.
    assert len(list(whole.glob(SHARDS))) == 4


def test_the_same_command_again_changes_nothing(inputs, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)}
    text = invoke(*options(inputs, out))
    assert {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)} == before
    assert (out / "results.json").read_bytes() == (whole / "results.json").read_bytes()
    assert "avg@4" in text and "pass@2" in text and "maj@4" in text


def test_a_build_of_torch_that_calls_itself_otherwise_than_its_distribution(inputs, whole, tmp_path, monkeypatch):
    # As where torch comes from the default index: the distribution is 2.13.0 and torch.__version__ 2.13.0+cu130.
    distribution = version("torch").partition("+")[0]
    monkeypatch.setattr(torch, "__version__", f"{distribution}+cu130")
    monkeypatch.setattr(command_line, "version", lambda name: distribution if name == "torch" else version(name))
    out = tmp_path / "out"
    invoke(*options(inputs, out, samples=1))
    results = results_of(out)
    assert results["config"]["versions"]["torch"] == distribution
    before = {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)}
    invoke(*options(inputs, out, samples=1))
    assert {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)} == before and results_of(out) == results


# The command, killed by the system as soon as it has written two shards.
KILLED = """
import os, signal
from verl_clipx.cli import main
from verl_clipx.papers.evaluation import sampling

write, written = sampling.write_shard, []

def write_and_die(*arguments):
    written.append(write(*arguments))
    if len(written) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

sampling.write_shard = write_and_die
main()
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_stopped(inputs, whole, tmp_path):
    command = [sys.executable, "-c", KILLED, *options(inputs, tmp_path, "--shard-size", "1")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob(SHARDS)}
    assert (done.returncode, len(kept)) == (-signal.SIGKILL, 2), done.stderr
    assert not (tmp_path / "results.json").exists()
    (tmp_path / "model/test/completions/.000005-00003.parquet.1.partial").write_bytes(b"half")

    invoke(*options(inputs, tmp_path, "--shard-size", "5"))
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob(SHARDS)}
    assert len(after) == len(kept) + -(-(24 - len(kept)) // 5)
    assert {path: after[path] for path in kept} == kept
    assert not list(tmp_path.glob("model/test/completions/.*"))
    # However it was cut up, the completions and all that follows from them are those of a run in one go.
    assert results_of(tmp_path) == results_of(whole)


def test_more_samples_are_added_to_those_there(inputs, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)}
    invoke(*options(inputs, out, samples=6))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "avg@6" in results_of(out)["benchmarks"]["test"]["result"]
    completions = EvaluationFolder(out).completions("model", "test")
    six = read_samples(completions, questions=6, samples=6)
    four = read_samples(EvaluationFolder(whole).completions("model", "test"), questions=6, samples=4)
    pandas.testing.assert_frame_equal(six[six["sample"] < 4].reset_index(drop=True), four)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--temperature", "0.6"], "temperature was 1.0 and is now 0.6"),
        (["--seed", "1"], "seed was 0 and is now 1"),
        (["--max-tokens", "7"], "max_tokens was 6 and is now 7"),
        (["--template", "plain"], "template was 'chat' and is now 'plain'"),
    ],
)
def test_other_settings_do_not_mix_with_what_is_there(inputs, whole, change, named):
    before = (whole / "results.json").read_bytes()
    message = refuse(*options(inputs, whole, *change))
    assert named in message and "Set another --out" in message
    assert (whole / "results.json").read_bytes() == before


def test_a_run_that_stored_nothing_binds_nobody(inputs, whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    for path in out.glob(SHARDS):
        path.unlink()
    invoke(*options(inputs, out, "--seed", "1", samples=1))
    assert results_of(out)["config"]["sampling"]["seed"] == 1


def test_another_model_or_benchmark_does_not_mix_with_what_is_there(inputs, whole, tmp_path):
    model, questions = inputs
    other_model = save_model(tmp_path / "model", seed=1)
    assert "model was" in refuse(*options((other_model, questions), whole))
    other_questions = save_questions(tmp_path, 6, seed=1)
    assert "benchmark was" in refuse(*options((model, other_questions), whole))


def test_scoring_again_with_another_reward_samples_nothing(whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)}
    invoke("eval", "score", str(out), "--reward", REWARD)
    results = results_of(out)
    assert results["config"]["reward"] == REWARD
    assert results["benchmarks"]["test"]["result"]["avg@4"]["mean"] == 0.0
    assert {path: path.stat().st_mtime_ns for path in out.glob(SHARDS)} == before
    invoke("eval", "score", str(out), "--reward", EASY)
    assert results_of(out) == results_of(whole)


def test_what_counts_as_right_can_be_changed_afterwards(whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    invoke("eval", "score", str(out), "--correct-from", "-1")
    assert results_of(out)["benchmarks"]["test"]["result"]["avg@4"]["mean"] == 1.0
    assert "does not return this part, but only score, format" in refuse("eval", "score", str(out), "--correct", "acc")


def test_greedy_equals_transformers_generate(inputs, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder, questions = inputs
    invoke(*options(inputs, tmp_path, "--protocol", "greedy", samples=1))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    samples = read_samples(EvaluationFolder(tmp_path).completions("model", "test"), questions=6, samples=1)
    for index, row in enumerate(pandas.read_parquet(questions)["prompt"]):
        prompt = tokenizer.apply_chat_template(
            list(row), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        expected = model.generate(**prompt, do_sample=False, max_new_tokens=6)[0, prompt["input_ids"].shape[1] :]
        assert list(samples["tokens"][index]) == expected.tolist()
        assert samples["text"][index] == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_most_likely_token_alone_is_greedy(inputs, tmp_path):
    invoke(*options(inputs, tmp_path / "greedy", "--protocol", "greedy", samples=1))
    invoke(*options(inputs, tmp_path / "top", "--top-k", "1", samples=2))
    invoke(*options(inputs, tmp_path / "nucleus", "--top-p", "1e-9", samples=2))
    greedy, top, nucleus = (
        read_samples(EvaluationFolder(tmp_path / out).completions("model", "test"), questions=6, samples=k)["text"]
        for out, k in (("greedy", 1), ("top", 2), ("nucleus", 2))
    )
    assert list(top) == list(nucleus) == list(greedy.repeat(2))


def test_comparing_two_runs(inputs, whole, tmp_path):
    _, questions = inputs
    other = tmp_path / "other"
    invoke(*options((save_model(tmp_path / "model", seed=1), questions), other, samples=2))
    text = invoke("eval", "compare", str(whole), str(other), "--out", str(tmp_path / "comparison.json"))
    assert "second minus first" in text
    found = json.loads((tmp_path / "comparison.json").read_text())["benchmarks"]["test"]
    ours, theirs = (results_of(out)["benchmarks"]["test"]["result"] for out in (whole, other))
    assert (found["avg"]["first"], found["avg"]["second"]) == (ours["avg@4"]["mean"], theirs["avg@2"]["mean"])
    assert found["avg"]["difference"] == pytest.approx(theirs["avg@2"]["mean"] - ours["avg@4"]["mean"])
    assert "pass@2" in found and "pass@4" not in found and "maj@4" not in found

    fewer = tmp_path / "fewer"
    invoke(*options(inputs, fewer, "--limit", "5"))
    assert "made on different questions" in refuse("eval", "compare", str(whole), str(fewer))
    (fewer / "results.json").unlink()
    assert "not scored yet" in refuse("eval", "compare", str(whole), str(fewer))


def test_runs_judged_by_different_rules_are_not_compared(whole, tmp_path):
    other = shutil.copytree(whole, tmp_path / "other")
    invoke("eval", "score", str(other), "--correct-from", "2")
    message = refuse("eval", "compare", str(whole), str(other))
    assert "correct_from is 1.0 in" in message and "and 2.0 in" in message and "clipx eval score" in message


def test_the_protocols_of_a_whole_run(inputs, tmp_path):
    _, questions = inputs
    for step in (10, 20, 30, 40):
        actor = tmp_path / "run" / f"global_step_{step}" / "actor"
        # As with checkpoint.save_contents=[hf_model].
        save_model(actor / "huggingface", seed=step)
    run = tmp_path / "run"
    last = options((run, questions), tmp_path / "last", "--protocol", "mean-of-last-three", "--temperature", "1")
    invoke(*last)
    found = results_of(tmp_path / "last")["benchmarks"]["test"]
    assert found["from_checkpoints"] == ["global_step_20", "global_step_30", "global_step_40"]
    means = [one["avg@4"]["mean"] for one in found["checkpoints"].values()]
    assert len(set(means)) > 1 and found["result"]["avg@4"]["mean"] == pytest.approx(sum(means) / 3)

    text = invoke(*options((run, questions), tmp_path / "best", "--protocol", "best-validation"))
    assert "optimistic" in text
    found = results_of(tmp_path / "best")["benchmarks"]["test"]
    means = {label: one["avg@4"]["mean"] for label, one in found["checkpoints"].items()}
    assert len(means) == 4
    assert found["result"]["avg@4"]["mean"] == max(means.values()) == means[found["from_checkpoints"][0]]
    # A checkpoint has the same completions under either protocol: seeds do not depend on what else is evaluated.
    shared = {"global_step_20", "global_step_30", "global_step_40"}
    hashes = [results_of(tmp_path / out)["benchmarks"]["test"]["completions"] for out in ("last", "best")]
    assert {label: hashes[0][label] for label in shared} == {label: hashes[1][label] for label in shared}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--protocol", "best"], "--protocol best: must be one of greedy, sampled"),
        (["--protocol", "mean-of-last-three", "--samples", "1"], "needs 3 checkpoints"),
        (["--backend", "vllm"], "--backend vllm: vLLM is not installed"),
        (["--backend", "tpu"], "--backend tpu: must be one of vllm, cpu"),
        (["--reward", "no.such:function"], "--reward no.such:function: cannot import it"),
        (["--max-tokens", "500"], "--max-tokens 500"),
        (["--top-p", "0"], "--top-p 0.0"),
        (["--limit", "0"], "--limit 0: must be at least 1"),
        (["--limit", "-1"], "--limit -1: must be at least 1"),
        (["--protocol", "greedy", "--temperature", "0.6"], "--protocol greedy --temperature 0.6"),
        (["--temperature", "0"], "--samples 4 --temperature 0"),
    ],
)
def test_mistakes_are_named_before_anything_is_sampled(inputs, tmp_path, monkeypatch, change, message):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    assert message in refuse(*options(inputs, tmp_path / "out", *change))
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_several_benchmarks_have_samples_and_results_of_their_own(inputs, tmp_path):
    _, questions = inputs
    command = options(inputs, tmp_path, "--shard-size", "16")
    command[command.index(str(questions))] = f"first={questions}"
    command += ["--benchmark", f"second={save_questions(tmp_path / 'data', 3, seed=1)}"]
    text = invoke(*command)
    assert "first: 6 questions" in text and "second: 3 questions" in text
    found = results_of(tmp_path)["benchmarks"]
    for name, count in (("first", 6), ("second", 3)):
        samples = read_samples(EvaluationFolder(tmp_path).completions("model", name), questions=count, samples=4)
        right = samples["text"].map(len) % 2 == 0
        assert found[name]["result"]["avg@4"]["mean"] == pytest.approx(right.mean())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("--correct", "nope"), "--correct nope: the reward does not return this part, but only score, format"),
        (("--correct-from", "nan"), "--correct-from nan: must be a finite number"),
        (("--reward", "verl_clipx.papers.tasks.hitab.reward:compute_score"), "row 0: ground_truth="),
    ],
)
def test_a_rule_that_cannot_score_is_refused_before_sampling(inputs, tmp_path, rule, message):
    text = refuse(*options(inputs, tmp_path / "out", *rule))
    assert message in text
    assert not (tmp_path / "out").exists()


def test_a_rule_that_cannot_score_leaves_an_evaluation_as_it_is(whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "out")
    before = (out / "config.json").read_bytes(), (out / "results.json").read_bytes()
    assert "--correct nope" in refuse("eval", "score", str(out), "--correct", "nope")
    assert ((out / "config.json").read_bytes(), (out / "results.json").read_bytes()) == before


def test_two_benchmarks_of_one_name_are_refused(inputs, tmp_path):
    _, questions = inputs
    twice = refuse(*options(inputs, tmp_path / "out"), "--benchmark", str(questions))
    assert "two benchmarks are called test" in twice


def test_the_default_reward_is_the_conservative_one():
    reward = load_function(DEFAULT_REWARD, "--reward")
    assert reward("math500", r"\boxed{0.333333}", "1/3", {})["acc"] == 0.0
    assert reward("math500", r"\boxed{2/6}", "1/3", {})["acc"] == 1.0
