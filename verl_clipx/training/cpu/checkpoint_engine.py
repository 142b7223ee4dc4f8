"""verl's checkpoint engine over gloo: sends weights to rollout servers that run separately from the trainer."""

import pickle
from collections.abc import Generator
from datetime import timedelta
from typing import Any

import numpy as np
import ray
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_clipx.training.cpu.rollout.weights import pack_weights

BACKEND = "gloo"
TIMEOUT = timedelta(minutes=5)
# Rank of the trainer's processes that send nothing.
OUTSIDE = -1


class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts the weights from the trainer's first rank to all rollout workers, in a group made for each update.

    Args:
        bucket_size: maximum message size in bytes; a larger tensor gets its own message.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = OUTSIDE
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Return the rendezvous address: host and port of the first rank's store; None on every other rank."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[tuple[str, int] | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return `init_process_group`'s arguments; the group is the trainer's first rank and all rollout workers."""

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            size = [1 + rollout_world_size] * len(ranks)
            return {"rank": ranks, "world_size": size, "address": [metadata[0]] * len(ranks)}

        return (
            arguments([0] + [OUTSIDE] * (actor_wg_world_size - 1)),
            arguments(list(range(1, 1 + rollout_world_size))),
        )

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Joins the group, with the arguments from `build_topology`."""
        self.rank = rank
        if rank == OUTSIDE:
            return
        if self._store is None:
            self._store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
        # Separate from torch's default group, which belongs to the trainer.
        self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leaves the group."""
        self._group = self._store = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Sends all weights.

        Args:
            weights: name and full tensor. Producing a tensor is a collective operation, so every rank of the trainer
                reads the whole generator.
        """
        for message in pack_weights(weights, self.bucket_size):
            if self.is_master:
                self._broadcast(message)
        if self.is_master:
            self._broadcast(None)

    def receive_weights(self, global_steps: int | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yields the name and float32 tensor of every weight as it arrives."""
        while (message := self._broadcast(None)) is not None:
            for name, array in message.items():
                yield name, torch.from_numpy(array)

    def _broadcast(self, message: dict[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
        """Return the first rank's message on every rank of the group; None ends an update."""
        sent = bytearray(pickle.dumps(message)) if self.is_master else bytearray()
        size = torch.tensor([len(sent)])
        self._group.broadcast([size], BroadcastOptions()).wait()
        payload = torch.frombuffer(sent, dtype=torch.uint8) if sent else torch.empty(int(size), dtype=torch.uint8)
        self._group.broadcast([payload], BroadcastOptions()).wait()
        return pickle.loads(payload.numpy().tobytes())


def register() -> None:
    """Add the engine to verl's registry, as ``rollout.checkpoint_engine.backend=gloo``."""
    CheckpointEngineRegistry.register(BACKEND)(GlooCheckpointEngine)
