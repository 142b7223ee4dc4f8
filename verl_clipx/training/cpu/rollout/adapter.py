"""The training worker's side of the rollout, which sends the worker's weights to its replica's server."""

import os
from collections.abc import Generator

import ray
import torch
from torch.distributed.device_mesh import DeviceMesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from verl_clipx.run.keys import LORA_MERGE
from verl_clipx.training.cpu.rollout.server import server_name
from verl_clipx.training.cpu.rollout.weights import pack_weights


class CPUServerAdapter(BaseRollout):
    """Client of `CPUServer` in every training worker. The first rank of a replica acts for all its ranks.

    Args:
        config: verl's configuration of the rollout.
        model_config: verl's configuration of the model.
        device_mesh: verl's, which nothing here needs.
        replica_rank: this worker's replica; -1 derives it from the environment variable ``RANK``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ):
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        ranks_per_replica = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // ranks_per_replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % ranks_per_replica == 0
        self._handle: ray.actor.ActorHandle | None = None

    @property
    def _server(self) -> ray.actor.ActorHandle:
        """Return the handle on the replica's server."""
        # The server starts after this worker, so it is looked up at first use.
        if self._handle is None:
            self._handle = ray.get_actor(server_name(self.replica_rank))
        return self._handle

    async def resume(self, tags: list[str]) -> None:
        """Wake up the server, for ``weights`` or ``kv_cache``."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        """Put the server to sleep."""
        if self.config.free_cache_engine and self.is_leader_rank:
            await self._server.sleep.remote()

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict | None = None,
        **kwargs,
    ) -> None:
        """Send all weights through Ray's object store.

        Args:
            weights: name and full tensor. Producing a tensor is a collective operation, so every rank reads the whole
                generator; only the leader sends.
            global_steps: the version of the weights; None if verl does not say.
            wire_format: how verl hands on the weights. Only "named_tensors" is supported.
            peft_config: that of an adapter that is sent apart from the model, which is not supported.
            kwargs: what other rollouts need.

        Raises:
            ValueError: the wire format is not supported, or the weights include an unmerged adapter.
        """
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r}: the CPU rollout accepts only 'named_tensors'")
        if peft_config is not None:
            raise ValueError(f"the CPU rollout does not support adapters. Set {LORA_MERGE}=True")
        max_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
        # One message is held back, because only the end of the generator shows which was the last.
        held_message = None
        for message in pack_weights(weights, max_bytes):
            if held_message is not None:
                await self._send(held_message, last=False, global_steps=global_steps)
            held_message = message
        await self._send(held_message, last=True, global_steps=global_steps)

    async def _send(self, message: dict, *, last: bool, global_steps: int | None) -> None:
        """Send a message to the server, if this is the leader; see `CPUServer.load_weights`."""
        if self.is_leader_rank:
            await self._server.load_weights.remote(message, last=last, global_steps=global_steps)
