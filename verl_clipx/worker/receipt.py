"""The receipt: compares what a run's loss does to log_prob with what the run's line announces, in the first updates.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on the first micro-batch with old log-probabilities and advantages that the receipt
makes up: once as it is, and once with the registered loss replaced by one that returns 0. The difference of the two
gradients is the policy's term, whatever else verl adds, and it must be F * A as announced. Three more things must hold:
the gradient of the real backward pass is that of the whole loss; the statistics from the extra pass are those of the
tokens that are trained on; and the first rollout batch gets as many updates as announced. Later rollout batches cost
nothing.
"""

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.driver.config import Settings
from verl_clipx.driver.hydra_nodes import RunFacts
from verl_clipx.driver.support import BYPASS, ROLLOUT_RS
from verl_clipx.worker.announced import (
    Call,
    announced_gradient,
    announced_weight,
    left_in_bypass_mode,
    missing_corrections,
)
from verl_clipx.worker.layout import flat, padded, response_part
from verl_clipx.worker.probe import PROBES, RATIOS, Difference, difference, leaf_of, no_policy_loss, probed
from verl_clipx.worker.rollout_gap import compared_with_rollout, gap_to_rollout
from verl_clipx.worker.step import OptimizerStep, RolloutBatch, in_micro_batch

logger = logging.getLogger(__name__)

# A token tells methods apart if its F differs from 1 by more than the first number. A micro-batch of a later update is
# compared only if at least the second number's share of its tokens do.
APART, SHARE_APART = 0.05, 0.01

# The sum of the statistics' absolute values may differ by this share between the extra pass and the training pass: less
# than a missing micro-batch changes it, and more than rounding does.
SAME_TOKENS = 0.01


class Receipt:
    """Compares what one rank's first updates do with what the run announces.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        called: (step, model_output, data) -> the arguments that the loss function gets in training.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rank: of this process; rank 0 prints the receipt.
        stops: whether a difference stops the run; if not, it is only logged as a warning.

    Attributes:
        open: whether the receipt still compares updates. Once it is closed, updates cost nothing.
    """

    def __init__(
        self,
        settings: Settings,
        run: RunFacts,
        loss_fn: Callable[..., Any],
        called: Callable[[OptimizerStep, Any, Any], Call],
        all_reduce: Callable[[Tensor], Tensor],
        *,
        rank: int,
        stops: bool,
    ):
        self.open = True
        self._all_reduce, self._rank = all_reduce, rank
        self._settings, self._run, self._stops = settings, run, stops
        self._loss_fn, self._called = loss_fn, called
        self._announced: Difference | None = None
        # How many of the compared tokens verl would reject.
        self._rejected = 0
        self._backward: list[Difference] = []
        # What the printed line says about the rollout's log-probabilities.
        self._gap: str | None = None
        # The number of the current update, and whether its backward pass is still to come.
        self._update, self._awaited = 0, False

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Called when an optimizer step is planned. After an extra pass, the training pass adds up its own statistics.

        Raises:
            RuntimeError: bounds over the mini-batch are announced but none were decided, and the receipt stops runs.
        """
        if not self.open:
            return
        if self._settings.adaptive and self._settings.scope != "micro_batch" and step.decision is None:
            self._wrong(f"no bounds were decided for the mini-batch under {NODE}.scope={self._settings.scope}")
        step.collect |= self._by_extra_pass(step)

    def before(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> Tensor | None:
        """Compares a micro-batch before its loss is computed.

        Args:
            model_output, data, dp_group: the loss function's arguments.

        Returns:
            The gradient on the model's log-probabilities that the backward pass must have per unit of the gradient that
            reaches the loss, (tokens,); None if this micro-batch's backward pass is not compared.

        Raises:
            RuntimeError: the policy's term is not the announced one, or verl's trainer has left out a correction, and
                the receipt stops runs.
        """
        if self._announced is None:
            for wrong in missing_corrections(self._run.options, data):
                self._wrong(wrong)
            self._announced = self._compare_with_announced(step, model_output, data, dp_group)
        if self._gap is None:
            self._gap = compared_with_rollout(gap_to_rollout(model_output, data))
        if self._awaited or len(self._backward) > (self._update > 0):
            return None
        if self._update and not self._tells_apart(step, model_output, data):
            return None
        self._awaited = True
        return self._gradient(step, model_output, data, dp_group)

    def follow(self, loss: Tensor, log_probs: Tensor, expected: Tensor) -> None:
        """Compares the real backward pass when it happens; the hook raises as `before` does.

        Args:
            expected: from `before`.
        """
        incoming: list[Tensor] = []
        loss.register_hook(incoming.append)

        def compare(gradient: Tensor) -> None:
            hook.remove()
            self._awaited = False
            if not incoming:
                self._wrong("the backward pass does not come through the loss that the worker returns")
                return
            found = difference(flat(gradient) / incoming[0], expected)
            if found is not None:
                self._backward.append(found)
                self._hold("in the backward pass", found)

        hook = log_probs.register_hook(compare)

    def end_update(self, step: OptimizerStep) -> None:
        """Called when an optimizer step ends, by every rank.

        Raises:
            RuntimeError: the loss had no backward pass to the model's log-probabilities, or the bounds come from other
                tokens than those that were trained on, and the receipt stops runs.
        """
        if not self.open:
            return
        if self._by_extra_pass(step) and step.collected is not None:
            trained, decided = (float(part.abs().sum()) for part in (self._all_reduce(step.collected), step.statistics))
            # Statistics that are not finite pass: verl skips their update.
            if abs(trained - decided) > SAME_TOKENS * trained:
                self._wrong(
                    f"the statistics behind the bounds sum to {decided:g} in absolute value, those of the tokens that "
                    f"were trained on to {trained:g}"
                )
        if self._awaited:
            self._awaited = False
            self._wrong("no backward pass came from the loss to the model's log-probabilities")
        self._update += 1

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Called when a rollout batch ends. The first one closes the receipt, which rank 0 prints.

        Returns:
            By key, the largest difference relative to the largest gradient, or NaN if nothing could be compared. Empty
            after the first rollout batch.

        Raises:
            RuntimeError: the number of updates is not the announced one, and the receipt stops runs.
        """
        if not self.open:
            return {}
        self.open = False
        if self._run.updates not in (None, batch.update):
            self._wrong(f"{batch.update} updates on the first rollout batch, not {self._run.updates} as announced")
        if self._rank == 0:
            print(f"clipx: {self}", flush=True)
        found = [one for one in (self._announced, *self._backward) if one is not None]
        return {RECEIPT.key: [max((one.largest for one in found), default=math.nan)]}

    def __str__(self) -> str:
        """The line that says what was compared."""
        if self._announced is None:
            return "receipt: no token of the first rollout batch could be compared"
        low, high = RATIOS
        parts = [
            f"receipt: at ratios from {low:g} to {high:g} the gradient of {self._announced.tokens} tokens is that of "
            f"clipx_{self._settings.method.name} under {self._run.loss_agg_mode} to {self._announced.largest:.1e} of "
            "the largest"
        ]
        if self._rejected:
            parts.append(f"verl's {self._run.options[ROLLOUT_RS]} leaves {self._rejected} of them without a gradient")
        updates = ["the first update's", f"a later one's, {SHARE_APART:.0%} of its tokens {APART:g} away from F = 1,"]
        parts += [
            f"in {which} backward pass to {one.largest:.1e}"
            for which, one in zip(updates, self._backward, strict=False)
        ]
        return "; ".join([*parts, self._gap])

    def _by_extra_pass(self, step: OptimizerStep) -> bool:
        adaptive = self._settings.adaptive and self._settings.scope == "mini_batch"
        return adaptive and step.statistics is not None and step.decided_from is not DecidedFrom.RATIO_ONE

    def _compare_with_announced(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> Any:
        rejects = self._run.options.get(BYPASS) and self._run.options.get(ROLLOUT_RS) is not None
        found = []
        for first in range(len(PROBES) if rejects else 1):
            probe = probed(model_output, data, PROBES[first:] + PROBES[:first] if rejects else PROBES[:1])
            one = self._compare_under(probe, step, model_output, dp_group)
            if one is not None:
                self._hold(f"at ratios from {RATIOS[0]:g} to {RATIOS[1]:g}", one)
                found.append(one)
        if not found:
            return None
        return max(found)._replace(tokens=sum(one.tokens for one in found))

    def _compare_under(self, probe: Any, step: OptimizerStep, model_output: Any, dp_group: Any) -> Difference | None:
        whole = self._gradient(step, model_output, probe, dp_group)
        with no_policy_loss():
            besides = self._gradient(step, model_output, probe, dp_group)
        call = self._called(aside(step), leaf_of(model_output)[0], probe)
        expected = announced_gradient(self._settings, self._run, call)
        # Only tokens in the mask are compared, so that padding does not count as tokens that agree.
        mask = padded(probe["response_mask"]).bool()
        self._rejected += int((mask & ~left_in_bypass_mode(self._run, call, mask)).sum())
        return difference(response_part(whole - besides, probe, expected.shape[1])[mask], expected[mask])

    def _gradient(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> Tensor:
        """The whole loss's gradient on the model's log-probabilities, (tokens,)."""
        output, leaf = leaf_of(model_output)
        call = self._called(aside(step), output, data)
        with in_micro_batch(call.micro_batch), torch.enable_grad():
            loss, _ = self._loss_fn(model_output=call.model_output, data=call.data, dp_group=dp_group)
        if not loss.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]

    def _tells_apart(self, step: OptimizerStep, model_output: Any, data: Any) -> bool:
        mask = padded(data["response_mask"]).bool()
        call = self._called(aside(step), leaf_of(model_output)[0], data)
        weight, _, _ = announced_weight(self._settings, self._run, call)
        return bool(((weight - 1).abs() > APART)[mask].double().mean() >= SHARE_APART)

    def _hold(self, where: str, found: Difference) -> None:
        if not found.largest <= found.allowed:
            self._wrong(
                f"{where} the gradient differs by {found.largest:.1e} of its largest element, more than "
                f"{found.allowed:g}, from that of clipx_{self._settings.method.name} under {self._run.loss_agg_mode}"
            )

    def _wrong(self, what: str) -> None:
        message = f"receipt: {what}: the run does not train what its line says"
        if self._stops:
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)


def aside(step: OptimizerStep) -> OptimizerStep:
    """A copy of an optimizer step for calls that must not change it."""
    return dataclasses.replace(step, collect=False, not_finite={})
