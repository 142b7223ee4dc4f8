"""verl's handle on one rollout server: starts it and forwards the trainer's calls."""

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import RolloutReplica

from verl_clipx.training.cpu.rollout.server import CPUServer, server_name


class CPUReplica(RolloutReplica):
    """One `CPUServer` for the ranks of a replica.

    ``rollout.tensor_model_parallel_size`` is the number of training ranks that share a server: nothing is split.
    """

    async def launch_servers(self) -> None:
        """Start the server on the node of the replica's first worker and wait until it can generate.

        Raises:
            ValueError: the server would serve a reward or teacher model.
        """
        if self.is_reward_model or self.is_teacher_model:
            raise ValueError("rollout.name=cpu supports only the policy. Use a rule-based reward and no teacher model")
        node_id, address = await self.workers[0].__ray_call__.remote(_location)
        name = server_name(self.replica_rank)
        server = (
            ray.remote(CPUServer)
            .options(
                name=name,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            )
            .remote(config=self.config, model_config=self.model_config, replica_rank=self.replica_rank)
        )
        await server.launch_server.remote()
        self.servers = [server]
        self._server_handle = server
        # There is no HTTP endpoint; verl uses the address as the server's name.
        self._server_address = f"{address}/{name}"


def _location(_worker) -> tuple[str, str]:
    """Return the node of the worker that runs this, by Ray's id, and the node's IP address."""
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
