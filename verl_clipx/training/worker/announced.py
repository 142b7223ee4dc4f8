"""What a run announces about its loss, by the formulas alone: the gradient that log_prob must have."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.apart import RESOLVED, ROUNDING, apart, largest_known
from verl_clipx.losses.applying.loss import apply, token_statistics, tokens_in
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import mean_over_sequence, remaining
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.keys import BYPASS, LOSS_SCALE_FACTOR, ROLLOUT_IS, ROLLOUT_RS, WITH_ROLLOUT_IS
from verl_clipx.training.worker.aggregation import shares_of
from verl_clipx.training.worker.layout import flat, in_model_output, pad_rows, response_part, where_kept, with_leaf
from verl_clipx.training.worker.rejection import (
    fields_in,
    left_by_trainer,
    left_by_verl,
    masks_in,
    weights_by_verl,
    whole_rows,
)
from verl_clipx.training.worker.step import OptimizerStep, inputs_of, micro_batch_of


class Announced:
    """The gradient that the policy's term must have on the log-probabilities of a micro-batch.

    Attributes:
        step, model_output, data: the optimizer step, and the micro-batch as verl's engine gives it, without its graph.
        inputs: what the method sees: a mask without what verl's own code rejects, and advantages in Lopti's pass alone.
        other_tokens, more_tokens: how many tokens are in the mask that verl's trainer should have rejected, or lack
            there; and whether some are of the first kind.
        resolved: how far a gradient may differ, relative to a token's.
        besides: the gradient of what verl adds to the policy's term, such as a KL term, (tokens,).
        rows: the hashes of its rows by field, from `rows_of`.
        factors, gradients: of the backward passes that reach the loss, and log_prob.
    """

    def __init__(self, settings: Settings, run: RunFacts, step: OptimizerStep, model_output: Any, data: Any):
        self._settings, self._run, self.step, self.data = settings, run, step, data
        self._formulas = (settings.method, settings.shaping)
        self.rows: dict[Any, list[int]] = {}
        self.factors: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.model_output, log_probs = with_leaf(model_output)
        self.resolved, self.besides = RESOLVED[log_probs.dtype], torch.zeros_like(log_probs)
        known = micro_batch_of(settings, step, data, model_output)
        whole, advantages, old = (pad_rows(data[key]) for key in ("response_mask", "advantages", "old_log_probs"))
        self._whole = whole.bool()
        mask, log_prob = whole.bool(), response_part(log_probs, data, whole.shape[1])
        log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
        left = left_by_trainer(run.options, data)
        self.other_tokens, self.more_tokens = int((mask != left).sum()), bool((mask & ~left).any())
        if run.options.get(BYPASS) and run.options.get(ROLLOUT_RS) is not None:
            mask = left_by_verl(run.options, mask, log_prob - old)
        else:
            mask = mask & left
        self._kept = mask if known.counted is None else known.counted
        tensors = {"log_prob": log_prob, "old_log_prob": old, "advantages": advantages.where(self._kept, 0)}
        self.inputs = inputs_of(settings, known, **tensors, mask=mask)
        self._at_ratio_1 = self.inputs._replace(log_prob=old, advantages=advantages, mask=whole.bool())
        averaged, number, self._selected = mask, data["batch_num_tokens"], mask
        if settings.select is not None:
            self._selected = selected = settings.select.selected(known.entropy, mask, step.entropy_bucket)
            self._kept = self._kept & (selected | ~known.entropy.isfinite())
            if settings.select.normaliser == "selected":
                averaged, number = selected, number if step.selected_tokens is None else step.selected_tokens
        sizes = {key: data[key] for key in ("dp_size", "global_batch_size")}
        sizes |= {"batch_num_tokens": number, "loss_scale_factor": run.options.get(LOSS_SCALE_FACTOR)}
        self._share = shares_of(averaged, run.loss_agg_mode, log_prob.dtype, **sizes)
        if "rollout_is_weights" in data:
            self._share = self._share * pad_rows(data["rollout_is_weights"])

    def difference(self, gradient: Tensor) -> tuple[float, int]:
        """Returns the largest relative difference of a token's gradient, of the whole loss, from the announced one, and
        how many tokens of the responses were compared.

        A token is not compared where what is announced is not finite: verl skips such an update. The difference is
        infinite if the gradient, (tokens,), is not finite elsewhere, and NaN if no token was compared.
        """
        announced = torch.stack([self._gradient(by) for by in (0.0, ROUNDING, -ROUNDING)])
        differences = apart(gradient, announced, self.at_ratio_1(), self.besides)
        of_responses = in_model_output(self._whole.to(differences.dtype), self.data, len(differences)) > 0
        return largest_known(differences), int((of_responses & ~differences.isnan()).sum())

    def at_ratio_1(self) -> Tensor:
        """Returns the gradient that the policy's term would have at F = 1, but for its sign, (tokens,)."""
        return self._in_output(tokens_in(*self._formulas, self.inputs).advantages)

    def sums(self) -> Tensor:
        """Counts the sequences, the tokens that verl counts, those that the method counts and those that are selected,
        and returns these numbers with the method's statistics, float64.
        """
        planned, whole, inputs = self.step.statistics, self.data["response_mask"], self.inputs
        if self.step.decided_from is DecidedFrom.RATIO_ONE:
            inputs = self._at_ratio_1._replace(mask=remaining(self._settings.mask, self._at_ratio_1))
        first = None if planned is None else planned[: self._settings.method.statistics_size]
        counted = whole if self.inputs.counted is None else self.inputs.counted
        masks = torch.ones(len(self._selected)), self.data.get("loss_mask", whole), counted, self._selected
        tokens = torch.stack([pad_rows(mask).sum(dtype=torch.float64).cpu() for mask in masks])
        return torch.cat([tokens, token_statistics(*self._formulas, inputs, first).cpu()])

    def rollout_apart(self) -> float:
        """Returns the largest distance of a token's old_log_prob from the rollout's log-probability, in nats."""
        if "rollout_log_probs" not in self.data:
            return 0.0
        mask, old, rollout = fields_in(self.data, "response_mask", "old_log_probs", "rollout_log_probs")
        return float((old - rollout).where(mask.bool(), 0).abs().max())

    def weights_apart(self, normaliser: float | None) -> tuple[float, float | None, Tensor]:
        """Returns the largest difference of a weight of verl's correction from its own code's, relative to that; what
        the weights are divided by, which the first ones tell where verl normalises them; and the sum and the number of
        those that it normalises, float64, infinite or NaN if some are unknown.
        """
        mask, weights = fields_in(self.data, "response_mask", "rollout_is_weights")
        options, around = self._run.options, weights_by_verl(self._run.options, self.data)
        if around is None:
            return 0.0, normaliser, torch.zeros(2, dtype=torch.float64)
        first, there = around[0], masks_in(self.data)[1]
        if options.get(ROLLOUT_IS) == "sequence":
            first, there = first.amax(1), there.any(1)
        sums = torch.stack([of.sum(dtype=torch.float64).cpu() for of in (first, there)])
        known = mask.bool() & around.isfinite().all(0)
        weights, around = weights.where(known, 0).double(), around.where(known, 0).double()
        if normaliser is None and around[0].any():
            normalised = options.get(WITH_ROLLOUT_IS[1]) and weights.any()
            normaliser = float(around[0].sum() / weights.sum()) if normalised else 1.0
        low, high = around.amin(0) / (normaliser or 1.0), around.amax(0) / (normaliser or 1.0)
        apart = torch.maximum(low - weights, weights - high).clamp(min=0) / high.clamp(min=1e-12)
        return float(apart.max()), normaliser, sums / bool(whole_rows(options, self.data).all())

    def bounds_apart(self, *decisions: Tensor) -> float:
        """Returns the largest difference of the bounds under two decisions, relative to half the first ones' width."""
        bounds = [apply(*self._formulas, self.inputs, decision).bounds for decision in decisions]
        first, second = (torch.stack([torch.as_tensor(end, dtype=torch.float64) for end in of]) for of in bounds)
        half = ((first[1] - first[0]) / 2).nan_to_num(1.0, posinf=1.0).clamp(min=1e-12)
        # Infinite ones are equal.
        return float(torch.where(first == second, 0.0, (first - second).abs() / half).max())

    def probe(self, number: int) -> "Announced":
        """Announces the gradient of a copy with ratios near which one begins or ends, and |A| from 0.01 to 100.

        On the way from one draw of log-ratios to another, tokens cease to have a gradient or begin to have one: that is
        at a bound, whatever it acts on. By turns each token goes as far by itself; each sequence does, as for bounds on
        its ratio; all tokens do; and all do while only the positive tokens' advantages grow, as for bounds that adapt
        to the signs' balance. The same number, from 0, makes the same probe.
        """
        generator, mask = torch.Generator().manual_seed(2000 + number), self.inputs.mask
        outward = number % 6 == 3
        shapes, kind = (mask.shape, (len(mask), 1), (1, 1), (1, 1)), 0 if outward else number % 4

        def draw(low: float, high: float, shape: tuple[int, ...] = (1, 1)) -> Tensor:
            return torch.rand(shape, generator=generator).to(mask.device) * (high - low) + low

        def draw_log_ratios() -> Tensor:
            # What tokens, sequences and all of them have in common is of any size, and any share of the ratio.
            own, *common = (10 ** draw(-2, 0) * draw(-1, 1, shape) for shape in shapes[:3])
            return (10 ** draw(-2.5, 2.5) * sum(common, own - mean_over_sequence(own, mask))).clamp(-28, 28)

        positive, size, balance = draw(0, 1, mask.shape) > draw(0, 1), 10 ** draw(-1, 1, mask.shape), draw(-1, 1)
        start, end = draw_log_ratios(), draw_log_ratios()
        halvings, output, log_prob = int(draw(4, 11)), self.model_output, self.inputs.log_prob.float()
        if outward:
            start, end = torch.zeros_like(start), torch.where(positive, 1, -1) * 10 ** draw(-0.5, 0.5, mask.shape)
            halvings = int(draw(4, 8))
            values, log_probs = draw(1e-3, 1, mask.shape).log(), flat(output["log_probs"])
            made = in_model_output(values.to(log_probs.dtype), self.data, len(log_probs))
            replaced = where_kept(torch.zeros_like(made, dtype=torch.bool), output["log_probs"], lambda _: made)
            output = {**output, "log_probs": replaced}
            log_prob = response_part(replaced, self.data, mask.shape[1]).float()
        # Equal scores make advantages of 0, by tokens in some probes and by whole sequences in others.
        size = size * (draw(0, 1, shapes[kind]) > 0.15) if kind < 2 else size

        def made_up(way: Tensor) -> Inputs:
            at, larger = (torch.ones_like(way), 2 * way - 1) if kind == 3 else (way, balance)
            log_ratio, advantages = start + at * (end - start), torch.where(positive, 10**larger, -1.0) * size
            # The rollout policy's is another one, so that the two are told apart.
            old, rollout = (log_prob - share * log_ratio for share in (1, 0.8))
            made = dict(log_prob=log_prob, old_log_prob=old, rollout_log_prob=rollout)
            return self.inputs._replace(**made, advantages=advantages)

        low, high = (torch.full(shapes[kind], way, device=mask.device) for way in (0.0, 1.0))
        at_start = self._weighted(made_up(low)) != 0
        # The less often the way is halved, the farther from the bound.
        for _ in range(halvings):
            middle = (low + high) / 2
            same = (self._weighted(made_up(middle)) != 0) == at_start
            for axis in (-1, -2)[:kind]:
                same = same.all(axis, keepdim=True)
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        probed = made_up(torch.lerp(low, high, draw(-0.5, 1.5, low.shape)))
        # Without the mask of the trainer's rejection, which was by the real log-probabilities.
        copy, dtype = self.data.exclude("loss_mask"), pad_rows(self.data["advantages"]).dtype
        copy["old_log_probs"], copy["advantages"] = probed.old_log_prob, probed.advantages.to(dtype)
        if "rollout_log_probs" in copy:
            copy["rollout_log_probs"] = probed.rollout_log_prob
        if "rollout_is_weights" in copy:
            copy["rollout_is_weights"] = 10 ** draw(-1, 1, mask.shape)
        return Announced(self._settings, self._run, self.step, output, copy)

    def _gradient(self, moved: float) -> Tensor:
        """Returns the gradient with log_prob moved by some nats, (tokens,); NaN where an input is not finite."""
        inputs = self.inputs._replace(log_prob=self.inputs.log_prob + moved)
        return self._in_output(-self._weighted(inputs).where(self._kept, 0.0))

    def _weighted(self, inputs: Inputs) -> Tensor:
        return apply(*self._formulas, inputs, self.step.decision).weighted

    def _in_output(self, values: Tensor) -> Tensor:
        return in_model_output(values * self._share, self.data, len(flat(self.model_output["log_probs"])))
