"""The state's file: exact, atomic, and clear about every way in which it can be unusable, also through the worker. Not
covered: several ranks, verl's own checkpoint, resuming (tests/end_to_end/test_engine.py and test_resume.py).
"""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.training.worker.test_tracer import shards_after, tracer_to
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.config import build
from verl_clipx.run.handover import Handover
from verl_clipx.training.worker import training_worker as worker_module
from verl_clipx.training.worker.state import (
    FILE,
    ControllerState,
    UnusableState,
    describe_owner,
    read_state,
    write_state,
)
from verl_clipx.training.worker.training_worker import ClipxTraining

OWNER = METHODS["acpo"]()


def a_state():
    vector = torch.rand(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e7
    return ControllerState(7, {"update_0": vector, "low/update_1": torch.cat([vector[:5], -vector[5:]]) / 3})


def test_every_bit_survives_and_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    state = a_state()
    write_state(tmp_path / "actor", state, OWNER)
    before = (tmp_path / "actor" / FILE).read_bytes()
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_state(tmp_path / "actor", ControllerState(8), OWNER)
    assert (tmp_path / "actor" / FILE).read_bytes() == before
    back = read_state(tmp_path / "actor", OWNER)
    assert back.step == 7 and back.statistics.keys() == state.statistics.keys()
    assert all(torch.equal(back.statistics[position], vector) for position, vector in state.statistics.items())


def change(folder, **changes):
    path = write_state(folder, a_state(), OWNER)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


NUMBERS = ("x", [0.0] * 14, [[0.0]] * 15, ["0"] * 15, [True] * 15, [math.nan] * 15, [10**400] * 15)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda _: None, "does not exist: the checkpoint was not written by a run of this plugin"),
        *((content, "cut short or not a state") for content in (b'{"format": 1, "belo', b"", b"[1, 2]", b"\xff\xfe")),
        (lambda path: path.write_bytes(b"[" * 100_000), "cut short or not a state .*recursion"),
        (Path.mkdir, "a folder, not a file"),
        (os.mkfifo, "a device or pipe, not a file"),
        (dict(format=99), "has format 99, this version reads 2"),
        (dict(belongs_to="somebody"), "belongs to other parameters"),
        (dict(belongs_to=describe_owner(METHODS["acpo"](bins=10))), "bins: 10 then, 5 now"),
        *((dict(step=step), f"step {step}") for step in (-1, 1.5, math.inf)),
        (dict(statistics=[]), "cut short or not a state"),
        *((dict(statistics={"a": values}), "a must be 15 finite numbers") for values in NUMBERS),
    ],
)
def test_an_unusable_file_says_why(tmp_path, spoil, message):
    if isinstance(spoil, dict):
        change(tmp_path, **spoil)
    elif isinstance(spoil, bytes):
        (tmp_path / FILE).write_bytes(spoil)
    else:
        spoil(tmp_path / FILE)
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

    def save_checkpoint(self, *_):
        return "verl's"


class Worker(ClipxTraining, VerlsWorker):
    """Ours on top of it."""

    def __init__(self, **parameters):
        self.policy_loss = SimpleNamespace(clipx=build(**parameters), run=Handover())
        self.state = ControllerState()


@pytest.fixture
def one_rank(tmp_path_factory, monkeypatch):
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    monkeypatch.setattr(worker_module, "get_device_id", lambda: "cpu")
    yield
    torch.distributed.destroy_process_group()


class WithoutNode(ClipxTraining, VerlsWorker):
    """In a run without a clipx node."""


def test_without_a_node_a_checkpoint_is_verls(tmp_path):
    folder, plain = str(tmp_path / "global_step_3" / "actor"), WithoutNode()
    assert plain.save_checkpoint(folder) == "verl's"
    plain.load_checkpoint(folder)
    assert vars(plain) == {"loaded": folder}


def test_loading_a_checkpoint_restores_the_state_or_stops_unless_told_to_start_afresh(tmp_path, one_rank):
    folder = tmp_path / "global_step_9" / "actor"
    write_state(folder, a_state(), OWNER)
    worker = Worker(method="acpo")
    worker.load_checkpoint(str(folder))
    assert worker.state.step == 7 and worker.rollout_batch_count == 9 and worker.loaded == str(folder)
    # One of a step that trained the critic alone takes nothing from the count.
    worker.load_checkpoint(str(shutil.copytree(folder, tmp_path / "global_step_2" / "actor")))
    assert worker.rollout_batch_count == 9

    change(tmp_path, statistics={"update_0": [0.0] * 14})
    worker, fresh = Worker(method="acpo"), Worker(method="acpo", missing_state="fresh")
    told = rf"{tmp_path}/{FILE}.* update_0 must be 15 finite .*clipx\.missing_state=fresh"
    with pytest.raises(RuntimeError, match=told):
        worker.load_checkpoint(str(tmp_path))
    assert not hasattr(worker, "loaded")
    fresh.load_checkpoint(str(tmp_path))
    assert fresh.state == ControllerState() and fresh.loaded == str(tmp_path)


@pytest.mark.parametrize(("method", "size"), [("acpo", 15), ("m2po", None), ("bapo", None)])
def test_counts_below_0_are_no_state(tmp_path, one_rank, method, size):
    worker = Worker(method=method)
    owner = worker.policy_loss.clipx.method
    vector = torch.ones(size or owner.statistics_size, dtype=torch.float64)
    vector[0] = -1.0
    write_state(tmp_path, ControllerState(1, {"update_0": vector}), owner)
    with pytest.raises(RuntimeError, match=rf"{FILE} .*update_0 have counts below 0.*clipx\.missing_state=fresh"):
        worker.load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("above", ["sft_global_step_2", "global_step_3/again"])
def test_the_step_is_that_of_the_checkpoint_and_not_of_a_folder_above(tmp_path, one_rank, above):
    """verl itself reads the number behind the path's last global_step_; traces of the steps before it stay."""
    traces = tmp_path / above / "traces"
    shards_after(tracer_to(traces), 6, updates=1)
    worker = Worker(method="grpo")
    worker.load_checkpoint(str(tmp_path / above / "checkpoints" / "global_step_6" / "actor"))
    found = shards_after(tracer_to(traces), 1, updates=1, before=worker.rollout_batch_count)
    assert worker.rollout_batch_count == 6 and found == [(step, 0) for step in range(1, 8)]
