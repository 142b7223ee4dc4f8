"""What a run announces about its loss, by the formulas alone: the gradient that log_prob must have."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.tokens import Inputs
from verl_clipx.loss.loss import apply
from verl_clipx.run.config import Settings
from verl_clipx.run.hydra_nodes import RunFacts
from verl_clipx.run.support import BYPASS, ROLLOUT_RS
from verl_clipx.worker.layout import flat, in_model_output, padded, response_part
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import left_by_verl
from verl_clipx.worker.step import MicroBatch

# A token's gradient counts as at least this share of what it is at F = 1: a clipped token's is 0.
LEAST = 0.01

# A token whose gradient changes by more than the second number's share when log_prob moves by the first, in nats, is at
# a bound, beyond which rounding alone may put it. It is not compared.
ROUNDING, STEADY = 1e-6, 0.05


class Announced(NamedTuple):
    """The gradient that the policy's term must have on the model's log-probabilities; the first three are (tokens,).

    Args:
        gradient: of the loss; NaN where an input is not finite.
        unit: the size of the gradient at F = 1.
        steady: bool; False for tokens that rounding may put on the other side of a bound.
        inputs: what the method sees.
    """

    gradient: Tensor
    unit: Tensor
    steady: Tensor
    inputs: Inputs

    def difference(self, gradient: Tensor, besides: Tensor | float = 0.0) -> Tensor:
        """The largest difference of a token's gradient, relative to the token's, 0-d float64.

        It is infinite if the gradient is not finite where all that is announced is; if that is not finite either,
        nothing is compared and it is 0, because verl skips such an update.

        Args:
            gradient: of the whole loss.
            besides: what verl adds to the policy's term, such as a KL term.
        """
        of_dtype = torch.finfo(gradient.dtype)
        whole = (self.gradient + besides).clamp(-of_dtype.max, of_dtype.max)
        size = torch.maximum(torch.maximum(self.gradient.abs(), (whole - self.gradient).abs()), LEAST * self.unit)
        apart = (gradient.to(whole.dtype) - whole).abs() / size.clamp(min=of_dtype.smallest_normal)
        apart = apart.where(self.steady, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        return torch.where(whole.isfinite().all(), apart.max(), 0.0).double()


def announce(settings: Settings, run: RunFacts, known: MicroBatch, model_output: Any, data: Any) -> Announced:
    """What the run's line says of a micro-batch.

    Args:
        known: what the worker knows of the micro-batch.
        model_output, data: the arguments of verl's loss function.
    """
    inputs, total = announced_inputs(settings, run, known, model_output, data), len(flat(model_output["log_probs"]))

    def moved(by: float) -> tuple[Tensor, Tensor]:
        of = inputs._replace(log_prob=inputs.log_prob + by)
        return announced_gradient(settings, run, known, of, data, total)

    gradient, unit = moved(0.0)
    changed = torch.stack([moved(by)[0] - gradient for by in (ROUNDING, -ROUNDING)]).abs()
    # Not finite: compared, because the gradient must not be finite there either.
    at_bound = (changed > STEADY * torch.maximum(gradient.abs(), LEAST * unit)).any(0)
    return Announced(gradient, unit, ~at_bound, inputs)


def announced_gradient(
    settings: Settings, run: RunFacts, known: MicroBatch, inputs: Inputs, data: Any, total: int
) -> tuple[Tensor, Tensor]:
    """The announced gradient of each of the model's tokens and its size at F = 1, (tokens,) each.

    Args:
        inputs: what the method sees.
        total: number of tokens of all prompts and responses.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    averaged, number, kept = inputs.mask, data["batch_num_tokens"], inputs.mask
    if settings.select is not None:
        selected = settings.select.selected(known.entropy, inputs.mask, known.step.entropy_bucket)
        kept = selected | ~known.entropy.isfinite()
        if settings.select.normaliser == "selected":
            averaged = selected
            number = number if known.step.selected_tokens is None else known.step.selected_tokens
    if inputs.counted is not None:
        kept = kept & inputs.counted
    with torch.enable_grad():
        ones = torch.ones_like(inputs.log_prob, requires_grad=True)
        sizes = {key: data[key] for key in ("dp_size", "global_batch_size")} | {"batch_num_tokens": number}
        loss = agg_loss(ones, averaged, run.loss_agg_mode, loss_scale_factor=run.loss_scale_factor, **sizes)
    share = torch.autograd.grad(loss, ones)[0]
    if "rollout_is_weights" in data:
        share = share * padded(data["rollout_is_weights"])
    applied = apply(settings.method, settings.shaping, inputs, known.step.decision)
    gradient, unit = -applied.weighted.where(kept, 0.0) * share, applied.tokens.advantages.abs() * share
    return in_model_output(gradient, data, total), in_model_output(unit, data, total)


def announced_inputs(settings: Settings, run: RunFacts, known: MicroBatch, model_output: Any, data: Any) -> Inputs:
    """What the method sees of a micro-batch: a mask without what verl's code rejects, advantages of Lopti's pass."""
    whole, advantages = padded(data["response_mask"]).bool(), padded(data["advantages"])
    log_prob, old = response_part(model_output["log_probs"], data, whole.shape[1]), padded(data["old_log_probs"])
    log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
    mask, rejects = whole, run.options.get(ROLLOUT_RS) is not None
    if rejects and run.options.get(BYPASS):
        mask = left_by_verl(run.options, whole, log_prob - old)
    elif rejects and {"rollout_log_probs", "loss_mask"} <= set(data.keys()):
        mask = whole & left_by_trainer(run.options, whole, old, data)
    if known.counted is not None:
        advantages = advantages.where(known.counted, 0)
    return inputs_of(settings, known, log_prob=log_prob, old_log_prob=old, advantages=advantages, mask=mask)


def left_by_trainer(options: Mapping[str, Any], mask: Tensor, old: Tensor, data: Any) -> Tensor:
    """The tokens that verl's trainer should have left in decoupled mode, as far as the data tell.

    Args:
        mask: what it has left, bool, (sequences, response length).
        old: the old policy's log-probabilities.
    """
    # Jagged tensors that do not know their longest row are padded to the length of all rows together.
    every, rollout = (padded(data[key])[:, : mask.shape[1]] for key in ("loss_mask", "rollout_log_probs"))
    # If the trainer rejects in both masks, a sequence's divergence can be computed only from the tokens that are left.
    if "," in str(options[ROLLOUT_RS]) and torch.equal(every.bool(), mask):
        return mask
    return left_by_verl(options, every.bool(), old[:, : mask.shape[1]] - rollout)
