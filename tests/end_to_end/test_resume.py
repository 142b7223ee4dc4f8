"""Seeded samples and the state of the bounds across a SIGKILL and a resume, through the real verl.

Part of `-m matrix`: test_two_nodes.py loses a node in the middle of a step and resumes, test_engine.py has the worker's
part of a checkpoint without a state. Covers: v1 sync with `+clipx/rollout=seeded`, where a run is a function of its
seed: one that was killed in the middle of a checkpoint or a step goes on with the metrics, bounds and greedy answers of
an uninterrupted one; saved and resumed in colocate_async on 2 ranks; a launch whose checkpoint lacks the state; the
receipt of the first resumed step; that without the group two runs differ. Not covered: several nodes, vLLM, how often
rounding changes a sampled token.
"""

import json
import shutil

import psutil
import pytest
import torch

from verl_clipx.methods import METHODS

from .runs import SECONDS, check_receipt, launch, output_of, step_is_logged, train, train_and_kill

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

COMMON = ("+clipx=acpo", "clipx.scope=lagged", "clipx.lagged_average=0.5", "trainer.save_freq=1")
SEEDED = (
    *COMMON,
    "+clipx/rollout=seeded",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.calculate_entropy=True",
    "trainer.test_freq=2",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
)
TOLERANCE = 1e-5
MOVING = ("actor/ppo_kl", "actor/kl_loss", "actor/entropy", "actor/grad_norm")


def saved_state(folder, step):
    path = folder / "checkpoints" / f"global_step_{step}" / "actor" / "clipx_state.json"
    return json.loads(path.read_text())


def saving_step(step):
    """For `train_and_kill`: a checkpoint is being written, and verl has not yet named it the latest."""
    return lambda folder: (folder / "checkpoints" / f"global_step_{step}" / "actor").exists()


@pytest.fixture(scope="module")
def uninterrupted(task, tmp_path_factory):
    return train(task, tmp_path_factory.mktemp("uninterrupted"), *SEEDED, steps=3)


@pytest.fixture(scope="module")
def killed_in_a_save(task, tmp_path_factory):
    return train_and_kill(task, tmp_path_factory.mktemp("save"), *SEEDED, when=saving_step(3), steps=100)


@pytest.fixture(scope="module")
def killed_in_a_step(task, tmp_path_factory):
    return train_and_kill(task, tmp_path_factory.mktemp("step"), *SEEDED, when=step_is_logged(2), steps=100)


def differences(first, second, steps):
    """The largest absolute difference over the steps: of the bounds, and of what the policy did under them."""
    names = [name for name in first.log if "clipx/epsilon" in name or "clipx/sigma" in name]
    names += [*MOVING, "critic/rewards/mean", "response_length/mean"]
    return (first.log.loc[steps, names] - second.log.loc[steps, names]).abs().max()


def test_two_runs_are_equal_step_by_step(uninterrupted, killed_in_a_save):
    assert (differences(uninterrupted, killed_in_a_save, [1, 2]) < TOLERANCE).all()


def test_every_step_learns_and_has_its_own_metrics(uninterrupted):
    # Otherwise equality would mean little.
    table = uninterrupted.log.loc[[1, 2, 3], list(MOVING)]
    assert table.nunique().min() == 3
    # The reference is the policy itself until the second update.
    assert (table.abs() > 10 * TOLERANCE).all(axis=None), table


def test_a_killed_run_leaves_no_process(killed_in_a_save):
    assert not [process for process in psutil.process_iter() if runs_in(killed_in_a_save.folder, process)]


@pytest.mark.parametrize("interrupted", ["killed_in_a_save", "killed_in_a_step"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(task, uninterrupted, interrupted, request, tmp_path):
    killed = request.getfixturevalue(interrupted)
    checkpoints = killed.folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    # A copy, so that this test does not change what the others read.
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    resumed = train(task, tmp_path, *SEEDED, "trainer.resume_mode=auto", "trainer.val_before_train=True", steps=3)
    assert "Resuming from" in resumed.output
    # Step 2 is validated again; a process that goes on shows anew what it trains.
    assert list(resumed.log.index) == [2, 3]
    check_receipt(resumed, 3)
    difference = differences(uninterrupted, resumed, [3])
    assert (difference < TOLERANCE).all(), difference
    (validated,) = [name for name in uninterrupted.log if name.startswith("val-core/")]
    # Greedy validation: the resumed policy answers as the saved one did.
    assert resumed.log.loc[2, validated] == pytest.approx(uninterrupted.log.loc[2, validated], abs=1e-9)
    assert uninterrupted.log.loc[3, "actor/clipx/epsilon_highest"] > 0.21
    there, here = saved_state(uninterrupted.folder, 3), saved_state(tmp_path, 3)
    assert here["step"] == there["step"] == 6
    for position, vector in there["statistics"].items():
        assert here["statistics"][position] == pytest.approx(vector, abs=1e-3), position


def check_bounds_follow_the_state(run, state):
    """The bounds of step 3 are those of the statistics in the file: no forward pass and no other history."""
    acpo = METHODS["acpo"]()
    decisions = [
        acpo.decide(torch.tensor(state["statistics"][name], dtype=torch.float64)) for name in ("update_0", "update_1")
    ]
    for index in range(5):
        expected = sum(float(decision[5 + index]) for decision in decisions) / 2
        assert run.log.loc[3, f"actor/clipx/epsilon/bin_{index}"] == pytest.approx(expected, rel=1e-9)
    assert saved_state(run.folder, 3)["step"] == 6


def test_an_asynchronous_run_loads_the_state_that_it_saved(task, tmp_path):
    overrides = (*COMMON, "trainer.v1.trainer_mode=colocate_async", "trainer.n_gpus_per_node=2")
    train(task, tmp_path, *overrides, steps=2)
    saved = saved_state(tmp_path, 2)
    resumed = train(task, tmp_path, *overrides, "trainer.resume_mode=auto", steps=3)
    # In one folder: the log goes on too.
    assert list(resumed.log.index) == [1, 2, 3]
    check_receipt(resumed, 1, 3)
    check_bounds_follow_the_state(resumed, saved)


def test_a_checkpoint_without_a_state_needs_a_word(task, killed_in_a_step, tmp_path):
    shutil.copytree(killed_in_a_step.folder / "checkpoints", tmp_path / "checkpoints")
    state = tmp_path / "checkpoints" / "global_step_2" / "actor" / "clipx_state.json"
    state.write_text(state.read_text()[:100])
    resume = (*SEEDED, "trainer.resume_mode=auto")
    process = launch(task, tmp_path, *resume, steps=3)
    assert process.wait(timeout=SECONDS) != 0
    output = output_of(tmp_path)
    assert "is cut short or not a state of this plugin" in output
    assert "To start the bounds afresh, set clipx.missing_state=fresh" in output
    run = train(task, tmp_path, *resume, "clipx.missing_state=fresh", steps=3)
    assert run.log.loc[3, "actor/clipx/epsilon_highest"] == pytest.approx(0.2, abs=1e-9)


def test_without_the_group_two_runs_differ(task, tmp_path):
    common = ("+clipx=grpo", "actor_rollout_ref.actor.calculate_entropy=True")
    first, second = (train(task, tmp_path / name, *common, steps=2) for name in ("first", "second"))
    names = ["actor/ppo_kl", "actor/entropy", "actor/grad_norm"]
    changed = (first.log[names] - second.log[names]).abs().max()
    assert (changed > 10 * TOLERANCE).all(), changed


def runs_in(folder, process: psutil.Process) -> bool:
    # Ray's workers rename themselves, but keep the driver's working directory.
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
