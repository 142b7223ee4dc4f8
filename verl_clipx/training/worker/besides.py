"""What verl's loss function adds to the policy's term, by verl's own formulas: KL, entropy and distillation.

Here `config` is verl's ActorConfig, and `model_output` and `data` are what verl's loss function gets for a micro-batch.
"""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.training.worker.layout import flat, with_leaf


def gradient_of_verls_terms(loss_fn: Any, model_output: Any, data: Any, moved: float = 0.0) -> Tensor | None:
    """Return the gradient of `verls_terms` on the log-probabilities.

    Args:
        loss_fn: verl's loss function, a partial with the ActorConfig.
        model_output: the model's output for the micro-batch.
        data: verl's data of the micro-batch.
        moved: what is added to every log-probability, in nats.

    Returns:
        (tokens,); None if the terms are not known.
    """
    output, leaf = with_leaf(model_output)
    with torch.enable_grad():
        if moved:
            output["log_probs"] = output["log_probs"] + moved
        terms = verls_terms(loss_fn, output, data)
        if terms is None:
            return None
        # Terms that do not depend on the log-probabilities have a gradient of 0.
        return torch.autograd.grad(terms + 0.0 * leaf.sum(), leaf)[0]


def verls_terms(loss_fn: Any, model_output: Any, data: Any) -> Tensor | None:
    """Return the sum of what verl's loss function adds to the policy's term.

    Under distillation without task rewards there is no policy's term, and this is the whole loss.

    Args:
        loss_fn: verl's loss function, a partial with the ActorConfig and, under distillation, its configuration.
        model_output: the model's output for the micro-batch.
        data: verl's data of the micro-batch.

    Returns:
        0-d; None if the function is bound to no ActorConfig, so that its terms are not known.
    """
    config = getattr(loss_fn, "keywords", {}).get("config")
    if config is None:
        return None
    from verl.trainer.distillation.losses import distillation_loss, is_distillation_enabled

    distillation = loss_fn.keywords.get("distillation_config")
    if not is_distillation_enabled(distillation):
        return terms_of_ppo(config, model_output, data)
    distilled = distillation_loss(config, distillation, model_output, data)[0]
    if not distillation.distillation_loss.use_task_rewards:
        return distilled
    coefficient = distillation.distillation_loss.distillation_loss_coef
    return terms_of_ppo(config, model_output, data) + coefficient * distilled


def terms_of_ppo(config: Any, model_output: Any, data: Any) -> Tensor:
    """Return what verl's ppo_loss adds to the policy's term, 0-d."""
    terms = torch.zeros((), device=flat(model_output["log_probs"]).device)
    if model_output.get("entropy") is not None:
        terms = terms + entropy_term(config, model_output, data)
    if config.use_kl_loss:
        terms = terms + kl_term(config, model_output, data)
    return terms


def entropy_term(config: Any, model_output: Any, data: Any) -> Tensor:
    """Return what verl's ppo_loss adds for the entropy: minus the entropy bonus, 0-d."""
    from verl.workers.utils.padding import no_padding_2_padding

    entropy = no_padding_2_padding(model_output["entropy"], data)
    mask = data.select("response_mask").to_padded_tensor()["response_mask"].to(bool)
    bonus = aggregate_over_batch(entropy, mask, config, data) * config.entropy_coeff
    return -bonus


def kl_term(config: Any, model_output: Any, data: Any) -> Tensor:
    """Return the KL loss that verl's ppo_loss adds under use_kl_loss, times its coefficient, 0-d."""
    from verl.trainer.ppo.core_algos import kl_penalty
    from verl.workers.utils.padding import no_padding_2_padding

    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    fields = data.select("response_mask", "ref_log_prob").to_padded_tensor()
    divergence = kl_penalty(logprob=log_prob, ref_logprob=fields["ref_log_prob"], kl_penalty=config.kl_loss_type)
    mask = fields["response_mask"].to(bool)
    return aggregate_over_batch(divergence, mask, config, data) * config.kl_loss_coef


def aggregate_over_batch(values: Tensor, mask: Tensor, config: Any, data: Any) -> Tensor:
    """Return this micro-batch's part of verl's aggregate over the mini-batch, by the run's loss_agg_mode, 0-d.

    Args:
        values: of tokens, (sequences, response length).
        mask: the tokens that count, bool, of that shape.
        config: verl's ActorConfig.
        data: verl's data of the micro-batch, which has the sizes of the mini-batch.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    return agg_loss(
        values,
        mask,
        config.loss_agg_mode,
        dp_size=data["dp_size"],
        batch_num_tokens=data["batch_num_tokens"],
        global_batch_size=data["global_batch_size"],
        loss_scale_factor=config.loss_scale_factor,
    )
