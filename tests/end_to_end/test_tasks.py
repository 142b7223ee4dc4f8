"""A researcher's round on two tasks: data, warm start, training through the real verl, `clipx eval` before and after.
Covers, with `-m matrix`: knights and knaves, and Countdown, with their real rewards; that training helps. Not covered:
two ranks (test_training.py), how far longer training goes (docs/dev/evaluation.md and docs/tasks have measured runs),
GPUs, vLLM.
"""

import json

import pytest

from tests.analysis.runs.commands import clipx
from verl_clipx.papers.tasks.knights_and_knaves.policy import draw_training_puzzles, fit_policy
from verl_clipx.papers.tasks.tiny_policy.warm_start import WarmStartConfig

from .conftest import Task
from .evaluation_round import VALIDATION, check_both_ways, evaluate
from .runs import train

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

STEPS = 8
QUESTIONS = 128


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


@pytest.mark.parametrize("name", ["knights_and_knaves", "countdown"])
def test_train_then_evaluate(name, request, tmp_path):
    given = request.getfixturevalue(name)
    run = train(
        given,
        tmp_path / "run",
        "+clipx=grpo",
        f"reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.{name}.reward",
        "+clipx/rollout=seeded",
        "actor_rollout_ref.actor.optim.lr=2e-4",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
        *VALIDATION,
        f"trainer.test_freq={STEPS}",
        f"trainer.save_freq={STEPS}",
        steps=STEPS,
    )
    trained = check_both_ways(given, run, name, STEPS, tmp_path)
    evaluate(given.policy, given.test, tmp_path / "base")
    clipx("eval", "compare", tmp_path / "base", trained, "--out", tmp_path / "comparison.json")
    comparison = json.loads((tmp_path / "comparison.json").read_text())["benchmarks"]["test"]
    assert comparison["reward/score"]["low"] > 0, "training undoes the habit that the warm start taught"
