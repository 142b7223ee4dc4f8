"""verl's files of validations: whole when they have their name, and before their step is logged.

Covers: both of verl's trainers, by the methods that write samples down; a write that fails in the middle. Kills are in
test_kills.py. Not covered: a run (tests/end_to_end).
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

TRAINERS = pytest.mark.parametrize("trainer", [PPOTrainer, RayPPOTrainer])


@TRAINERS
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(trainer, tmp_path):
    trainer._write_generations(["a"], ["b"], ["c"], [1.0], {}, str(tmp_path), 3)
    # The second score is missing: verl fails after the first line.
    with pytest.raises(IndexError):
        trainer._write_generations(
            ["a", "a"], ["b", "b"], ["c", "c"], [2.0], {}, dump_path=str(tmp_path), global_steps=3
        )
    (file,) = tmp_path.iterdir()
    assert file.name == "3.jsonl" and json.loads(file.read_text())["score"] == 1.0


@TRAINERS
@pytest.mark.parametrize("folder", ["validation", "rollouts"])
def test_a_validation_is_on_the_disk_before_its_step_is_logged(trainer, tmp_path, folder, monkeypatch):
    config = OmegaConf.create({"trainer": {"validation_data_dir": str(tmp_path / "validation")}})
    # The v1 trainers' base asks its modes for methods that have no part in this.
    monkeypatch.setattr(trainer, "__abstractmethods__", frozenset(), raising=False)
    run = object.__new__(trainer)
    vars(run).update(config=config, global_steps=3, _dump_futures=[], _dump_executor=ThreadPoolExecutor(1))
    gate = run._dump_executor.submit(time.sleep, 0.2)
    run._dump_generations(["a"], ["b"], ["c"], [1.0], {}, str(tmp_path / folder))
    waited = gate.done()
    run._dump_executor.shutdown()
    # Samples of training are many and belong to no checkpoint.
    assert waited is (folder == "validation") and (tmp_path / folder / "3.jsonl").exists()
