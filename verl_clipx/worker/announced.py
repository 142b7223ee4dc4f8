"""What a run announces about its loss, by the formulas alone: the gradient that log_prob must have."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import Bounds, Method
from verl_clipx.loss.loss import apply, token_statistics, tokens_in
from verl_clipx.modifiers.masks import remaining
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_RS
from verl_clipx.worker.aggregation import shares_of
from verl_clipx.worker.layout import flat, in_model_output, pad_rows, response_part
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import left_by_trainer, left_by_verl
from verl_clipx.worker.step import MicroBatch

# How far two gradients may differ, relative to a token's, by the dtype of log_prob.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# A token's gradient counts as at least this share of what it is at F = 1: a clipped token's is 0.
LEAST = 0.01
# A token whose gradient changes by more than the second number's share when log_prob moves by the first, in nats, is at
# a bound, beyond which rounding alone may put it. It is not compared.
ROUNDING, STEADY = 1e-6, 0.05


class Announced:
    """The gradient that the policy's term must have on the log-probabilities of a micro-batch.

    Attributes:
        inputs: what the method sees: a mask without what verl's own code rejects, and advantages in Lopti's pass alone.
        rejected: the number of tokens that verl's own code rejects.
        resolved: how far a gradient may differ, relative to a token's.
        divisor: the mini-batch's number of tokens, as the loss is told.
        sums: the tokens that verl counts, those that the method counts, and the method's statistics, float64.
        factor, compared: of a loss that is followed, its gradient and the difference of that on log_prob.
    """

    def __init__(self, settings: Settings, run: RunFacts, known: MicroBatch, model_output: Any, data: Any):
        self._settings, self._data, self._total = settings, data, len(flat(model_output["log_probs"]))
        self.resolved = RESOLVED[flat(model_output["log_probs"]).dtype]
        whole, advantages, old = (pad_rows(data[key]) for key in ("response_mask", "advantages", "old_log_probs"))
        mask, log_prob = whole.bool(), response_part(model_output["log_probs"], data, whole.shape[1])
        log_prob, kept = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32)), known.counted
        if run.options.get(ROLLOUT_RS) is not None:
            by_loss = run.options.get(BYPASS)
            mask = left_by_verl(run.options, mask, log_prob - old) if by_loss else left_by_trainer(run.options, data)
        self.rejected = int((whole.bool() & ~mask).sum())
        if kept is not None:
            advantages = advantages.where(kept, 0)
        tensors = {"log_prob": log_prob, "old_log_prob": old, "advantages": advantages, "mask": mask}
        inputs = inputs_of(settings, known, **tensors)
        self.inputs = inputs._replace(mask=remaining(settings.mask, inputs))
        averaged, number, self._kept = mask, data["batch_num_tokens"], mask if kept is None else kept
        if settings.select is not None:
            selected = settings.select.selected(known.entropy, mask, known.step.entropy_bucket)
            self._kept = self._kept & (selected | ~known.entropy.isfinite())
            if settings.select.normaliser == "selected":
                averaged = selected
                number = number if known.step.selected_tokens is None else known.step.selected_tokens
        sizes = {"batch_num_tokens": number, "loss_scale_factor": run.loss_scale_factor}
        sizes |= {key: data[key] for key in ("dp_size", "global_batch_size")}
        self._share = shares_of(averaged, run.loss_agg_mode, log_prob.dtype, **sizes)
        if "rollout_is_weights" in data:
            self._share = self._share * pad_rows(data["rollout_is_weights"])
        self._announces = settings.method, known.step.decision
        self._gradient = self.gradient(*self._announces)
        counted = whole.bool() if kept is None else kept
        of_verl = pad_rows(data.get("loss_mask", whole))
        tokens = torch.stack([mask.sum(dtype=torch.float64) for mask in (of_verl, counted)])
        planned = known.step.statistics
        first = None if planned is None else planned[: settings.method.statistics_size]
        self.sums = torch.cat([tokens, token_statistics(settings.method, settings.shaping, self.inputs, first)])
        self.divisor, self.factor, self.compared = round(data["batch_num_tokens"]), [], []
        self._unit = self._flat(tokens_in(settings.method, settings.shaping, self.inputs).advantages.abs())

    def gradient(self, method: Method, decision: Tensor | None, moved: float = 0.0) -> Tensor:
        """The gradient under a method with log_prob moved by some nats, (tokens,); NaN where an input is not finite."""
        inputs = self.inputs._replace(log_prob=self.inputs.log_prob + moved)
        weighted = apply(method, self._settings.shaping, inputs, decision).weighted
        return self._flat(-weighted.where(self._kept, 0.0))

    def difference(self, gradient: Tensor, besides: Tensor | float = 0.0) -> float:
        """The largest difference of a token's gradient, of the whole loss, from the announced one, relative to that.

        `besides` is what verl adds to the policy's term, such as a KL term; all are (tokens,). It is infinite if the
        gradient is not finite where all that is announced is, and 0 if that is not either: verl skips such an update.
        """
        of_dtype = torch.finfo(gradient.dtype)
        whole = (self._gradient + besides).clamp(-of_dtype.max, of_dtype.max)
        size = torch.maximum(torch.maximum(self._gradient.abs(), (whole - self._gradient).abs()), LEAST * self._unit)
        apart = (gradient.to(whole.dtype) - whole).abs() / size.clamp(min=of_dtype.smallest_normal)
        apart = apart.nan_to_num(nan=torch.inf, posinf=torch.inf)
        if not whole.isfinite().all():
            return 0.0
        # Only then must it be known which tokens are at a bound.
        return float(apart.where(self._is_steady(), 0.0).max()) if apart.any() else 0.0

    def follow(self, loss: Tensor, log_probs: Tensor, besides: Tensor) -> None:
        """Compares the gradient that the backward pass of a loss brings to the model's log-probabilities."""

        def compare(gradient: Tensor) -> None:
            hook.remove()
            if self.factor:
                self.compared.append(self.difference(flat(gradient) / self.factor[0], besides))

        loss.register_hook(self.factor.append)
        hook = log_probs.register_hook(compare)

    def bounds(self, decision: Tensor) -> Bounds:
        """The tokens' bounds under another decision."""
        return apply(self._settings.method, self._settings.shaping, self.inputs, decision).bounds

    @property
    def distance_from_1(self) -> float:
        """The mean distance of the tokens' ratios from 1, in nats."""
        moved, mask = (self.inputs.log_prob - self.inputs.old_log_prob).abs().double(), self.inputs.mask
        return float(moved.where(mask & moved.isfinite(), 0.0).sum() / mask.sum().clamp(min=1))

    def _is_steady(self) -> Tensor:
        moved = torch.stack([self.gradient(*self._announces, by) for by in (ROUNDING, -ROUNDING)])
        at_bound = (moved - self._gradient).abs() > STEADY * torch.maximum(self._gradient.abs(), LEAST * self._unit)
        # Not finite: compared, because the gradient must not be finite there either.
        return ~at_bound.any(0)

    def _flat(self, values: Tensor) -> Tensor:
        return in_model_output(values * self._share, self._data, self._total)
