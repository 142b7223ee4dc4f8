"""What a run announces about its loss, by the formulas alone: the gradient that log_prob must have."""

import functools
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import Method
from verl_clipx.loss.loss import apply, tokens_in
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_RS
from verl_clipx.worker.aggregation import shares_of
from verl_clipx.worker.layout import flat, in_model_output, padded, response_part
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import left_by_trainer, left_by_verl
from verl_clipx.worker.step import MicroBatch

# A token's gradient counts as at least this share of what it is at F = 1: a clipped token's is 0.
LEAST = 0.01

# A token whose gradient changes by more than the second number's share when log_prob moves by the first, in nats, is at
# a bound, beyond which rounding alone may put it. It is not compared.
ROUNDING, STEADY = 1e-6, 0.05


class Announced:
    """The gradient that the policy's term must have on the log-probabilities of a micro-batch.

    Args:
        known: what the worker knows of the micro-batch.
        model_output, data: the arguments of verl's loss function.

    Attributes:
        inputs: what the method sees: a mask without what verl's own code rejects, and advantages in Lopti's pass alone.
    """

    def __init__(self, settings: Settings, run: RunFacts, known: MicroBatch, model_output: Any, data: Any):
        self._settings, self._data, self._total = settings, data, len(flat(model_output["log_probs"]))
        mask, advantages, old = (padded(data[key]) for key in ("response_mask", "advantages", "old_log_probs"))
        mask, log_prob = mask.bool(), response_part(model_output["log_probs"], data, mask.shape[1])
        log_prob, kept = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32)), known.counted
        if run.options.get(ROLLOUT_RS) is not None:
            if run.options.get(BYPASS):
                mask = left_by_verl(run.options, mask, log_prob - old)
            else:
                mask = left_by_trainer(run.options, data)
        if kept is not None:
            advantages = advantages.where(kept, 0)
        tensors = {"log_prob": log_prob, "old_log_prob": old, "advantages": advantages, "mask": mask}
        self.inputs = inputs_of(settings, known, **tensors)
        averaged, number, self._kept = mask, data["batch_num_tokens"], mask if kept is None else kept
        if settings.select is not None:
            selected = settings.select.selected(known.entropy, mask, known.step.entropy_bucket)
            self._kept = self._kept & (selected | ~known.entropy.isfinite())
            if settings.select.normaliser == "selected":
                averaged = selected
                number = number if known.step.selected_tokens is None else known.step.selected_tokens
        sizes = {key: data[key] for key in ("dp_size", "global_batch_size")} | {"batch_num_tokens": number}
        sizes["loss_scale_factor"] = run.loss_scale_factor
        self._share = shares_of(averaged, run.loss_agg_mode, log_prob.dtype, **sizes)
        if "rollout_is_weights" in data:
            self._share = self._share * padded(data["rollout_is_weights"])
        self._announces = settings.method, known.step.decision
        self._gradient = self.gradient(*self._announces)
        self._unit = self._flat(tokens_in(settings.method, settings.shaping, self.inputs).advantages.abs())

    @functools.cached_property
    def _steady(self) -> Tensor:
        """Which tokens are not at a bound, bool, (tokens,)."""
        moved = torch.stack([self.gradient(*self._announces, by) for by in (ROUNDING, -ROUNDING)])
        at_bound = (moved - self._gradient).abs() > STEADY * torch.maximum(self._gradient.abs(), LEAST * self._unit)
        # Not finite: compared, because the gradient must not be finite there either.
        return ~at_bound.any(0)

    def gradient(self, method: Method, decision: Tensor | None, moved: float = 0.0) -> Tensor:
        """The gradient on each of the model's tokens under a method, (tokens,); NaN where an input is not finite.

        Args:
            decision: the method's; None: its own on these tokens.
            moved: added to every log-probability, in nats.
        """
        inputs = self.inputs._replace(log_prob=self.inputs.log_prob + moved)
        weighted = apply(method, self._settings.shaping, inputs, decision).weighted
        return self._flat(-weighted.where(self._kept, 0.0))

    def difference(self, gradient: Tensor, besides: Tensor | float = 0.0) -> Tensor:
        """The largest difference of a token's gradient from the announced one, relative to the token's, 0-d float64.

        It is infinite if the gradient is not finite where all that is announced is; if that is not finite either,
        nothing is compared and it is 0, because verl skips such an update.

        Args:
            gradient: of the whole loss, (tokens,).
            besides: what verl adds to the policy's term, such as a KL term, (tokens,).
        """
        of_dtype = torch.finfo(gradient.dtype)
        whole = (self._gradient + besides).clamp(-of_dtype.max, of_dtype.max)
        size = torch.maximum(torch.maximum(self._gradient.abs(), (whole - self._gradient).abs()), LEAST * self._unit)
        apart = (gradient.to(whole.dtype) - whole).abs() / size.clamp(min=of_dtype.smallest_normal)
        apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
        # Only then must it be known which tokens are at a bound.
        if apart.any():
            apart = apart.where(self._steady, 0.0)
        return torch.where(whole.isfinite().all(), apart.max(), 0.0).double()

    def _flat(self, values: Tensor) -> Tensor:
        return in_model_output(values * self._share, self._data, self._total)
