"""A researcher's round on two tasks: data, warm start, training through the real verl, `clipx papers eval` before and
after.

Covers that knights and knaves' recipe trains a batch, in one process; with `-m matrix`: knights and knaves, and
Countdown, with their real rewards; that training helps. Not covered: two ranks (test_training.py), how far longer
training goes (docs/evaluation.md and docs/tasks have measured runs), GPUs, vLLM.
"""

import json

import pytest

from tests.analysis.runs.commands import clipx
from tests.recipes.shell import RECIPES, ROOT, Machine
from verl_clipx.papers.tasks.knights_and_knaves.policy import draw_training_puzzles, fit_policy
from verl_clipx.papers.tasks.tiny_policy.warm_start import WarmStartConfig

from .conftest import Task
from .evaluation_round import VALIDATION, check_both_ways, evaluate
from .runs import train

pytestmark = pytest.mark.end_to_end

STEPS = 8
QUESTIONS = 128


@pytest.fixture(scope="session")
def countdown(task, tmp_path_factory) -> Task:
    """Problems, and the policy of the other end-to-end runs."""
    folder = tmp_path_factory.mktemp("countdown")
    clipx("papers", "data", "build", "countdown", "--out", folder, "--option", "size=512", "--split", "train")
    clipx("papers", "data", "build", "countdown", "--out", folder, "--option", f"size={QUESTIONS}", "--split", "test")
    return Task(folder / "train.parquet", folder / "test.parquet", task.policy)


@pytest.fixture(scope="session")
def knights_and_knaves(tmp_path_factory) -> Task:
    """The small puzzles and a policy that has learnt to answer, but hardly to solve."""
    folder = tmp_path_factory.mktemp("knights_and_knaves")
    clipx("papers", "data", "build", "knights_and_knaves_tiny", "--out", folder)
    fit = WarmStartConfig(steps=150)
    policy = fit_policy(draw_training_puzzles(6000, seed=0), 0.3, fit, folder / "policies", num_threads=1)
    return Task(folder / "train.parquet", folder / "test.parquet", policy)


TRAIN_IN_THIS_PROCESS = """
import os, runpy, sys
os.environ["VERL_FILE_LOGGER_PATH"] = {log!r}
sys.argv[1:] = {overrides!r}
runpy.run_module("tests.end_to_end.in_one_process", run_name="__main__")
"""


def test_the_recipe_of_knights_and_knaves_trains_a_batch(run_fresh, tmp_path):
    clipx("papers", "data", "build", "knights_and_knaves_tiny", "--out", tmp_path)
    policy = fit_policy(
        draw_training_puzzles(100, seed=0), 0.3, WarmStartConfig(steps=5), tmp_path / "policies", num_threads=1
    )
    files = {"TRAIN_FILE": f"{tmp_path}/train.parquet", "TEST_FILE": f"{tmp_path}/test.parquet"}
    smallest = {"TOTAL_STEPS": "1", "SAVE_FREQ": "-1", "TEST_FREQ": "-1", "RUN_FOLDER": f"{tmp_path}/run"}
    machine = Machine(tmp_path / "machine", python3="")
    script = RECIPES / "quickstart/run_knights_and_knaves_tiny_cpu.sh"
    launched = machine.run(
        script, "trainer.val_before_train=False", METHOD="acpo", MODEL_PATH=str(policy), **files, **smallest
    )
    assert launched.returncode == 0, launched.stderr
    (call,) = machine.calls
    assert call[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    log = tmp_path / "metrics.jsonl"
    result = run_fresh(TRAIN_IN_THIS_PROCESS.format(log=str(log), overrides=call[3:]), ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    (step,) = map(json.loads, log.read_text().splitlines())
    assert step["step"] == 1 and -3 <= step["data"]["critic/score/mean"] <= 3
    assert "clipx_acpo" in result.stdout + result.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["knights_and_knaves", "countdown"])
def test_training_raises_the_score_of_the_evaluation(name, request, tmp_path):
    task = request.getfixturevalue(name)
    run = train(
        task,
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
    trained = check_both_ways(task, run, name, STEPS, tmp_path)
    evaluate(task.policy, task.test, tmp_path / "base")
    clipx("papers", "eval", "compare", tmp_path / "base", trained, "--out", tmp_path / "comparison.json")
    comparison = json.loads((tmp_path / "comparison.json").read_text())["benchmarks"]["test"]
    assert comparison["reward/score"]["low"] > 0, "training undoes the habit that the warm start taught"
