"""What verl's loss function adds to the policy's term, by verl's own formulas: KL, entropy and distillation."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.training.worker.layout import flat, with_leaf


def gradient_of_verls_terms(loss_fn: Any, model_output: Any, data: Any, moved: float = 0.0) -> Tensor | None:
    """Returns the gradient on the log-probabilities that these terms have, (tokens,); None if they are not known.

    Args:
        loss_fn: verl's loss function, a partial with the ActorConfig.
        model_output, data: as verl's loss function gets them.
        moved: what is added to every log-probability, in nats.
    """
    output, leaf = with_leaf(model_output)
    with torch.enable_grad():
        if moved:
            output["log_probs"] = output["log_probs"] + moved
        terms = verls_terms(loss_fn, output, data)
        return None if terms is None else torch.autograd.grad(terms + 0.0 * leaf.sum(), leaf)[0]


def verls_terms(loss_fn: Any, model_output: Any, data: Any) -> Tensor | None:
    """Returns the sum of these terms, 0-d; None if they are not known. The arguments are as above."""
    config = getattr(loss_fn, "keywords", {}).get("config")
    if config is None:
        return None
    from verl.trainer.distillation.losses import distillation_loss, is_distillation_enabled

    distillation = loss_fn.keywords.get("distillation_config")
    if not is_distillation_enabled(distillation):
        return terms_of_ppo(config, model_output, data)
    own = distillation.distillation_loss
    distilled = distillation_loss(config, distillation, model_output, data)[0]
    if not own.use_task_rewards:
        return distilled
    return terms_of_ppo(config, model_output, data) + own.distillation_loss_coef * distilled


def terms_of_ppo(config: Any, model_output: Any, data: Any) -> Tensor:
    """Returns what verl's ppo_loss adds to the policy's term, 0-d."""
    terms = torch.zeros((), device=flat(model_output["log_probs"]).device)
    if model_output.get("entropy") is not None:
        terms = terms + entropy_term(config, model_output, data)
    if config.use_kl_loss:
        terms = terms + kl_term(config, model_output, data)
    return terms


def entropy_term(config: Any, output: Any, data: Any) -> Tensor:
    """Returns the entropy bonus, as verl's ppo_loss computes it, 0-d."""
    from verl.workers.utils.padding import no_padding_2_padding

    mask = data.select("response_mask").to_padded_tensor()["response_mask"].to(bool)
    return -mean_over_batch(no_padding_2_padding(output["entropy"], data), mask, config, data) * config.entropy_coeff


def kl_term(config: Any, output: Any, data: Any) -> Tensor:
    """Returns the term of use_kl_loss, as verl's ppo_loss computes it, 0-d."""
    from verl.trainer.ppo.core_algos import kl_penalty
    from verl.workers.utils.padding import no_padding_2_padding

    log_prob = no_padding_2_padding(output["log_probs"], data)
    fields = data.select("response_mask", "ref_log_prob").to_padded_tensor()
    divergence = kl_penalty(logprob=log_prob, ref_logprob=fields["ref_log_prob"], kl_penalty=config.kl_loss_type)
    mask = fields["response_mask"].to(bool)
    return mean_over_batch(divergence, mask, config, data) * config.kl_loss_coef


def mean_over_batch(values: Tensor, mask: Tensor, config: Any, data: Any) -> Tensor:
    """Returns this micro-batch's part of verl's mean of tokens' values over the mini-batch, 0-d."""
    from verl.trainer.ppo.core_algos import agg_loss

    sizes = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")}
    return agg_loss(values, mask, config.loss_agg_mode, **sizes, loss_scale_factor=config.loss_scale_factor)
