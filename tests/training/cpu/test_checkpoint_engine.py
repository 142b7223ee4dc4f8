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


def updated(trainer, rollout, weights) -> tuple[list[dict[str, torch.Tensor]], list[list[str]]]:
    """One update as verl's CheckpointEngineManager makes it: what each rollout worker got, what each rank read."""
    metadata = [engine.prepare() for engine in (*trainer, *rollout)]
    topology = GlooCheckpointEngine.build_topology(len(trainer), len(rollout), metadata)
    read = [[] for _ in trainer]

    def join(engine, arguments, rank):
        engine.init_process_group(**{name: values[rank] for name, values in arguments.items()})

    def reading(names):
        for name, weight in weights.items():
            names.append(name)
            yield name, weight

    def send(engine, names):
        asyncio.run(engine.send_weights(reading(names), global_steps=3))

    with ThreadPoolExecutor(len(trainer) + len(rollout)) as pool:
        joined = [
            pool.submit(join, engine, arguments, rank)
            for engines, arguments in zip((trainer, rollout), topology, strict=True)
            for rank, engine in enumerate(engines)
        ]
        for future in joined:
            future.result(60)
        sent = [pool.submit(send, engine, names) for engine, names in zip(trainer, read, strict=True)]
        received = [pool.submit(lambda engine: dict(engine.receive_weights()), engine) for engine in rollout]
        result = [future.result(60) for future in (*sent, *received)][len(sent) :]
    for engine in (*trainer, *rollout):
        engine.finalize()
    return result, read


@pytest.mark.parametrize("bucket_size", [16, 1 << 20])
def test_every_rollout_worker_gets_every_weight_in_every_update(bucket_size):
    trainer = [GlooCheckpointEngine(bucket_size, is_master=rank == 0) for rank in range(2)]
    rollout = [GlooCheckpointEngine(bucket_size) for _ in range(2)]
    for factor in (1, 3):
        weights = {name: factor * weight for name, weight in WEIGHTS.items()}
        received, read = updated(trainer, rollout, weights)
        for got in received:
            assert list(got) == list(weights)
            assert all(torch.equal(got[name], weight) for name, weight in weights.items())
        # Each tensor is gathered from all ranks as it is read: a rank that stopped reading would hang the others.
        assert read == [list(weights)] * 2


def test_verl_finds_it_and_makes_it_and_asks_of_it_what_it_did():
    register()
    made = CheckpointEngineRegistry.new("gloo", bucket_size=8, is_master=True)
    assert isinstance(made, GlooCheckpointEngine) and made.is_master
    asked = {name for name, member in vars(CheckpointEngine).items() if getattr(member, "__isabstractmethod__", False)}
    first = {"prepare", "build_topology", "init_process_group"}
    assert asked == first | {"finalize", "send_weights", "receive_weights"}
    for name in asked:
        ours, of_verl = (
            inspect.signature(getattr(engine, name)) for engine in (GlooCheckpointEngine, CheckpointEngine)
        )
        assert name == "init_process_group" or list(ours.parameters) == list(of_verl.parameters)
    manager = inspect.getsource(CheckpointEngineManager.build_process_group)
    assert "self.backend_cls.build_topology(" in manager
    assert "receive_weights(global_steps=global_steps)" in inspect.getsource(base.CheckpointEngineWorker.update_weights)
