"""The state's file: exact, atomic, and clear about every way in which it can be unusable.

Covers: round trip, a crash while writing, missing, truncated and foreign files, also through the worker's
load_checkpoint; the step that a checkpoint's path says, also for the traces. Not covered: several ranks, verl's own
checkpoint, resuming (tests/end_to_end/test_engine.py and test_resume.py).
"""

import json
import math
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.worker.test_tracer import shards_after, tracer_to
from verl_clipx.methods import METHODS
from verl_clipx.run.config import build
from verl_clipx.worker import training_worker as worker_module
from verl_clipx.worker.state import FILE, ControllerState, UnusableState, description, read_state, write_state
from verl_clipx.worker.training_worker import ClipxTraining

OWNER = description(METHODS["acpo"]())


def a_state():
    vector = torch.rand(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e7
    return ControllerState(7, {"update_0": vector, "low/update_1": -vector / 3})


def test_every_bit_survives(tmp_path):
    state = a_state()
    write_state(tmp_path / "actor", state, OWNER)
    back = read_state(tmp_path / "actor", OWNER)
    assert back.step == 7 and back.statistics.keys() == state.statistics.keys()
    for position, vector in state.statistics.items():
        assert torch.equal(back.statistics[position], vector)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    write_state(tmp_path, a_state(), OWNER)
    before = (tmp_path / FILE).read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_state(tmp_path, ControllerState(8), OWNER)
    assert (tmp_path / FILE).read_bytes() == before
    assert read_state(tmp_path, OWNER).step == 7


def changed(tmp_path, **changes):
    path = write_state(tmp_path, a_state(), OWNER)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def written(content):
    return lambda folder: (folder / FILE).write_bytes(content)


def of_statistics(values):
    return partial(changed, statistics={"a": values})


UNUSABLE = [
    (lambda folder: None, "does not exist: the checkpoint was not written by a run of this plugin"),
    *(
        (written(content), "cut short or not a state")
        for content in (b'{"format": 1, "belo', b"", b"[1, 2]", b"\xff\xfe")
    ),
    (written(b"[" * 100_000), "cut short or not a state .*recursion"),
    (lambda folder: (folder / FILE).mkdir(), "a folder, not a file"),
    (lambda folder: os.mkfifo(folder / FILE), "a device or pipe, not a file"),
    (partial(changed, format=99), "has format 99, this version reads 2"),
    (partial(changed, belongs_to="somebody"), "belongs to other parameters"),
    (partial(changed, belongs_to=description(METHODS["acpo"](bins=10))), "bins: 10 then, 5 now"),
    *((partial(changed, step=step), f"step {step}") for step in (-1, 1.5, math.inf)),
    (partial(changed, statistics=[]), "cut short or not a state"),
    *(
        (of_statistics(values), "a must be 15 finite numbers")
        for values in ("x", [0.0] * 14, [[0.0]] * 15, ["0"] * 15, [True] * 15, [math.nan] * 15, [10**400] * 15)
    ),
]


@pytest.mark.parametrize(("spoil", "message"), UNUSABLE)
def test_an_unusable_file_says_why(tmp_path, spoil, message):
    spoil(tmp_path)
    with pytest.raises(UnusableState, match=message) as raised:
        read_state(tmp_path, OWNER)
    assert str(tmp_path / FILE) in str(raised.value)


class VerlsWorker:
    """The part of verl's TrainingWorker that loading a checkpoint uses, with one rank."""

    class engine:
        is_mp_src_rank_with_outputs = staticmethod(lambda: True)
        get_data_parallel_rank = staticmethod(lambda: 0)

    def load_checkpoint(self, local_path, hdfs_path, del_local_after_load):
        self.loaded = local_path


class Worker(ClipxTraining, VerlsWorker):
    """Ours on top of it."""

    def __init__(self, **parameters):
        self.policy_loss = SimpleNamespace(clipx=build(**parameters), run=SimpleNamespace(batches_a_step=1))
        self.state = ControllerState()


@pytest.fixture
def one_rank(tmp_path_factory, monkeypatch):
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    monkeypatch.setattr(worker_module, "get_device_id", lambda: "cpu")
    yield
    torch.distributed.destroy_process_group()


def test_a_checkpoint_that_cannot_be_saved_is_named_with_the_room_on_its_disk(tmp_path, monkeypatch, caplog):
    def save(*_):
        raise RuntimeError("unexpected pos 4540608 vs 4540496")

    monkeypatch.setattr(VerlsWorker, "save_checkpoint", save, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    with pytest.raises(RuntimeError, match="unexpected pos"):
        Worker(method="acpo").save_checkpoint(str(tmp_path / "global_step_3" / "actor"))
    assert f"could not save {tmp_path}/global_step_3/actor; its disk has 2 MB left" in caplog.text


def test_without_a_clipx_node_saving_and_loading_are_verls(tmp_path, monkeypatch, caplog):
    def save(*_):
        raise RuntimeError("unexpected pos 4540608 vs 4540496")

    class OfVerl(ClipxTraining, VerlsWorker): ...

    monkeypatch.setattr(VerlsWorker, "save_checkpoint", save, raising=False)
    worker = OfVerl()
    with pytest.raises(RuntimeError, match="unexpected pos"):
        worker.save_checkpoint(str(tmp_path / "global_step_3" / "actor"))
    assert caplog.text == ""
    worker.load_checkpoint(str(tmp_path / "global_step_9" / "actor"))
    assert vars(worker) == {"loaded": str(tmp_path / "global_step_9" / "actor")}


def test_loading_a_checkpoint_restores_the_state(tmp_path, one_rank):
    folder = tmp_path / "global_step_9" / "actor"
    write_state(folder, a_state(), OWNER)
    worker = Worker(method="acpo")
    worker.load_checkpoint(str(folder))
    assert worker.state.step == 7 and worker.rollouts == 9 and worker.loaded == str(folder)


@pytest.mark.parametrize("above", ["sft_global_step_2", "global_step_3/again"])
def test_the_step_is_that_of_the_checkpoint_and_not_of_a_folder_above(tmp_path, one_rank, above):
    """verl itself reads the number behind the path's last global_step_; traces of the steps before it stay."""
    traces = tmp_path / above / "traces"
    shards_after(tracer_to(traces), 6, updates=1)
    worker = Worker(method="grpo")
    worker.load_checkpoint(str(tmp_path / above / "checkpoints" / "global_step_6" / "actor"))
    found = shards_after(tracer_to(traces), 1, updates=1, before=worker.rollouts)
    assert worker.rollouts == 6 and found == [(step, 0) for step in range(1, 8)]


def test_a_checkpoint_of_a_step_that_trained_the_critic_alone_takes_nothing_from_the_count(tmp_path, one_rank):
    worker = Worker(method="grpo")
    worker.rollouts = 9
    worker.load_checkpoint(str(tmp_path / "global_step_2" / "actor"))
    assert worker.rollouts == 9


def test_loading_a_checkpoint_with_an_unusable_state_stops_unless_told_to_start_afresh(tmp_path, one_rank):
    changed(tmp_path, statistics={"update_0": [0.0] * 14})
    worker = Worker(method="acpo")
    told = rf"{tmp_path}/{FILE}.* update_0 must be 15 finite .*clipx\.missing_state=fresh"
    with pytest.raises(RuntimeError, match=told):
        worker.load_checkpoint(str(tmp_path))
    assert not hasattr(worker, "loaded")
    worker = Worker(method="acpo", missing_state="fresh")
    worker.load_checkpoint(str(tmp_path))
    assert worker.state == ControllerState() and worker.loaded == str(tmp_path)
