"""Weights over gloo, from verl's door: prepare, build_topology, init_process_group, send and receive, finalize, in two
updates and messages of any size; what verl asks of an engine. A thread stands for each process. Not covered: Ray and
the trainers that use it (test_options.py).
"""

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from verl.checkpoint_engine import base
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry

from verl_clipx.training.cpu.checkpoint_engine import GlooCheckpointEngine, register

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(2.5), "c": torch.arange(1000.0) / 7}


@pytest.fixture(autouse=True)
def on_this_host(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")


def update_weights(trainer, rollout, weights) -> tuple[list[dict[str, torch.Tensor]], list[list[str]]]:
    """One update as verl's CheckpointEngineManager makes it: what each rollout worker got, what each rank read."""
    metadata = [engine.prepare() for engine in (*trainer, *rollout)]
    topology = GlooCheckpointEngine.build_topology(len(trainer), len(rollout), metadata)
    names_read = [[] for _ in trainer]

    def join(engine, arguments, rank):
        engine.init_process_group(**{name: values[rank] for name, values in arguments.items()})

    def read_weights(names):
        for name, weight in weights.items():
            names.append(name)
            yield name, weight

    def send(engine, names):
        asyncio.run(engine.send_weights(read_weights(names), global_steps=3))

    def receive(engine):
        return dict(engine.receive_weights())

    with ThreadPoolExecutor(len(trainer) + len(rollout)) as pool:
        joining = [
            pool.submit(join, engine, arguments, rank)
            for engines, arguments in zip((trainer, rollout), topology, strict=True)
            for rank, engine in enumerate(engines)
        ]
        for future in joining:
            future.result(60)
        sending = [pool.submit(send, engine, names) for engine, names in zip(trainer, names_read, strict=True)]
        receiving = [pool.submit(receive, engine) for engine in rollout]
        for future in sending:
            future.result(60)
        received = [future.result(60) for future in receiving]
    for engine in (*trainer, *rollout):
        engine.finalize()
    return received, names_read


@pytest.mark.parametrize("bucket_size", [16, 1 << 20])
def test_every_rollout_worker_gets_every_weight_in_every_update(bucket_size):
    trainer = [GlooCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(2)]
    rollout = [GlooCheckpointEngine(bucket_size) for _ in range(2)]
    for factor in (1, 3):
        weights = {name: factor * weight for name, weight in WEIGHTS.items()}
        received, names_read = update_weights(trainer, rollout, weights)
        for weights_of_worker in received:
            assert list(weights_of_worker) == list(weights)
            assert all(torch.equal(weights_of_worker[name], weight) for name, weight in weights.items())
        # Each tensor is gathered from all ranks as it is read: a rank that stopped reading would hang the others.
        assert names_read == [list(weights)] * 2


def test_verl_finds_the_engine_and_asks_of_it_what_it_asked_before():
    register()
    engine = CheckpointEngineRegistry.new("gloo", bucket_size=8, is_master=True)
    assert isinstance(engine, GlooCheckpointEngine) and engine.is_master
    methods = set()
    for name, member in vars(CheckpointEngine).items():
        if getattr(member, "__isabstractmethod__", False):
            methods.add(name)
    assert methods == {
        "prepare",
        "build_topology",
        "init_process_group",
        "finalize",
        "send_weights",
        "receive_weights",
    }
    # Each engine of verl's has its own arguments of init_process_group.
    for name in methods - {"init_process_group"}:
        own = inspect.signature(getattr(GlooCheckpointEngine, name))
        of_verl = inspect.signature(getattr(CheckpointEngine, name))
        assert list(own.parameters) == list(of_verl.parameters), name
    manager = inspect.getsource(CheckpointEngineManager.build_process_group)
    assert "self.backend_cls.build_topology(" in manager
    assert "receive_weights(global_steps=global_steps)" in inspect.getsource(base.CheckpointEngineWorker.update_weights)
