"""Seeded samples and the state of the bounds across a SIGKILL and a resume, through the real verl, with `-m matrix`.
Covers: v1 sync with `+clipx/rollout=seeded`, killed in the middle of a checkpoint. Not covered: a kill in the middle of
a step, several ranks and nodes (test_two_nodes.py), a checkpoint without a state (test_engine.py), vLLM.
"""

import shutil
import signal
import time

import psutil
import pytest

from .runs import SECONDS, check_receipt, growing_run, kill_tree, launch, output_of, train

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

SEEDED = (
    "+clipx=acpo",
    "clipx.scope=lagged",
    "trainer.save_freq=1",
    "+clipx/rollout=seeded",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.calculate_entropy=True",
    "trainer.test_freq=2",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0",
)
TOLERANCE = 1e-5
MOVING_METRICS = ("actor/ppo_kl", "actor/kl_loss", "actor/entropy", "actor/grad_norm")


def differences(first, second, steps):
    """The largest absolute difference over the steps: of the bounds, and of what the policy did under them."""
    names = [name for name in first.log if "clipx/epsilon" in name]
    names += [*MOVING_METRICS, "critic/rewards/mean", "response_length/mean"]
    return (first.log.loc[steps, names] - second.log.loc[steps, names]).abs().max()


def test_a_killed_run_leaves_no_process_and_goes_on_as_if_nothing_had_happened(task, tmp_path):
    whole = train(task, tmp_path / "whole", *SEEDED, steps=3)
    check_that_every_step_learns(whole, 3)

    folder = tmp_path / "killed"
    process = launch(task, folder, *SEEDED, steps=100)
    deadline = time.monotonic() + SECONDS
    # A checkpoint is being written, and verl has not yet named it the latest.
    third = folder / "checkpoints" / "global_step_3" / "actor"
    while not third.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_tree(process.pid)
    assert (process.wait(), third.exists()) == (-signal.SIGKILL, True), output_of(folder)[-6000:]
    killed = growing_run(folder)
    assert not [process for process in psutil.process_iter() if runs_in(folder, process)]
    assert (differences(whole, killed, [1, 2]) < TOLERANCE).all()
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"

    # Without the log of the killed run.
    again = tmp_path / "again"
    shutil.copytree(folder / "checkpoints", again / "checkpoints")
    resumed = train(task, again, *SEEDED, "trainer.resume_mode=auto", "trainer.val_before_train=True", steps=3)
    assert "Resuming from" in resumed.output
    # Step 2 is validated again; a process that goes on shows anew what it trains.
    assert list(resumed.log.index) == [2, 3]
    check_receipt(resumed, 3)
    difference = differences(whole, resumed, [3])
    assert (difference < TOLERANCE).all(), difference
    check_that_it_answers_alike(whole, resumed, 2)
    assert whole.log.loc[3, "actor/clipx/epsilon_highest"] > 0.21
    state_of_whole = whole.state(3)
    state_of_resumed = resumed.state(3)
    assert state_of_resumed["step"] == state_of_whole["step"] == 6
    for position, vector in state_of_whole["statistics"].items():
        assert state_of_resumed["statistics"][position] == pytest.approx(vector, abs=1e-3), position


def check_that_every_step_learns(run, steps):
    """Otherwise equality would mean little. The reference is the policy itself until the second update."""
    table = run.log.loc[range(1, steps + 1), list(MOVING_METRICS)]
    assert table.nunique().min() == steps and (table.abs() > 10 * TOLERANCE).all(axis=None), table


def check_that_it_answers_alike(saved, resumed, step):
    """By greedy validation."""
    (validated,) = [name for name in saved.log if name.startswith("val-core/")]
    assert resumed.log.loc[step, validated] == pytest.approx(saved.log.loc[step, validated], abs=1e-9)


def runs_in(folder, process: psutil.Process) -> bool:
    # Ray's workers rename themselves, but keep the driver's working directory.
    try:
        return process.cwd() == str(folder)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
