"""A round of `clipx eval` around a run of the real verl: its policy before and after, scored again, compared."""

import json
import math
from pathlib import Path

import pandas
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app

from .conftest import Task
from .runs import Run

SAMPLES = 8
VALIDATION_SAMPLES = 4
MAX_TOKENS = 24
# Validation with as many samples as the check compares.
VALIDATION = (
    f"actor_rollout_ref.rollout.val_kwargs.n={VALIDATION_SAMPLES}",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)


def clipx(*arguments) -> str:
    """Runs the command; what it printed."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def evaluate(model, questions, out):
    """Runs `clipx eval run`; its results on the only benchmark and its printed table."""
    printed = clipx(
        *("eval", "run", model, "--benchmark", questions, "--out", out, "--backend", "cpu"),
        *("--max-tokens", MAX_TOKENS, "--samples", SAMPLES),
    )
    return json.loads((out / "results.json").read_text())["benchmarks"]["test"], printed


def check_numbers(found, accuracies, questions):
    """Results are in their ranges and say what the scores of the completions say.

    Args:
        found: of one benchmark in results.json.
        accuracies: its scores' part `acc`, a row a question.
        questions: of the benchmark.
    """
    assert found["questions"] == questions and accuracies.shape == (questions, SAMPLES)
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


def check_evaluation(given: Task, run: Run, name: str, step: int, folder: Path) -> dict:
    """Evaluates the policy before a run and its checkpoint, and checks every number against another way to get it.

    Args:
        given: what the run read.
        run: with `VALIDATION`, validated and saved in the step.
        name: of the task, as verl's metrics have it.
        step: of the checkpoint.
        folder: where the evaluations are written.

    Returns:
        What `clipx eval compare` writes of the benchmark.
    """
    checkpoint = f"global_step_{step}"
    questions = len(pandas.read_parquet(given.test))
    base, trained = folder / "base", folder / "trained"
    before, _ = evaluate(given.policy, given.test, base)
    after, printed = evaluate(run.folder / "checkpoints" / checkpoint, given.test, trained)
    assert "avg@8" in printed and f"{questions} questions, sampled" in printed
    assert (run.folder / "checkpoints" / checkpoint / "actor" / "merged_huggingface" / "config.json").is_file()
    accuracies = accuracies_of(trained, checkpoint)
    check_numbers(before, accuracies_of(base, given.policy.name), questions)
    check_numbers(after, accuracies, questions)

    # verl validated the weights that it saved. The questions are the same, so only sampling makes the two differ.
    validated = run.log.loc[step, f"val-core/{name}/acc/mean@{VALIDATION_SAMPLES}"]
    variance = accuracies.var(axis=1, ddof=1).mean() / questions * (1 / SAMPLES + 1 / VALIDATION_SAMPLES)
    assert abs(after["result"]["avg@8"]["mean"] - validated) <= 4 * math.sqrt(variance)

    stored = json.loads((trained / "results.json").read_text())
    (trained / "results.json").unlink()
    (trained / checkpoint / "test" / "scores.parquet").unlink()
    clipx("eval", "score", trained)
    assert json.loads((trained / "results.json").read_text()) == stored

    table = clipx("eval", "compare", base, trained, "--out", folder / "comparison.json")
    assert "test: second minus first" in table and "reward/score" in table
    comparison = json.loads((folder / "comparison.json").read_text())["benchmarks"]["test"]
    assert comparison["avg"]["first"] == pytest.approx(before["result"]["avg@8"]["mean"])
    assert comparison["avg"]["second"] == pytest.approx(after["result"]["avg@8"]["mean"])
    return comparison
