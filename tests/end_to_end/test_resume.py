"""Seeded samples and the state of the bounds across a SIGKILL and a resume, through the real verl, with `-m matrix`.

Covers: v1 sync with `+clipx/rollout=seeded`, where a run is a function of its seed: one that was killed in the middle
of a checkpoint goes on with the metrics, bounds and greedy answers of an uninterrupted one, and leaves no process; the
receipt of the first resumed step. Not covered: a kill in the middle of a step, several ranks and nodes
(test_two_nodes.py), a checkpoint without a state (test_engine.py), vLLM, how often rounding changes a sampled token.
"""

import shutil

import psutil
import pytest

from .runs import check_receipt, train, train_and_kill

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


def saving_step(step):
    """For `train_and_kill`: a checkpoint is being written, and verl has not yet named it the latest."""
    return lambda folder: (folder / "checkpoints" / f"global_step_{step}" / "actor").exists()


@pytest.fixture(scope="module")
def uninterrupted(task, tmp_path_factory):
    return train(task, tmp_path_factory.mktemp("uninterrupted"), *SEEDED, steps=3)


@pytest.fixture(scope="module")
def killed_in_a_save(task, tmp_path_factory):
    return train_and_kill(task, tmp_path_factory.mktemp("save"), *SEEDED, when=saving_step(3), steps=100)


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


def test_a_killed_run_goes_on_as_if_nothing_had_happened(task, uninterrupted, killed_in_a_save, tmp_path):
    checkpoints = killed_in_a_save.folder / "checkpoints"
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
    there, here = uninterrupted.state(3), resumed.state(3)
    assert here["step"] == there["step"] == 6
    for position, vector in there["statistics"].items():
        assert here["statistics"][position] == pytest.approx(vector, abs=1e-3), position


def runs_in(folder, process: psutil.Process) -> bool:
    # Ray's workers rename themselves, but keep the driver's working directory.
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
