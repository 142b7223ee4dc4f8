"""For VERL_USE_EXTERNAL_MODULES: verl's v1 trainer also logs how far rollout and actor are apart on fresh tokens.

A token is fresh if the weights that the actor has when the rollout batch is trained have sampled it: the last token of
a sequence that the current version finished, and all tokens of one that it also began. verl's own metric is over all
tokens, of which colocate_async has stale ones.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from wrapt import when_imported

PREFIX = "rollout_agreement"


def fresh_tokens(mask: Tensor, first: Tensor, last: Tensor, version: int) -> Tensor:
    """Which tokens of the responses, of which `mask` tells padding apart, the current weights have sampled for certain.

    `first` and `last` are the versions of the weights that began and that finished each sequence.
    """
    final = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    whole = mask & (first == version)[:, None]
    return (final | whole) & (last == version)[:, None]


def agreement(rollout: Tensor, actor: Tensor, mask: Tensor, first: Tensor, last: Tensor, version: int) -> dict:
    """The metrics of a rollout batch, from the rollout's and the actor's log-probabilities."""
    fresh = fresh_tokens(mask, first, last, version)
    metrics = {f"{PREFIX}/fresh_tokens": int(fresh.sum())}
    if fresh.any():
        metrics[f"{PREFIX}/log_prob_gap"] = float((rollout - actor).abs()[fresh].max())
    return metrics


def _install(module: Any) -> None:
    original = module.PPOTrainer._compute_old_log_prob

    @functools.wraps(original)
    def compute_old_log_prob(self, batch, metrics):
        batch = original(self, batch, metrics)
        fields = ["rollout_log_probs", "old_log_probs", "response_mask"]
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        data = data.to_padded_tensor()
        first, last = (torch.tensor([tag[f"{end}_global_steps"] for tag in batch.tags]) for end in ("min", "max"))
        # Weights are sent before the first step, as version 0, and after each.
        version = self.global_steps - 1
        mask = data["response_mask"].bool()
        metrics.update(agreement(data["rollout_log_probs"], data["old_log_probs"], mask, first, last, version))
        return batch

    module.PPOTrainer._compute_old_log_prob = compute_old_log_prob


when_imported("verl.trainer.ppo.v1.trainer_base")(_install)
