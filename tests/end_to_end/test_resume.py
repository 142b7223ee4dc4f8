"""The state of the bounds across a SIGKILL and a resume, through the real verl.

Covers: v1 sync with seeded samples: killed in the middle of a step and of a checkpoint, the resumed run has the metrics
and bounds of an uninterrupted one; colocate_async loads the saved state and goes on from it; a checkpoint without a
state stops with an error, or starts afresh when asked to. Not covered: several nodes.
"""

import json
import shutil

import pytest
import torch

from verl_clipx.controllers.acpo import AcpoController

from .runs import SECONDS, launch, output_of, step_is_logged, train, train_and_kill

pytestmark = pytest.mark.end_to_end

COMMON = ("+clipx=acpo", "clipx.scope=lagged", "clipx.lagged_average=0.5", "trainer.save_freq=1")
SEEDED = (*COMMON, "+clipx/rollout=seeded")
TOLERANCE = 1e-5


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
def killed_in_a_step(task, tmp_path_factory):
    return train_and_kill(task, tmp_path_factory.mktemp("step"), *SEEDED, when=step_is_logged(2), steps=100)


@pytest.fixture(scope="module")
def killed_in_a_save(task, tmp_path_factory):
    return train_and_kill(task, tmp_path_factory.mktemp("save"), *SEEDED, when=saving_step(2), steps=100)


def compared(run):
    """What has to be equal: the bounds and what the policy did under them."""
    names = [name for name in run.log if "clipx/epsilon" in name or "clipx/sigma" in name]
    return run.log[[*names, "actor/ppo_kl", "actor/grad_norm", "critic/rewards/mean"]]


@pytest.mark.parametrize(("interrupted", "from_step"), [("killed_in_a_step", 2), ("killed_in_a_save", 1)])
def test_a_killed_run_goes_on_with_the_same_bounds(task, uninterrupted, interrupted, from_step, request, tmp_path):
    killed = request.getfixturevalue(interrupted)
    checkpoints = killed.folder / "checkpoints"
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == str(from_step)
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    resumed = train(task, tmp_path, *SEEDED, "trainer.resume_mode=auto", steps=3)
    steps = list(range(from_step + 1, 4))
    assert list(resumed.log.index) == steps
    difference = (compared(uninterrupted).loc[steps] - compared(resumed).loc[steps]).abs().max()
    assert (difference < TOLERANCE).all(), difference
    assert uninterrupted.log.loc[3, "actor/clipx/epsilon_highest"] > 0.21
    there, here = saved_state(uninterrupted.folder, 3), saved_state(tmp_path, 3)
    assert here["step"] == there["step"] == 6
    for position, vector in there["statistics"].items():
        assert here["statistics"][position] == pytest.approx(vector, abs=1e-3), position


def test_an_asynchronous_run_loads_the_state_that_it_saved(task, tmp_path):
    overrides = (*COMMON, "trainer.v1.trainer_mode=colocate_async", "trainer.n_gpus_per_node=2")
    train(task, tmp_path, *overrides, steps=2)
    saved = saved_state(tmp_path, 2)
    resumed = train(task, tmp_path, *overrides, "trainer.resume_mode=auto", steps=3)
    assert list(resumed.log.index) == [3]
    # The bounds of step 3 are those of the statistics in the file: no forward pass and no other history.
    controller = AcpoController()
    decisions = [
        controller.decide(torch.tensor(saved["statistics"][name], dtype=torch.float64))
        for name in ("update_0", "update_1")
    ]
    for index in range(5):
        expected = sum(float(decision[5 + index]) for decision in decisions) / 2
        assert resumed.log.loc[3, f"actor/clipx/epsilon/bin_{index}"] == pytest.approx(expected, rel=1e-9)
    assert saved_state(tmp_path, 3)["step"] == 6


def test_a_checkpoint_without_a_state_needs_a_word(task, killed_in_a_step, tmp_path):
    shutil.copytree(killed_in_a_step.folder / "checkpoints", tmp_path / "checkpoints")
    state = tmp_path / "checkpoints" / "global_step_2" / "actor" / "clipx_state.json"
    state.write_text(state.read_text()[:100])
    resume = (*SEEDED, "trainer.resume_mode=auto")
    process = launch(task, tmp_path, *resume, steps=3)
    assert process.wait(timeout=SECONDS) != 0
    output = output_of(tmp_path)
    assert "is cut short or not a state of this plugin" in output
    assert "To start the bounds afresh: clipx.missing_state=fresh" in output
    run = train(task, tmp_path, *resume, "clipx.missing_state=fresh", steps=3)
    assert run.log.loc[3, "actor/clipx/epsilon_highest"] == pytest.approx(0.2, abs=1e-9)
