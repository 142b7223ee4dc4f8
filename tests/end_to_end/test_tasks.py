"""A researcher's round on two tasks: data, warm start, training through the real verl, `clipx eval` before and after.

Covers: knights and knaves, with `-m matrix` also Countdown, with their real rewards; verl's FSDP checkpoint merged and
evaluated; the numbers against verl's own validation of the same weights; scoring again; the comparison. Not covered:
how far longer training goes (docs/evaluation.md and docs/tasks have measured runs), GPUs, vLLM.
"""

import json
import math

import pandas
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.tasks.knights_and_knaves.policy import draw_training_puzzles, fit_policy
from verl_clipx.tasks.tiny_policy.warm_start import WarmStartConfig

from .conftest import Task
from .runs import train

pytestmark = pytest.mark.end_to_end

STEPS = 8
QUESTIONS = 128
SAMPLES = 8
VALIDATION_SAMPLES = 4
MAX_TOKENS = 24


def clipx(*arguments) -> str:
    """Runs the command; what it printed."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="session")
def countdown(task, tmp_path_factory) -> Task:
    """Problems, and the policy of the other end-to-end runs."""
    folder = tmp_path_factory.mktemp("countdown")
    clipx("data", "build", "countdown", "--out", folder, "--option", "size=512", "--split", "train")
    clipx("data", "build", "countdown", "--out", folder, "--option", f"size={QUESTIONS}", "--split", "test")
    return Task(folder / "train.parquet", folder / "test.parquet", task.policy)


@pytest.fixture(scope="session")
def knights_and_knaves(tmp_path_factory) -> Task:
    """The small puzzles and a policy that has learnt to answer, but hardly to solve."""
    folder = tmp_path_factory.mktemp("knights_and_knaves")
    clipx("data", "build", "knights_and_knaves_tiny", "--out", folder)
    fit = WarmStartConfig(steps=150)
    policy = fit_policy(draw_training_puzzles(6000, seed=0), 0.3, fit, folder / "policies", num_threads=1)
    return Task(folder / "train.parquet", folder / "test.parquet", policy)


def evaluate(model, questions, out):
    """Runs `clipx eval run`; its results on the only benchmark and its printed table."""
    printed = clipx(
        *("eval", "run", model, "--benchmark", questions, "--out", out, "--backend", "cpu"),
        *("--max-tokens", MAX_TOKENS, "--samples", SAMPLES),
    )
    return json.loads((out / "results.json").read_text())["benchmarks"]["test"], printed


def check_numbers(found, accuracies):
    """Results are in their ranges and say what the scores of the completions say.

    Args:
        found: of one benchmark in results.json.
        accuracies: its scores' part `acc`, a row a question.
    """
    assert found["questions"] == QUESTIONS and accuracies.shape == (QUESTIONS, SAMPLES)
    result = found["result"]
    assert result["avg@8"]["mean"] == pytest.approx(accuracies.mean(), abs=1e-12)
    assert result["pass@8"]["mean"] == pytest.approx(accuracies.any(axis=1).mean(), abs=1e-12)
    assert result["pass@1"] == pytest.approx(result["avg@8"])
    for metric, one in result.items():
        # Scores that are all alike have no interval.
        assert one["low"] is None or one["low"] <= one["mean"] <= one["high"], metric
    assert result["avg@8"]["low"] < result["avg@8"]["high"]
    for metric in ("avg@8", "pass@2", "pass@4", "pass@8", "maj@8", "truncated", "format"):
        assert 0 <= result[metric]["mean"] <= 1, metric
    assert 1 <= result["length"]["mean"] <= MAX_TOKENS


def accuracies_of(out, checkpoint):
    scores = pandas.read_parquet(out / checkpoint / "test" / "scores.parquet")
    return scores["reward/acc"].to_numpy().reshape(-1, SAMPLES)


@pytest.mark.parametrize("name", ["knights_and_knaves", pytest.param("countdown", marks=pytest.mark.matrix)])
def test_train_then_evaluate(name, request, tmp_path):
    given = request.getfixturevalue(name)
    run = train(
        given,
        tmp_path / "run",
        "+clipx=grpo",
        f"reward.custom_reward_function.path=pkg://verl_clipx.tasks.{name}.reward",
        "+clipx/rollout=seeded",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        f"actor_rollout_ref.rollout.val_kwargs.n={VALIDATION_SAMPLES}",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"trainer.test_freq={STEPS}",
        f"trainer.save_freq={STEPS}",
        steps=STEPS,
    )
    checkpoint = f"global_step_{STEPS}"
    base, trained = tmp_path / "base", tmp_path / "trained"
    before, _ = evaluate(given.policy, given.test, base)
    after, printed = evaluate(run.folder / "checkpoints", given.test, trained)
    assert "avg@8" in printed and f"{QUESTIONS} questions, sampled" in printed
    assert (run.folder / "checkpoints" / checkpoint / "actor" / "merged_huggingface" / "config.json").is_file()
    accuracies = accuracies_of(trained, checkpoint)
    check_numbers(before, accuracies_of(base, given.policy.name))
    check_numbers(after, accuracies)

    # verl validated the weights that it saved. The questions are the same, so only sampling makes the two differ.
    validated = run.log.loc[STEPS, f"val-core/{name}/acc/mean@{VALIDATION_SAMPLES}"]
    variance = accuracies.var(axis=1, ddof=1).mean() / QUESTIONS * (1 / SAMPLES + 1 / VALIDATION_SAMPLES)
    assert abs(after["result"]["avg@8"]["mean"] - validated) <= 4 * math.sqrt(variance)

    stored = json.loads((trained / "results.json").read_text())
    (trained / "results.json").unlink()
    (trained / checkpoint / "test" / "scores.parquet").unlink()
    clipx("eval", "score", trained)
    assert json.loads((trained / "results.json").read_text()) == stored

    table = clipx("eval", "compare", base, trained, "--out", tmp_path / "comparison.json")
    assert "test: second minus first" in table and "reward/score" in table
    comparison = json.loads((tmp_path / "comparison.json").read_text())["benchmarks"]["test"]
    assert comparison["avg"]["first"] == pytest.approx(before["result"]["avg@8"]["mean"])
    assert comparison["avg"]["second"] == pytest.approx(after["result"]["avg@8"]["mean"])
    assert comparison["reward/score"]["low"] > 0, "training undoes the habit that the warm start taught"
