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

from tests.training.worker.test_tracer import make_tracer, trace_batches
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


def make_state():
    vector = torch.rand(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e7
    return ControllerState(7, {"update_0": vector, "low/update_1": torch.cat([vector[:5], -vector[5:]]) / 3})


def test_every_bit_survives_and_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    state = make_state()
    write_state(tmp_path / "actor", state, OWNER)
    before = (tmp_path / "actor" / FILE).read_bytes()
    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_state(tmp_path / "actor", ControllerState(8), OWNER)
    assert (tmp_path / "actor" / FILE).read_bytes() == before
    back = read_state(tmp_path / "actor", OWNER)
    assert back.step == 7 and back.statistics.keys() == state.statistics.keys()
    assert all(torch.equal(back.statistics[position], vector) for position, vector in state.statistics.items())


def write_changed_state(folder, **changes):
    path = write_state(folder, make_state(), OWNER)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Values that are not 15 finite numbers.
NO_STATISTICS = ("x", [0.0] * 14, [[0.0]] * 15, ["0"] * 15, [True] * 15, [math.nan] * 15, [10**400] * 15)


def assert_unusable(folder, message):
    """Assert that a folder's state is refused with a reason and the file's name."""
    with pytest.raises(UnusableState, match=message) as raised:
        read_state(folder, OWNER)
    assert str(folder / FILE) in str(raised.value)


@pytest.mark.parametrize(
    ("make_file", "message"),
    [
        (lambda path: None, "does not exist: the checkpoint was not written by a run of this plugin"),
        (Path.mkdir, "a folder, not a file"),
        (os.mkfifo, "a device or pipe, not a file"),
    ],
)
def test_a_state_that_is_no_file_is_refused_with_the_reason(tmp_path, make_file, message):
    make_file(tmp_path / FILE)
    assert_unusable(tmp_path, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": 1, "belo', "cut short or not a state"),
        (b"", "cut short or not a state"),
        (b"[1, 2]", "cut short or not a state"),
        (b"\xff\xfe", "cut short or not a state"),
        (b"[" * 100_000, "cut short or not a state .*recursion"),
    ],
)
def test_a_file_that_is_no_state_is_refused_with_the_reason(tmp_path, content, message):
    (tmp_path / FILE).write_bytes(content)
    assert_unusable(tmp_path, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(format=99), "has format 99, this version reads 2"),
        (dict(belongs_to="somebody"), "belongs to other parameters"),
        (dict(belongs_to=describe_owner(METHODS["acpo"](bins=10))), "bins: 10 then, 5 now"),
        (dict(step=-1), "step -1"),
        (dict(step=1.5), "step 1.5"),
        (dict(step=math.inf), "step inf"),
        (dict(statistics=[]), "cut short or not a state"),
        *((dict(statistics={"a": values}), "a must be 15 finite numbers") for values in NO_STATISTICS),
    ],
)
def test_a_state_with_a_wrong_value_is_refused_with_the_reason(tmp_path, changes, message):
    write_changed_state(tmp_path, **changes)
    assert_unusable(tmp_path, message)


class VerlsWorker:
    """The part of verl's TrainingWorker that loading a checkpoint uses, with one rank."""

    engine = SimpleNamespace(is_mp_src_rank_with_outputs=lambda: True, get_data_parallel_rank=lambda: 0)

    def load_checkpoint(self, local_path, hdfs_path, del_local_after_load):
        self.loaded = local_path

    def save_checkpoint(self, *_):
        return "verl's"


class Worker(ClipxTraining, VerlsWorker):
    """The plugin's part of a worker on top of verl's."""

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
    folder = str(tmp_path / "global_step_3" / "actor")
    worker = WithoutNode()
    assert worker.save_checkpoint(folder) == "verl's"
    worker.load_checkpoint(folder)
    assert vars(worker) == {"loaded": folder}


def test_loading_a_checkpoint_restores_the_state_or_stops_unless_told_to_start_afresh(tmp_path, one_rank):
    folder = tmp_path / "global_step_9" / "actor"
    write_state(folder, make_state(), OWNER)
    worker = Worker(method="acpo")
    worker.load_checkpoint(str(folder))
    assert worker.state.step == 7 and worker.rollout_batch_count == 9 and worker.loaded == str(folder)
    # One of a step that trained the critic alone takes nothing from the count.
    worker.load_checkpoint(str(shutil.copytree(folder, tmp_path / "global_step_2" / "actor")))
    assert worker.rollout_batch_count == 9

    write_changed_state(tmp_path, statistics={"update_0": [0.0] * 14})
    worker = Worker(method="acpo")
    message = rf"{tmp_path}/{FILE}.* update_0 must be 15 finite .*clipx\.missing_state=fresh"
    with pytest.raises(RuntimeError, match=message):
        worker.load_checkpoint(str(tmp_path))
    assert not hasattr(worker, "loaded")
    afresh = Worker(method="acpo", missing_state="fresh")
    afresh.load_checkpoint(str(tmp_path))
    assert afresh.state == ControllerState() and afresh.loaded == str(tmp_path)


@pytest.mark.parametrize(("method", "size"), [("acpo", 15), ("m2po", None), ("bapo", None)])
def test_counts_below_0_are_no_state(tmp_path, one_rank, method, size):
    worker = Worker(method=method)
    owner = worker.policy_loss.clipx.method
    vector = torch.ones(size or owner.statistics_size, dtype=torch.float64)
    vector[0] = -1.0
    write_state(tmp_path, ControllerState(1, {"update_0": vector}), owner)
    with pytest.raises(RuntimeError, match=rf"{FILE} .*update_0 have counts below 0.*clipx\.missing_state=fresh"):
        worker.load_checkpoint(str(tmp_path))


@pytest.mark.parametrize("folder_above", ["sft_global_step_2", "global_step_3/again"])
def test_the_step_is_that_of_the_checkpoint_and_not_of_a_folder_above(tmp_path, one_rank, folder_above):
    """verl itself reads the number behind the path's last global_step_; traces of the steps before it stay."""
    traces = tmp_path / folder_above / "traces"
    trace_batches(make_tracer(traces), 6, updates=1)
    worker = Worker(method="grpo")
    worker.load_checkpoint(str(tmp_path / folder_above / "checkpoints" / "global_step_6" / "actor"))
    assert worker.rollout_batch_count == 6
    shards = trace_batches(make_tracer(traces), 1, updates=1, earlier_batches=6)
    assert shards == [(step, 0) for step in range(1, 8)]
