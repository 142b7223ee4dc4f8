"""What a run announces about its loss, by the formulas alone: the gradient that log_prob must have."""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.apart import RESOLVED, ROUNDING, apart, largest_known
from verl_clipx.losses.applying.loss import apply, make_shaped_tokens, token_statistics
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.masks import apply_mask_rule, mean_over_sequence
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.record import RunRecord
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


class Moving(Enum):
    """What goes by itself from one draw of log-ratios to another in a probe."""

    TOKENS = "each token"
    # As for bounds on a sequence's ratio.
    SEQUENCES = "each sequence"
    BATCH = "all tokens together"
    # As for bounds that adapt to the signs' balance: the log-ratios stay, and the positive tokens' advantages grow.
    BALANCE = "the positive tokens' advantages"


class Announced:
    """The gradient that the policy's term must have on the log-probabilities of a micro-batch.

    Attributes:
        step: the optimizer step.
        model_output: of the micro-batch, as verl's engine gives it, without its graph.
        data: verl's data of the micro-batch.
        inputs: what the method sees: a mask without what verl's own code rejects, and advantages in Lopti's pass alone.
        other_tokens: how many tokens are in the mask although verl's trainer should have rejected them, or the reverse.
        more_tokens: whether some of them are in the mask although verl's trainer should have rejected them.
        resolved: how far a gradient may differ, relative to a token's.
        gradient_of_other_terms: the gradient of what verl adds to the policy's term, such as a KL term, (tokens,).
        rows: the hashes of its rows by field, from `hash_rows_by_field`.
        factors: what each backward pass that reaches the loss multiplies it by.
        gradients: the gradient on log_prob of each backward pass that reaches it.
    """

    def __init__(self, settings: Settings, record: RunRecord, step: OptimizerStep, model_output: Any, data: Any):
        self._settings = settings
        self._record = record
        self.step = step
        self.data = data
        self._formulas = (settings.method, settings.shaping)
        self.rows: dict[Any, list[int]] = {}
        self.factors: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.model_output, log_probs = with_leaf(model_output)
        self.resolved = RESOLVED[log_probs.dtype]
        self.gradient_of_other_terms = torch.zeros_like(log_probs)
        micro_batch = micro_batch_of(settings, step, data, model_output)
        response_mask, advantages, old = (
            pad_rows(data[key]) for key in ("response_mask", "advantages", "old_log_probs")
        )
        self._whole = response_mask.bool()
        mask = response_mask.bool()
        log_prob = response_part(log_probs, data, response_mask.shape[1])
        log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
        correction = record.correction
        left_by_trainer_code = left_by_trainer(correction, data)
        self.other_tokens = int((mask != left_by_trainer_code).sum())
        self.more_tokens = bool((mask & ~left_by_trainer_code).any())
        if correction.rejects_in_loss:
            mask = left_by_verl(correction, mask, log_prob - old)
        else:
            mask = mask & left_by_trainer_code
        self._kept = mask if micro_batch.counted is None else micro_batch.counted
        tensors = {"log_prob": log_prob, "old_log_prob": old, "advantages": advantages.where(self._kept, 0)}
        self.inputs = inputs_of(settings, micro_batch, **tensors, mask=mask)
        self._at_ratio_1 = self.inputs._replace(log_prob=old, advantages=advantages, mask=response_mask.bool())
        averaged = mask
        batch_tokens = data["batch_num_tokens"]
        self._selected = mask
        if settings.select is not None:
            self._selected = selected = settings.select.selected(micro_batch.entropy, mask, step.entropy_bucket)
            self._kept = self._kept & (selected | ~micro_batch.entropy.isfinite())
            if settings.select.normaliser == "selected":
                averaged = selected
                batch_tokens = batch_tokens if step.selected_tokens is None else step.selected_tokens
        sizes = {key: data[key] for key in ("dp_size", "global_batch_size")}
        sizes |= {"batch_num_tokens": batch_tokens, "loss_scale_factor": record.scale_factor}
        self._share = shares_of(averaged, record.aggregation_mode, log_prob.dtype, **sizes)
        if "rollout_is_weights" in data:
            self._share = self._share * pad_rows(data["rollout_is_weights"])

    def difference(self, gradient: Tensor) -> tuple[float, int]:
        """Compare the gradient of the whole loss on log_prob, (tokens,), with the announced one.

        A token is not compared where what is announced is not finite: verl skips such an update.

        Returns:
            The largest difference of a token's gradient, relative to the token's: infinite if the gradient of a
            compared token is not finite, and NaN if no token was compared. And how many tokens of the responses were
            compared.
        """
        announced = torch.stack([self._gradient(moved) for moved in (0.0, ROUNDING, -ROUNDING)])
        differences = apart(gradient, announced, self.at_ratio_1(), self.gradient_of_other_terms)
        of_responses = in_model_output(self._whole.to(differences.dtype), self.data, len(differences)) > 0
        return largest_known(differences), int((of_responses & ~differences.isnan()).sum())

    def at_ratio_1(self) -> Tensor:
        """Return the gradient that the policy's term would have at F = 1, but for its sign, (tokens,)."""
        return self._in_output(make_shaped_tokens(*self._formulas, self.inputs).advantages)

    def sums(self) -> Tensor:
        """Return what this micro-batch adds to an update's sums.

        Returns:
            float64: the numbers of the sequences, of the tokens that verl counts, of those that the method counts and
            of those that are selected; then the method's statistics.
        """
        whole = self.data["response_mask"]
        counted = whole if self.inputs.counted is None else self.inputs.counted
        counted_by_verl = self.data.get("loss_mask", whole)
        sequences = torch.ones(len(self._selected))
        masks = [sequences, counted_by_verl, counted, self._selected]
        counts = torch.stack([pad_rows(mask).sum(dtype=torch.float64).cpu() for mask in masks])
        inputs = self.inputs
        if self.step.decided_from is DecidedFrom.RATIO_ONE:
            inputs = self._at_ratio_1._replace(mask=apply_mask_rule(self._settings.mask, self._at_ratio_1))
        first_stage = None
        if self.step.statistics is not None:
            first_stage = self.step.statistics[: self._settings.method.statistics_size]
        statistics = token_statistics(*self._formulas, inputs, first_stage)
        return torch.cat([counts, statistics.cpu()])

    def rollout_apart(self) -> float:
        """Return the largest distance of a token's old_log_prob from the rollout's log-probability, in nats."""
        if "rollout_log_probs" not in self.data:
            return 0.0
        mask, old, rollout = fields_in(self.data, "response_mask", "old_log_probs", "rollout_log_probs")
        return float((old - rollout).where(mask.bool(), 0).abs().max())

    def weights_apart(self, normaliser: float | None) -> tuple[float, float | None, Tensor]:
        """Compare the weights of verl's rollout correction with those that verl's own code gives.

        Args:
            normaliser: what the weights are divided by, where verl normalises them; None: these weights tell it.

        Returns:
            The largest difference of a weight, relative to that of verl's code; what the weights are divided by; and
            the sum and the number of the weights that verl normalises, float64, infinite or NaN if some are unknown.
        """
        mask, weights = fields_in(self.data, "response_mask", "rollout_is_weights")
        correction = self._record.correction
        around = weights_by_verl(correction, self.data)
        if around is None:
            return 0.0, normaliser, torch.zeros(2, dtype=torch.float64)
        first = around[0]
        there = masks_in(self.data)[1]
        if correction.weights == "sequence":
            first = first.amax(1)
            there = there.any(1)
        sums = torch.stack([values.sum(dtype=torch.float64).cpu() for values in (first, there)])
        known = mask.bool() & around.isfinite().all(0)
        weights = weights.where(known, 0).double()
        around = around.where(known, 0).double()
        if normaliser is None and around[0].any():
            normalised = correction.weights_normalised and weights.any()
            normaliser = float(around[0].sum() / weights.sum()) if normalised else 1.0
        low = around.amin(0) / (normaliser or 1.0)
        high = around.amax(0) / (normaliser or 1.0)
        apart = torch.maximum(low - weights, weights - high).clamp(min=0) / high.clamp(min=1e-12)
        return float(apart.max()), normaliser, sums / bool(whole_rows(correction, self.data).all())

    def bounds_apart(self, *decisions: Tensor) -> float:
        """Return the largest difference of the bounds under two decisions, relative to half the first ones' width."""
        bounds_of_decisions = []
        for decision in decisions:
            bounds = apply(*self._formulas, self.inputs, decision).bounds
            bounds_of_decisions.append(torch.stack([torch.as_tensor(bound, dtype=torch.float64) for bound in bounds]))
        first, second = bounds_of_decisions
        low, high = first
        half_width = ((high - low) / 2).nan_to_num(1.0, posinf=1.0).clamp(min=1e-12)
        # Two infinite bounds are equal, but their difference is NaN.
        difference = torch.where(first == second, 0.0, (first - second).abs() / half_width)
        return float(difference.max())

    def probe(self, number: int) -> "Announced":
        """Announce the gradient of a copy with made-up log-ratios, close to where tokens cease to have one.

        The magnitudes of the copy's advantages are from 0.01 to 100.

        On the way from one draw of log-ratios to another, tokens cease to have a gradient or begin to have one: that is
        at a bound, whatever it acts on. What goes this way by itself is by turns each of `Moving`.

        Args:
            number: that of the probe, from 0; the same number makes the same probe.
        """
        generator = torch.Generator().manual_seed(2000 + number)
        mask = self.inputs.mask
        # Every sixth probe begins at a ratio of 1, and each of its tokens goes outward from there.
        outward = number % 6 == 3
        moving = Moving.TOKENS if outward else list(Moving)[number % len(Moving)]
        shape = {Moving.TOKENS: mask.shape, Moving.SEQUENCES: (len(mask), 1)}.get(moving, (1, 1))

        def draw(low: float, high: float, shape: tuple[int, ...] = (1, 1)) -> Tensor:
            """Return numbers that are uniform between two bounds."""
            return torch.rand(shape, generator=generator).to(mask.device) * (high - low) + low

        def draw_log_ratios() -> Tensor:
            """Return log-ratios, (sequences, length), of any size.

            What a token, a sequence and all tokens have in common is any share of it.
            """
            of_token = 10 ** draw(-2, 0) * draw(-1, 1, mask.shape)
            of_sequence = 10 ** draw(-2, 0) * draw(-1, 1, (len(mask), 1))
            of_all = 10 ** draw(-2, 0) * draw(-1, 1, (1, 1))
            log_ratios = of_token - mean_over_sequence(of_token, mask) + of_sequence + of_all
            return (10 ** draw(-2.5, 2.5) * log_ratios).clamp(-28, 28)

        positive = draw(0, 1, mask.shape) > draw(0, 1)
        size = 10 ** draw(-1, 1, mask.shape)
        balance = draw(-1, 1)
        start = draw_log_ratios()
        end = draw_log_ratios()
        halvings = int(draw(4, 11))
        output = self.model_output
        log_prob = self.inputs.log_prob.float()
        if outward:
            start = torch.zeros_like(start)
            end = torch.where(positive, 1, -1) * 10 ** draw(-0.5, 0.5, mask.shape)
            halvings = int(draw(4, 8))
            output = self._with_log_probs(draw(1e-3, 1, mask.shape).log())
            log_prob = response_part(output["log_probs"], self.data, mask.shape[1]).float()
        # Equal scores make advantages of 0, by tokens in some probes and by whole sequences in others.
        if moving in (Moving.TOKENS, Moving.SEQUENCES):
            size = size * (draw(0, 1, shape) > 0.15)

        def made_up(way: Tensor) -> Inputs:
            """Return the tokens at a place between the two draws of log-ratios, from 0 at the first to 1."""
            if moving is Moving.BALANCE:
                log_ratio = end
                advantages = torch.where(positive, 10 ** (2 * way - 1), -1.0) * size
            else:
                log_ratio = start + way * (end - start)
                advantages = torch.where(positive, 10**balance, -1.0) * size
            return self.inputs._replace(
                log_prob=log_prob,
                old_log_prob=log_prob - log_ratio,
                # Not as far away as the old policy's, so that the two are told apart.
                rollout_log_prob=log_prob - 0.8 * log_ratio,
                advantages=advantages,
            )

        low, high = self._narrow(made_up, moving, torch.zeros(shape, device=mask.device), halvings)
        probed = made_up(torch.lerp(low, high, draw(-0.5, 1.5, low.shape)))
        # Without the mask of the trainer's rejection, which was by the real log-probabilities.
        copy = self.data.exclude("loss_mask")
        dtype = pad_rows(self.data["advantages"]).dtype
        copy["old_log_probs"] = probed.old_log_prob
        copy["advantages"] = probed.advantages.to(dtype)
        if "rollout_log_probs" in copy:
            copy["rollout_log_probs"] = probed.rollout_log_prob
        if "rollout_is_weights" in copy:
            copy["rollout_is_weights"] = 10 ** draw(-1, 1, mask.shape)
        return Announced(self._settings, self._record, self.step, output, copy)

    def _with_log_probs(self, values: Tensor) -> dict[str, Any]:
        """Return the model's output with other log-probabilities of the response tokens, (sequences, length)."""
        log_probs = self.model_output["log_probs"]
        in_output = in_model_output(values.to(log_probs.dtype), self.data, len(flat(log_probs)))
        nothing_kept = torch.zeros_like(in_output, dtype=torch.bool)
        return {**self.model_output, "log_probs": where_kept(nothing_kept, log_probs, lambda _: in_output)}

    def _narrow(
        self, made_up: Callable[[Tensor], Inputs], moving: Moving, start: Tensor, halvings: int
    ) -> tuple[Tensor, Tensor]:
        """Narrow the way from 0 to 1 around the first place at which a token's gradient begins or ends.

        Args:
            made_up: returns the tokens at a place on the way.
            moving: what goes the way by itself.
            start: 0, of the shape of a place on the way.
            halvings: how often the way is halved; the less often, the farther from the bound its ends stay.

        Returns:
            The two ends of what is left of the way.
        """
        low = start
        high = torch.ones_like(start)
        has_gradient_at_start = self._weighted(made_up(low)) != 0
        for _ in range(halvings):
            middle = (low + high) / 2
            is_unchanged = (self._weighted(made_up(middle)) != 0) == has_gradient_at_start
            # Tokens that move together go on only if none of them has changed.
            if moving is not Moving.TOKENS:
                is_unchanged = is_unchanged.all(-1, keepdim=True)
            if moving in (Moving.BATCH, Moving.BALANCE):
                is_unchanged = is_unchanged.all(-2, keepdim=True)
            low = torch.where(is_unchanged, middle, low)
            high = torch.where(is_unchanged, high, middle)
        return low, high

    def _gradient(self, moved: float) -> Tensor:
        """Return the gradient with log_prob moved by some nats, (tokens,); NaN where an input is not finite."""
        inputs = self.inputs._replace(log_prob=self.inputs.log_prob + moved)
        return self._in_output(-self._weighted(inputs).where(self._kept, 0.0))

    def _weighted(self, inputs: Inputs) -> Tensor:
        """Return F * A of the tokens under the step's decision, or under their own if it has none."""
        return apply(*self._formulas, inputs, self.step.decision).weighted

    def _in_output(self, values: Tensor) -> Tensor:
        """Put values of tokens, each times its share in the loss, where the model's output for them stands."""
        return in_model_output(values * self._share, self.data, len(flat(self.model_output["log_probs"])))
