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
from verl_clipx.training.worker.layout import as_output, flat, in_model_output, pad_rows, response_part, with_leaf
from verl_clipx.training.worker.rejection import (
    fields_in,
    has_mask_before_rejection,
    kept_by_trainer,
    kept_by_verl,
    masks_in,
    weights_by_verl,
)
from verl_clipx.training.worker.rows import Field
from verl_clipx.training.worker.step import OptimizerStep, inputs_of, micro_batch_of


class Moving(Enum):
    """What moves independently of the rest in a probe, on the way from its start to its end."""

    # Each token's log-ratio.
    TOKENS = "each token"
    # The log-ratios of a sequence together, as for bounds on a sequence's ratio.
    SEQUENCES = "each sequence"
    # All log-ratios together.
    BATCH = "all tokens together"
    # The positive tokens' advantages together, as for bounds that adapt to the signs' balance. The log-ratios stay.
    BALANCE = "the positive tokens' advantages"

    def shape_of_place(self, mask: Tensor) -> tuple[int, int]:
        """Return the shape of a place on the way, which has a number for everything that moves independently.

        Args:
            mask: (sequences, length).
        """
        sequences, length = mask.shape
        if self is Moving.TOKENS:
            return sequences, length
        if self is Moving.SEQUENCES:
            return sequences, 1
        return 1, 1


class Announced:
    """The gradient that the policy's term must have on the log-probabilities of a micro-batch.

    Args:
        settings: the run's.
        record: what the driver announces.
        step: the optimizer step, whose decision makes the bounds; without one the micro-batch decides for itself.
        model_output, data: as verl's engine gives them to the loss.

    Attributes:
        step: the optimizer step.
        model_output: of the micro-batch, as verl's engine gives it, without its graph.
        data: verl's data of the micro-batch.
        inputs: what the method sees. The mask is without the tokens that verl's own code rejects or +clipx/mask takes
            out. Advantages are 0 outside Lopti's pass or, without Lopti, for rejected tokens.
        wrongly_masked_tokens: how many tokens are in the mask although verl's trainer should have rejected them, or the
            reverse.
        trains_rejected_tokens: whether some of them are in the mask although verl's trainer should have rejected them.
        resolved: how far a gradient may differ, relative to a token's.
        gradient_of_other_terms: the gradient of what verl adds to the policy's term, such as a KL term, (tokens,). It
            is 0 until the receipt fills it in.
        rows: from a field to the hashes of the micro-batch's rows, as `hash_rows_by_field` returns them. It is empty
            until the receipt fills it in.
        factors: what each backward pass that reaches the loss multiplies it by. The receipt has the passes add them.
        gradients: the gradient on log_prob of each backward pass that reaches it, (tokens,). The receipt has the passes
            add them.
    """

    def __init__(self, settings: Settings, record: RunRecord, step: OptimizerStep, model_output: Any, data: Any):
        self._settings = settings
        self._record = record
        self._formulas = (settings.method, settings.shaping)
        self.step = step
        self.data = data
        self.rows: dict[Field, list[int]] = {}
        self.factors: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.model_output, log_probs = with_leaf(model_output)
        self.resolved = RESOLVED[log_probs.dtype]
        self.gradient_of_other_terms = torch.zeros_like(log_probs)
        micro_batch = micro_batch_of(settings, step, data, model_output)
        response_mask = pad_rows(data["response_mask"])
        advantages = pad_rows(data["advantages"])
        old_log_prob = pad_rows(data["old_log_probs"])
        log_prob = response_part(log_probs, data, response_mask.shape[1])
        log_prob = log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))
        # The mask as it came.
        self._whole = response_mask.bool()
        remaining = self._reject(log_prob - old_log_prob)
        # The tokens that may have a gradient. Rejected ones can be among them under Lopti, but F * A is 0 outside the
        # mask of `inputs`.
        self._kept = remaining if micro_batch.counted is None else micro_batch.counted
        self.inputs = inputs_of(
            settings,
            micro_batch,
            log_prob=log_prob,
            old_log_prob=old_log_prob,
            advantages=advantages.where(self._kept, 0),
            mask=remaining,
        )
        self._inputs_at_ratio_1 = self.inputs._replace(log_prob=old_log_prob, advantages=advantages, mask=self._whole)
        # The tokens that entropy selection keeps, and those that the loss averages over.
        self._selected = remaining
        averaged = remaining
        batch_num_tokens = data["batch_num_tokens"]
        if settings.select is not None:
            self._selected = settings.select.selected(micro_batch.entropy, remaining, step.entropy_bucket)
            # A token whose loss is not finite is always kept. Without it, verl would not skip the step.
            self._kept = self._kept & (self._selected | ~micro_batch.entropy.isfinite())
            if settings.select.normaliser == "selected":
                averaged = self._selected
                if step.selected_tokens is not None:
                    batch_num_tokens = step.selected_tokens
        # The factor of each token's loss in the scalar loss.
        self._share = shares_of(
            averaged,
            record.aggregation_mode,
            log_prob.dtype,
            dp_size=data["dp_size"],
            global_batch_size=data["global_batch_size"],
            batch_num_tokens=batch_num_tokens,
            loss_scale_factor=record.scale_factor,
        )
        if "rollout_is_weights" in data:
            self._share = self._share * pad_rows(data["rollout_is_weights"])

    def _reject(self, log_ratio: Tensor) -> Tensor:
        """Compare the mask with what verl's trainer should have rejected; return the tokens that verl's code keeps.

        Args:
            log_ratio: of the current to the old policy, (sequences, response length).

        Returns:
            bool, (sequences, response length).
        """
        correction = self._record.correction
        expected = kept_by_trainer(correction, self.data)
        self.wrongly_masked_tokens = int((self._whole != expected).sum())
        self.trains_rejected_tokens = bool((self._whole & ~expected).any())
        if correction.rejects_in_loss:
            # The old policy is the one that sampled.
            return kept_by_verl(correction, self._whole, log_ratio)
        return self._whole & expected

    def difference(self, gradient: Tensor) -> tuple[float, int]:
        """Compare the gradient of the whole loss on log_prob, (tokens,), with the announced one.

        A token is not compared where what is announced is not finite: verl skips such an update.

        Returns:
            The largest difference of a token's gradient, relative to the token's: infinite if the gradient of a
            compared token is not finite, and NaN if no token was compared. And how many tokens of the responses were
            compared.
        """
        announced = torch.stack([self._gradient(moved) for moved in (0.0, ROUNDING, -ROUNDING)])
        differences = apart(gradient, announced, self.gradient_at_ratio_1(), self.gradient_of_other_terms)
        of_responses = in_model_output(self._whole.to(differences.dtype), self.data, len(differences)) > 0
        return largest_known(differences), int((of_responses & ~differences.isnan()).sum())

    def gradient_at_ratio_1(self) -> Tensor:
        """Return the gradient that the policy's term would have at F = 1, but for its sign, (tokens,)."""
        return self._in_output(make_shaped_tokens(*self._formulas, self.inputs).advantages)

    def sums(self) -> Tensor:
        """Return what this micro-batch adds to an update's sums.

        Returns:
            float64: the numbers of the sequences, of the tokens that verl counts, of those that the method counts and
            of those that are selected; then the method's statistics.
        """
        response_mask = self.data["response_mask"]
        sequences = torch.ones(len(self._selected))
        counted_by_verl = self.data.get("loss_mask", response_mask)
        counted = response_mask if self.inputs.counted is None else self.inputs.counted
        masks = [sequences, counted_by_verl, counted, self._selected]
        counts = torch.stack([pad_rows(mask).sum(dtype=torch.float64).cpu() for mask in masks])
        inputs = self.inputs
        if self.step.decided_from is DecidedFrom.RATIO_ONE:
            inputs = self._inputs_at_ratio_1
            inputs = inputs._replace(mask=apply_mask_rule(self._settings.mask, inputs))
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
            the sum and the number of the weights that verl normalises, float64, (2,), NaN if some are unknown.
        """
        correction = self._record.correction
        verls_weights_moved = weights_by_verl(correction, self.data)
        if verls_weights_moved is None:
            return 0.0, normaliser, torch.zeros(2, dtype=torch.float64)
        response_mask, weights = fields_in(self.data, "response_mask", "rollout_is_weights")
        sum_and_number = self._sum_weights(verls_weights_moved[0])
        is_known = response_mask.bool() & verls_weights_moved.isfinite().all(0)
        weights = weights.where(is_known, 0).double()
        verls_weights_moved = verls_weights_moved.where(is_known, 0).double()
        verls_weights = verls_weights_moved[0]
        if normaliser is None and verls_weights.any():
            normaliser = 1.0
            if correction.weights_normalised and weights.any():
                normaliser = float(verls_weights.sum() / weights.sum())
        # A weight between those at log-ratios that rounding has moved is as announced.
        low = verls_weights_moved.amin(0) / (normaliser or 1.0)
        high = verls_weights_moved.amax(0) / (normaliser or 1.0)
        differences = torch.maximum(low - weights, weights - high).clamp(min=0) / high.clamp(min=1e-12)
        return float(differences.max()), normaliser, sum_and_number

    def _sum_weights(self, verls_weights: Tensor) -> Tensor:
        """Return the sum and the number of the weights that verl normalises, float64, (2,); NaN if some are unknown.

        Args:
            verls_weights: those of verl's own code before it normalises them, (sequences, response length).
        """
        correction = self._record.correction
        if not has_mask_before_rejection(correction, self.data).all():
            return torch.full((2,), torch.nan, dtype=torch.float64)
        _, has_weight = masks_in(self.data)
        if correction.weights == "sequence":
            # A sequence has one weight, which stands at each of its tokens, with 0 elsewhere.
            verls_weights = verls_weights.amax(1)
            has_weight = has_weight.any(1)
        return torch.stack([values.sum(dtype=torch.float64).cpu() for values in (verls_weights, has_weight)])

    def bounds_apart(self, first: Tensor, second: Tensor) -> float:
        """Return the largest difference of the bounds under two decisions, relative to half the first ones' width."""
        first_bounds = self._bounds(first)
        second_bounds = self._bounds(second)
        low, high = first_bounds
        half_width = ((high - low) / 2).nan_to_num(1.0, posinf=1.0).clamp(min=1e-12)
        # Two infinite bounds are equal, but their difference is NaN.
        is_equal = first_bounds == second_bounds
        differences = torch.where(is_equal, 0.0, (first_bounds - second_bounds).abs() / half_width)
        return float(differences.max())

    def _bounds(self, decision: Tensor) -> Tensor:
        """Return the lower and the upper bounds under a decision, float64, (2, ...)."""
        low, high = apply(*self._formulas, self.inputs, decision).bounds
        return torch.stack([torch.as_tensor(low, dtype=torch.float64), torch.as_tensor(high, dtype=torch.float64)])

    def probe(self, number: int) -> "Announced":
        """Announce the gradient of a copy with made-up log-ratios, close to where tokens cease to have one.

        The magnitudes of the copy's advantages are from 0.01 to 100.

        On the way from one draw of log-ratios, the start, to another, the end, tokens cease to have a gradient or begin
        to have one: that is at a bound, whatever the bound acts on. The copy is made of a place around the first one at
        which this happens. Successive probes take turns in what moves on this way; see `Moving`.

        Args:
            number: that of the probe, from 0; the same number makes the same probe.
        """
        generator = torch.Generator().manual_seed(2000 + number)
        mask = self.inputs.mask
        # Every sixth probe starts at a ratio of 1, and each of its tokens moves outward from there: a positive one to
        # higher ratios, a negative one to lower ones.
        is_outward = number % 6 == 3
        moving = list(Moving)[number % len(Moving)]
        if is_outward:
            moving = Moving.TOKENS
        shape = moving.shape_of_place(mask)

        def draw(low: float, high: float, shape: tuple[int, ...] = (1, 1)) -> Tensor:
            """Return numbers that are uniform between two bounds."""
            return torch.rand(shape, generator=generator).to(mask.device) * (high - low) + low

        def draw_log_ratios() -> Tensor:
            """Return log-ratios, (sequences, length).

            Each is the sum of a part of its token, one of its sequence, and one that all tokens share. The size of each
            part and that of the whole are drawn as well.
            """
            of_token = 10 ** draw(-2, 0) * draw(-1, 1, mask.shape)
            of_sequence = 10 ** draw(-2, 0) * draw(-1, 1, (len(mask), 1))
            of_all = 10 ** draw(-2, 0) * draw(-1, 1, (1, 1))
            log_ratios = of_token - mean_over_sequence(of_token, mask) + of_sequence + of_all
            return (10 ** draw(-2.5, 2.5) * log_ratios).clamp(-28, 28)

        is_positive = draw(0, 1, mask.shape) > draw(0, 1)
        size = 10 ** draw(-1, 1, mask.shape)
        # How much larger a positive token's advantage is than a negative one's of the same size, as a power of 10.
        balance = draw(-1, 1)
        start = draw_log_ratios()
        end = draw_log_ratios()
        halvings = int(draw(4, 11))
        output = self.model_output
        log_prob = self.inputs.log_prob.float()
        if is_outward:
            start = torch.zeros_like(start)
            end = torch.where(is_positive, 1, -1) * 10 ** draw(-0.5, 0.5, mask.shape)
            halvings = int(draw(4, 8))
            # The probabilities of its tokens are made up as well.
            output = self._with_log_probs(draw(1e-3, 1, mask.shape).log())
            log_prob = response_part(output["log_probs"], self.data, mask.shape[1]).float()
        # Equal scores make advantages of 0, by tokens in some probes and by whole sequences in others.
        if moving in (Moving.TOKENS, Moving.SEQUENCES):
            size = size * (draw(0, 1, shape) > 0.15)

        def make_up(place: Tensor) -> Inputs:
            """Return the tokens at a place on the way, from 0 at the start to 1 at the end, of the shape above."""
            if moving is Moving.BALANCE:
                log_ratio = end
                advantages = torch.where(is_positive, 10 ** (2 * place - 1), -1.0) * size
            else:
                log_ratio = start + place * (end - start)
                advantages = torch.where(is_positive, 10**balance, -1.0) * size
            return self.inputs._replace(
                log_prob=log_prob,
                old_log_prob=log_prob - log_ratio,
                # Not as far away as the old policy's, so that the two are told apart.
                rollout_log_prob=log_prob - 0.8 * log_ratio,
                advantages=advantages,
            )

        low, high = self._narrow(make_up, moving, torch.zeros(shape, device=mask.device), halvings)
        probed = make_up(torch.lerp(low, high, draw(-0.5, 1.5, low.shape)))
        data = self._data_with(probed, weights=10 ** draw(-1, 1, mask.shape))
        return Announced(self._settings, self._record, self.step, output, data)

    def _data_with(self, probed: Inputs, weights: Tensor) -> Any:
        """Return a copy of verl's data with the old policy, the rollout and the advantages of a probe.

        Args:
            probed: the probe's tokens.
            weights: those of the rollout correction, (sequences, length); they replace the data's, if it has any.
        """
        # Without the mask before the trainer's rejection, which was by the real log-probabilities.
        data = self.data.exclude("loss_mask")
        data["old_log_probs"] = probed.old_log_prob
        data["advantages"] = probed.advantages.to(pad_rows(self.data["advantages"]).dtype)
        if "rollout_log_probs" in data:
            data["rollout_log_probs"] = probed.rollout_log_prob
        if "rollout_is_weights" in data:
            data["rollout_is_weights"] = weights
        return data

    def _with_log_probs(self, values: Tensor) -> dict[str, Any]:
        """Return the model's output with other log-probabilities of the response tokens, (sequences, length)."""
        log_probs = self.model_output["log_probs"]
        in_output = in_model_output(values.to(log_probs.dtype), self.data, len(flat(log_probs)))
        return {**self.model_output, "log_probs": as_output(in_output, log_probs)}

    def _narrow(
        self, make_up: Callable[[Tensor], Inputs], moving: Moving, start: Tensor, halvings: int
    ) -> tuple[Tensor, Tensor]:
        """Narrow the way from 0 to 1 around the first place at which a token's gradient begins or ends.

        Args:
            make_up: returns the tokens at a place on the way.
            moving: what moves independently on the way.
            start: the place 0, of the shape of a place on the way.
            halvings: how often the way is halved; the less often, the farther from the bound its ends stay.

        Returns:
            The two ends of what is left of the way, of the shape of a place on it.
        """
        low = start
        high = torch.ones_like(start)
        has_gradient_at_start = self._weighted(make_up(low)) != 0
        for _ in range(halvings):
            middle = (low + high) / 2
            is_unchanged = (self._weighted(make_up(middle)) != 0) == has_gradient_at_start
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
