"""A round of `clipx papers eval` around a run of the real verl: its checkpoint sampled, scored, compared."""

import json
import math
import shutil
from pathlib import Path

import pandas

from tests.analysis.runs.commands import clipx
from verl_clipx.papers.evaluation.folder import read_completions

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


def evaluate(model, questions, out, *overrides) -> dict:
    """Run `clipx papers eval run`; its results on the only benchmark."""
    options = ("--benchmark", questions, "--out", out, "--max-tokens", MAX_TOKENS, "--samples", SAMPLES)
    printed = clipx("papers", "eval", "run", model, "+hardware=cpu", *overrides, *options)
    results = json.loads((out / "results.json").read_text())["benchmarks"]["test"]
    assert f"{results['questions']} questions, sampled" in printed and "avg@8" in printed
    return results


def check_evaluation(task: Task, run: Run, name: str, step: int, folder: Path, *base: str) -> None:
    """Evaluates a run's checkpoint, whose accuracy must be that of the run's validation; arguments as for
    `check_both_ways`. Merged, unless `base` says how to load its shards: by model and ranks.
    """
    checkpoint = run.folder / "checkpoints" / f"global_step_{step}"
    questions = len(pandas.read_parquet(task.test))
    scores = folder / checkpoint.name / "test" / "scores.parquet"
    results = evaluate(checkpoint, task.test, folder, *base)
    assert bool(base) != (checkpoint / "actor" / "merged_huggingface" / "config.json").is_file()
    accuracies = pandas.read_parquet(scores)["reward/acc"].to_numpy().reshape(-1, SAMPLES)
    assert results["questions"] == len(accuracies) == questions
    # It validated and did not train.
    (log,) = folder.glob(f"{checkpoint.name}/test/completions/seed-0/000000/run.log")
    assert "Initial validation metrics" in log.read_text() and "actor/pg_loss" not in log.read_text()

    # verl validated the weights that it saved. The questions are the same, so only sampling makes the two differ.
    validated = run.log.loc[step, f"val-core/{name}/acc/mean@{VALIDATION_SAMPLES}"]
    variance = accuracies.var(axis=1, ddof=1).mean() / questions * (1 / SAMPLES + 1 / VALIDATION_SAMPLES)
    assert abs(results["result"]["avg@8"]["mean"] - validated) <= 4 * math.sqrt(variance)


def check_both_ways(task: Task, run: Run, name: str, step: int, folder: Path, ranks: int = 1) -> Path:
    """Checks the evaluation of a run's checkpoint by its shards and merged; returns the folder of the one by shards.

    The run has validated, with `VALIDATION`, and saved in the step; `name` is the task's in verl's metrics. One rank
    and the merged weights, rounded to bfloat16: the same seeds give nearly the same texts.
    """
    base = (f"trainer.n_gpus_per_node={ranks}", f"actor_rollout_ref.model.path={task.policy}")
    by_shards = folder / "shards"
    merged = folder / "merged"
    # A merged checkpoint stays merged.
    shutil.rmtree(run.folder / f"checkpoints/global_step_{step}/actor/merged_huggingface", ignore_errors=True)
    check_evaluation(task, run, name, step, by_shards, *base)
    check_evaluation(task, run, name, step, merged)
    questions = len(pandas.read_parquet(task.test))
    completions = f"global_step_{step}/test/completions/seed-0"
    texts_by_shards = read_completions([by_shards / completions], questions, SAMPLES)["text"]
    texts_merged = read_completions([merged / completions], questions, SAMPLES)["text"]
    assert (texts_by_shards == texts_merged).mean() > 0.8 and texts_by_shards.nunique() > SAMPLES
    assert "test: second minus first" in clipx("papers", "eval", "compare", merged, by_shards)
    return by_shards
