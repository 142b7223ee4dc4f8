"""What verl's loss function adds to the policy's term, by verl's own formulas: KL, entropy and distillation."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.training.worker.layout import with_leaf


def gradient_of_verls_terms(loss_fn: Any, model_output: Any, data: Any, moved: float = 0.0) -> Tensor | None:
    """Returns the gradient on the log-probabilities that these terms have, (tokens,); None if they are not known.

    The entropy is an output of its own, by which its bonus has no gradient on them.

    Args:
        loss_fn: verl's loss function, a partial with the ActorConfig.
        model_output, data: as verl's loss function gets them.
        moved: what is added to every log-probability, in nats.
    """
    config = getattr(loss_fn, "keywords", {}).get("config")
    if config is None:
        return None
    from verl.trainer.distillation.losses import distillation_loss, is_distillation_enabled

    output, leaf = with_leaf(model_output)
    with torch.enable_grad():
        if moved:
            output["log_probs"] = output["log_probs"] + moved
        loss = 0.0 * leaf.sum()
        if config.use_kl_loss:
            loss = loss + kl_term(config, output, data)
        distillation = loss_fn.keywords.get("distillation_config")
        if is_distillation_enabled(distillation):
            own = distillation.distillation_loss
            share = own.distillation_loss_coef if own.use_task_rewards else 1.0
            loss = loss + share * distillation_loss(config, distillation, output, data)[0]
        return torch.autograd.grad(loss, leaf)[0]


def kl_term(config: Any, output: Any, data: Any) -> Tensor:
    """Returns the term of use_kl_loss, as verl's ppo_loss computes it, 0-d."""
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
    from verl.workers.utils.padding import no_padding_2_padding

    log_prob = no_padding_2_padding(output["log_probs"], data)
    fields = data.select("response_mask", "ref_log_prob").to_padded_tensor()
    divergence = kl_penalty(logprob=log_prob, ref_logprob=fields["ref_log_prob"], kl_penalty=config.kl_loss_type)
    sizes = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    mask = fields["response_mask"].to(bool)
    mean = agg_loss(divergence, mask, config.loss_agg_mode, **sizes, loss_scale_factor=config.loss_scale_factor)
    return mean * config.kl_loss_coef
