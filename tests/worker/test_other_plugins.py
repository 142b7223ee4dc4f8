"""Beside another plugin of verl's entry-point group, loaded before this one or after it.

The other plugin is a distribution on the interpreter's path that replaces verl's TrainingWorker, as several public ones
do, or registers a loss under a name of ours. Both orders run in processes of their own. A training with both through
Ray is not run.
"""

from pathlib import Path

import pytest

WORKER = """
from verl.workers import engine_workers

class OtherWorker(engine_workers.TrainingWorker):
    def train_batch(self, data):
        print("other acts")
        return super().train_batch(data)

REBINDING
"""
BOTH_NAMES = "engine_workers.TrainingWorker = engine_workers.ActorRolloutRefWorker.actor_worker_cls = OtherWorker"
ONLY_THE_ACTORS = "engine_workers.ActorRolloutRefWorker.actor_worker_cls = OtherWorker"
LOSS = """
from verl.trainer.ppo.core_algos import register_policy_loss

@register_policy_loss("clipx_acpo")
def other_loss(**_):
    raise AssertionError
"""
IMPORTS = """
import verl
from verl.workers.engine_workers import ActorRolloutRefWorker
print("worker", [kind.__name__ for kind in ActorRolloutRefWorker.actor_worker_cls.__mro__])
from verl.trainer.ppo.core_algos import get_policy_loss_fn
print("loss", get_policy_loss_fn("clipx_acpo"))
"""
LAUNCH = """
from hydra import compose, initialize_config_module
from verl.utils.device import auto_set_device
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", ["+clipx=acpo"])
auto_set_device(config)
"""
PLACES = {"first": "insert(0, {!r})", "last": "append({!r})"}


def program(place: str, folder: Path) -> str:
    """Imports verl where the other plugin comes first or last on the path."""
    return f"import sys\nsys.path.{PLACES[place].format(str(folder))}\n{IMPORTS}"


def install_other(folder: Path, code: str) -> None:
    """Writes a distribution with one module and an entry point in verl's group into a folder."""
    (folder / "other_plugin.py").write_text(code)
    metadata = folder / "other_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nother = other_plugin\n")


@pytest.mark.slow
@pytest.mark.parametrize(("place", "rebinding"), [("first", ONLY_THE_ACTORS), ("last", BOTH_NAMES)])
def test_another_plugins_worker_and_ours_act_together(run_fresh, tmp_path, place, rebinding):
    install_other(tmp_path, WORKER.replace("REBINDING", rebinding))
    done = run_fresh(program(place, tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    (workers,) = [line for line in done.stdout.splitlines() if line.startswith("worker")]
    assert "ClipxTraining" in workers and "OtherWorker" in workers
    assert "loss functools.partial(<function policy_loss" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_under_a_name_of_ours_is_refused_by_both_names(run_fresh, tmp_path, place):
    install_other(tmp_path, LOSS)
    done = run_fresh(program(place, tmp_path) + LAUNCH, tmp_path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert "RuntimeError" in message and "'clipx_acpo'" in message and "other_plugin" in message
