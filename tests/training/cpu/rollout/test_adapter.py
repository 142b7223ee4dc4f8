"""The adapter: who sends, that everyone reads all weights, and how messages end. Not covered: Ray."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from verl_clipx.training.cpu.rollout.adapter import CPUServerAdapter


class RecordingServer:
    """Records what is called by `remote`: name, arguments, named arguments."""

    def __init__(self):
        self.log = []

    def __getattr__(self, name):
        async def remote(*args, **kwargs):
            self.log.append((name, args, kwargs))

        return SimpleNamespace(remote=remote)


@pytest.fixture
def build_adapter(monkeypatch):
    def build(rank: int, *, ranks_per_server: int = 1, **options) -> CPUServerAdapter:
        monkeypatch.setenv("RANK", str(rank))
        config = RolloutConfig(name="cpu", tensor_model_parallel_size=ranks_per_server, **options)
        adapter = CPUServerAdapter(config, model_config={}, device_mesh=None)
        adapter._handle = RecordingServer()
        return adapter

    return build


def read_weights(names_read: list[str]):
    """Weights as they are read one after the other, each of which leaves its name."""
    for name, megabytes in [("a", 0.5), ("b", 0.4), ("c", 2.0), ("d", 0.5)]:
        names_read.append(name)
        yield name, torch.zeros(int(megabytes * (1 << 20)) // 4)


def test_the_leader_sends_messages_of_bounded_size_and_marks_the_last(build_adapter):
    leader = build_adapter(0, checkpoint_engine=CheckpointEngineConfig(update_weights_bucket_megabytes=1))
    asyncio.run(leader.update_weights(read_weights([]), global_steps=7))
    messages = []
    for _, (message,), options in leader._handle.log:
        messages.append((list(message), options["last"]))
        assert options["global_steps"] == 7
    assert messages == [(["a", "b"], False), (["c"], False), (["d"], True)]


def test_other_ranks_of_a_server_read_every_weight_and_send_nothing(build_adapter):
    # Each tensor is gathered from all ranks as it is read: a rank that stopped reading would hang the others.
    follower = build_adapter(3, ranks_per_server=2)
    names_read: list[str] = []
    asyncio.run(follower.update_weights(read_weights(names_read)))
    assert names_read == ["a", "b", "c", "d"] and follower._handle.log == []
    assert (follower.replica_rank, follower.is_leader_rank) == (1, False)


def test_sleeping_follows_free_cache_engine(build_adapter):
    for free_cache_engine, calls in ((True, ["wake_up", "sleep"]), (False, [])):
        leader = build_adapter(0, free_cache_engine=free_cache_engine)
        asyncio.run(leader.resume(["kv_cache"]))
        asyncio.run(leader.release())
        assert [name for name, *_ in leader._handle.log] == calls


def test_what_the_adapter_cannot_send_is_refused(build_adapter):
    for message, options in (("delta_flush", {"wire_format": "delta_flush"}), ("merge=True", {"peft_config": {}})):
        with pytest.raises(ValueError, match=message):
            asyncio.run(build_adapter(0).update_weights(read_weights([]), **options))
