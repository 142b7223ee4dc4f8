"""+clipx/rollout=seeded through the real verl: a run is a function of its seed, also across a kill and a resume.

Covers: v1 sync with one rank, two updates a step, against two runs without the group; SIGKILL of the driver, Ray and
all workers in the middle of a step; resuming from the last checkpoint. Not covered: vLLM, several rollout servers, and
how often rounding changes a sampled token.
"""

import shutil

import psutil
import pytest

from .runs import step_is_logged, train, train_and_kill

pytestmark = pytest.mark.end_to_end

COMMON = ("+clipx=grpo", "actor_rollout_ref.actor.calculate_entropy=True")
SEEDED = (*COMMON, "+clipx/rollout=seeded", "trainer.save_freq=2")
MOVING = ["actor/ppo_kl", "actor/entropy", "actor/grad_norm"]
COMPARED = [*MOVING, "critic/rewards/mean", "response_length/mean"]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def uninterrupted(task, tmp_path_factory):
    """Three seeded steps in one go."""
    return train(task, tmp_path_factory.mktemp("uninterrupted"), *SEEDED, steps=3)


@pytest.fixture(scope="module")
def killed(task, tmp_path_factory):
    """The same run, killed in the middle of step 3, after the checkpoint of step 2."""
    return train_and_kill(task, tmp_path_factory.mktemp("killed"), *SEEDED, when=step_is_logged(2), steps=100)


def differences(first, second, steps):
    """The largest absolute difference of every compared metric over the steps."""
    return (first.log.loc[steps, COMPARED] - second.log.loc[steps, COMPARED]).abs().max()


def test_two_runs_are_equal_step_by_step(uninterrupted, killed):
    assert (differences(uninterrupted, killed, [1, 2]) < TOLERANCE).all()


def test_every_step_learns_and_has_its_own_metrics(uninterrupted):
    # Otherwise equality would mean little.
    table = uninterrupted.log.loc[[1, 2, 3], MOVING]
    assert table.nunique().min() == 3
    assert (table.abs() > 10 * TOLERANCE).all(axis=None), table


def test_without_the_group_two_runs_differ(task, tmp_path):
    first, second = (train(task, tmp_path / name, *COMMON, steps=2) for name in ("first", "second"))
    changed = differences(first, second, [1, 2])
    assert (changed[MOVING] > 10 * TOLERANCE).all(), changed


def test_a_killed_run_continues_as_if_nothing_had_happened(task, uninterrupted, killed, tmp_path):
    checkpoints = killed.folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not [process for process in psutil.process_iter() if runs_in(killed.folder, process)]
    # A copy, so that this test does not change what the others read.
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    resumed = train(task, tmp_path, *SEEDED, "trainer.resume_mode=auto", steps=3)
    assert "Resuming from" in resumed.output
    assert list(resumed.log.index) == [3]
    assert (differences(uninterrupted, resumed, [3]) < TOLERANCE).all()


def runs_in(folder, process: psutil.Process) -> bool:
    # Ray's workers rename themselves, but keep the driver's working directory.
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
