"""verl's v1 trainer with its workers, its rollout and its queue in this process.

Training is verl's own: the trainer's steps (old log-probabilities, advantages, update, metrics, log), its
ActorRolloutRefWorker with the plugin's training worker, and its FSDP2 engine over gloo. There is no Ray, no
TransferQueue, no agent loop, and no rollout server around the CPU rollout's generator.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import validate_config
from verl.utils.device import auto_set_device
from verl.workers.engine_workers import ActorRolloutRefWorker

from .queue import LocalQueue, queue_of_trainer
from .rollout import LocalRollout

# One answer to each prompt of data.val_files.
HELD_OUT = "val-core/held_out/acc/mean@1"
VERSIONS_OLD, NOISE = "clipx_rollout.versions_old", "clipx_rollout.noise"


class LocalWorkers:
    """The worker group that verl's trainer calls: one worker in this process, which reads and writes the queue."""

    # The data-parallel rank of each worker, by mesh.
    _dispatch_info: Mapping[str, list[int]] = {"actor": [0]}

    def __init__(self, config: DictConfig, queue: LocalQueue):
        self.queue = queue
        self.worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
        self.worker.init_model()

    def compute_log_prob(self, batch: Any) -> Any:
        """verl's computation of old_log_probs."""
        output = self.worker.compute_log_prob(self.queue.data_of(batch))
        self.queue.kv_batch_put(batch.keys, output.select("log_probs", "entropy"))
        return batch

    def update_actor(self, batch: Any) -> dict[str, Any]:
        """verl's update on all mini-batches of a rollout batch."""
        return {"metrics": tu.get(self.worker.update_actor(self.queue.data_of(batch)), "metrics")}

    def weights(self) -> Any:
        """Return the name and full tensor of each weight."""
        named, _ = self.worker.actor.engine.get_per_tensor_param()
        return named


class OneProcessTrainer(PPOTrainerSync):
    """verl's trainer of the `sync` mode, in this process; the configuration must be resolved."""

    def __init__(self, config: DictConfig, queue: LocalQueue):
        self.queue = queue
        super().__init__(config)

    def _build_replay_buffer(self) -> LocalRollout:
        versions_old, noise = (OmegaConf.select(self.config, key) or 0 for key in (VERSIONS_OLD, NOISE))
        return LocalRollout(self.config, self.queue, versions_old=versions_old, noise=noise)

    def _setup(self) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
        # Rewards come with the samples.
        self.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        self.actor_rollout_wg = LocalWorkers(self.config, self.queue)
        self._load_checkpoint()

    def on_step_end(self) -> None:
        """Stores the step's weights as a new version; before the first step, the initial ones."""
        self.replay_buffer.keep(self.global_steps, self.actor_rollout_wg.weights())

    on_init_end = on_step_end

    def on_sample_end(self) -> None:
        """Does nothing, since no server has to sleep."""

    def _validate(self) -> dict[str, float]:
        scores: list[float] = []
        for number, texts in enumerate(self.val_dataloader):
            names = [f"{number}-{row}" for row in range(len(texts["raw_prompt"]))]
            prompts = tu.get_tensordict({**texts, "uid": np.array(names, dtype=object)})
            tu.assign_non_tensor_data(prompts, "global_steps", self.global_steps)
            scores += self.replay_buffer.validate(prompts)
        return {HELD_OUT: sum(scores) / len(scores)}

    def prepare_step(self) -> dict:
        """Gives the next prompts to the rollout."""
        self.replay_buffer.submit(self._next_train_batch())
        return {}


def train(config: DictConfig, log: Path, trainer: type[OneProcessTrainer] | None = None) -> None:
    """Trains as `python -m verl.trainer.main_ppo` would, in this process.

    Args:
        log: file for the metrics of each step.
        trainer: a subclass to train with.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # This must precede the start, which makes this process the owner of the log.
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    auto_set_device(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    OmegaConf.resolve(config)
    torch.manual_seed(config.data.seed)
    # Where torch was imported first, OMP_NUM_THREADS comes too late; on a busy machine threads wait for each other.
    torch.set_num_threads(1)
    with queue_of_trainer() as queue:
        training = (trainer or OneProcessTrainer)(config, queue)
        training.init()
        training.fit(None)
    training.logger.finish(exit_code=0)
