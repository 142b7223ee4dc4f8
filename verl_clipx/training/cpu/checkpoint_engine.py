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

# The rank of the trainer's processes that are not in the group: all but the first, which sends.
NOT_IN_GROUP = -1


class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts the weights from the trainer's first rank to all rollout workers, in a group made for each update.

    verl calls `prepare` on every process, `build_topology` in the driver with what these returned,
    `init_process_group`, then `send_weights` in the trainer and `receive_weights` in the rollout, and `finalize`.

    Args:
        bucket_size: maximum message size in bytes; a larger tensor gets its own message.
        is_master: whether this is the trainer's first rank, which sends.
    """

    def __init__(self, bucket_size: int, is_master: bool = False):
        self.bucket_size = bucket_size
        self.is_master = is_master
        self.rank = NOT_IN_GROUP
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> tuple[str, int] | None:
        """Open the store at which the processes of the group meet.

        Returns:
            Its host and port on the trainer's first rank, which opens it; None on every other process.
        """
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        # Port 0: the system chooses a free one.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[tuple[str, int] | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for every process of the trainer and of the rollout.

        Args:
            actor_wg_world_size: the number of the trainer's processes.
            rollout_world_size: the number of the rollout's.
            metadata: what `prepare` returned on each process of the trainer, the first one's address first.

        Returns:
            The trainer's arguments and the rollout's: from an argument's name to its value on each process.
        """
        address = metadata[0]
        world_size = 1 + rollout_world_size

        def make_arguments(ranks: list[int]) -> dict[str, list[Any]]:
            """Return the arguments of processes with these ranks in the group."""
            return {
                "rank": ranks,
                "world_size": [world_size] * len(ranks),
                "address": [address] * len(ranks),
            }

        trainer_ranks = [0] + [NOT_IN_GROUP] * (actor_wg_world_size - 1)
        rollout_ranks = list(range(1, world_size))
        return make_arguments(trainer_ranks), make_arguments(rollout_ranks)

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Join the group, with the arguments from `build_topology`."""
        self.rank = rank
        if rank == NOT_IN_GROUP:
            return
        if self._store is None:
            self._store = TCPStore(*address, is_master=False, timeout=TIMEOUT)
        # Separate from torch's default group, which belongs to the trainer.
        self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = None
        self._store = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        """Send all weights.

        Args:
            weights: name and full tensor. Producing a tensor is a collective operation, so every rank of the trainer
                reads the whole generator, while only the first one sends.
            global_steps: the version of the weights, which nothing here needs.
        """
        for message in pack_weights(weights, self.bucket_size):
            if self.is_master:
                self._broadcast(message)
        if self.is_master:
            self._broadcast(None)

    def receive_weights(self, global_steps: int | None = None) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the name and float32 tensor of every weight as it arrives."""
        while True:
            message = self._broadcast(None)
            if message is None:
                return
            for name, array in message.items():
                yield name, torch.from_numpy(array)

    def _broadcast(self, message: dict[str, np.ndarray] | None) -> dict[str, np.ndarray] | None:
        """Broadcast the first rank's message to every rank of the group.

        Args:
            message: arrays by name, or None, which ends an update. Read on the first rank alone.

        Returns:
            The first rank's message, on every rank.
        """
        if self.is_master:
            # A bytearray, because torch wants a buffer that can be written to.
            content = bytearray(pickle.dumps(message))
            size = torch.tensor([len(content)])
            payload = torch.frombuffer(content, dtype=torch.uint8)
            self._group.broadcast([size], BroadcastOptions()).wait()
        else:
            size = torch.tensor([0])
            self._group.broadcast([size], BroadcastOptions()).wait()
            payload = torch.empty(int(size), dtype=torch.uint8)
        self._group.broadcast([payload], BroadcastOptions()).wait()
        return pickle.loads(payload.numpy().tobytes())


def register() -> None:
    """Add the engine to verl's registry, as ``rollout.checkpoint_engine.backend=gloo``."""
    CheckpointEngineRegistry.register(BACKEND)(GlooCheckpointEngine)
