"""What a run announces about its loss, computed directly by the formulas: the gradient that log_prob must have."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.tokens import Tokens
from verl_clipx.loss.loss import finite, token_statistics, tokens_in
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_IS, ROLLOUT_RS, WITH_ROLLOUT_RS
from verl_clipx.worker.layout import padded, response_part
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.step import MicroBatch


class Call(NamedTuple):
    """The arguments with which verl's loss function is called in training."""

    micro_batch: MicroBatch
    model_output: Any
    data: Any


class Announced(NamedTuple):
    """What the policy's term must do to log_prob.

    Args:
        gradient: the loss's gradient, (sequences, response length); NaN where an input is not finite.
        unit: the size of the gradient at F = 1, (sequences, response length).
        tokens: what it was computed from.
    """

    gradient: Tensor
    unit: Tensor
    tokens: Tokens


def announced_gradient(
    settings: Settings,
    run: RunFacts,
    call: Call,
    *,
    moved: float = 0.0,
) -> Announced:
    """The gradient that the policy's term must have on log_prob.

    Args:
        call: what verl's loss function gets.
        moved: added to every log-probability, in nats.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    known, data, method = call.micro_batch, call.data, settings.method
    whole = padded(data["response_mask"]).bool()
    log_prob = response_part(call.model_output["log_probs"], data, whole.shape[1])
    if moved:
        log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32)) + moved
    old = padded(data["old_log_probs"])
    mask = left_in_bypass_mode(run, whole, log_prob - old)
    inputs = inputs_of(
        settings, known, log_prob=log_prob, old_log_prob=old, advantages=padded(data["advantages"]), mask=mask
    )
    decision = known.step.decision
    if decision is None:
        decision = method.decide(token_statistics(method, settings.shaping, inputs))
    tokens = tokens_in(method, settings.shaping, inputs)
    weight = method.gradient_weight(tokens, method.bounds(tokens, decision))
    weighted = torch.where(finite(tokens), method.gradient(tokens, weight), torch.nan)
    unit = tokens.advantages.abs()
    if "rollout_is_weights" in data:
        weighted, unit = (of * padded(data["rollout_is_weights"]) for of in (weighted, unit))
    weighted, averaged, number = torch.where(mask, weighted, 0.0), mask, data["batch_num_tokens"]
    if settings.select is not None:
        selected = settings.select.selected(known.entropy, averaged, known.step.entropy_bucket)
        weighted = torch.where(selected | ~known.entropy.isfinite(), weighted, 0.0)
        if settings.select.normaliser == "selected":
            averaged = selected
            number = number if known.step.selected_tokens is None else known.step.selected_tokens
    with torch.enable_grad():
        ones = torch.ones_like(weighted, requires_grad=True)
        total = agg_loss(
            loss_mat=ones,
            loss_mask=averaged,
            loss_agg_mode=run.loss_agg_mode,
            dp_size=data["dp_size"],
            batch_num_tokens=number,
            global_batch_size=data["global_batch_size"],
            loss_scale_factor=run.loss_scale_factor,
        )
    (of_token,) = torch.autograd.grad(total, ones)
    return Announced(-weighted * of_token, unit * of_token, tokens)


def left_in_bypass_mode(run: RunFacts, mask: Tensor, log_ratio: Tensor) -> Tensor:
    """The tokens that verl's own bypass loss would keep, by verl's own code: bool, (sequences, response length).

    Args:
        mask: all tokens of the responses, bool.
        log_ratio: relative to the rollout policy.
    """
    if not run.options.get(BYPASS) or run.options.get(ROLLOUT_RS) is None:
        return mask
    return left_by_verl(run.options, mask, log_ratio)


def left_by_verl(options: Mapping[str, Any], mask: Tensor, log_ratio: Tensor) -> Tensor:
    """The tokens that verl's rejection keeps: bool, (sequences, response length).

    Args:
        options: the run's keys of `verl_keys.READ` with their values.
        mask: bool, (sequences, response length).
        log_ratio: relative to the rollout policy, (sequences, response length).
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not mask.any():
        return mask
    names, threshold = options[ROLLOUT_RS], options.get(WITH_ROLLOUT_RS[0])
    return compute_rollout_rejection_mask(log_ratio, mask, names, threshold)[0].bool()


def missing_corrections(options: Mapping[str, Any], data: Any) -> Iterator[str]:
    """The corrections that verl's trainer should have made in decoupled mode and has not, each in words.

    Args:
        options: the run's keys of `verl_keys.READ` with their values.
        data: verl's micro-batch.
    """
    if options.get(BYPASS):
        return
    if options.get(ROLLOUT_IS) is not None and "rollout_is_weights" not in data:
        yield f"the samples came without the weights of {ROLLOUT_IS}={options[ROLLOUT_IS]}"
    if options.get(ROLLOUT_RS) is None or not {"rollout_log_probs", "loss_mask"} <= set(data.keys()):
        return
    whole, mask = (padded(data[key]).bool() for key in ("loss_mask", "response_mask"))
    if whole.shape != mask.shape:
        return
    # A jagged tensor that does not know its longest row is padded to the length of all rows together.
    width = mask.shape[1]
    old, rollout = (padded(data[key])[:, :width] for key in ("old_log_probs", "rollout_log_probs"))
    # If the trainer rejects in both masks, a sequence's divergence can be computed only from the tokens that are left.
    several = len(str(options[ROLLOUT_RS]).split(",")) > 1
    wrong = int((mask & ~left_by_verl(options, whole, old - rollout)).sum())
    if wrong and not (several and torch.equal(whole, mask)):
        yield f"{wrong} tokens that {ROLLOUT_RS}={options[ROLLOUT_RS]} rejects came as if it did not"
