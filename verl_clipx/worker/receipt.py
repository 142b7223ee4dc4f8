"""The receipt: compares what a run's loss does to log_prob with what the run's line announces, in the first updates.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on copies of the first micro-batch with old log-probabilities and advantages that the
receipt makes up: once as it is, and once with the registered loss replaced by one that returns 0. The difference of the
two gradients is the policy's term, whatever else verl adds, and it must be F * A as announced. In addition, the real
backward pass of every micro-batch of the first rollout batch is compared, with its normaliser, and so are the
statistics and decisions behind the bounds, the first update's ratio and the number of updates. The comparisons stay on
the device and are read once an update. Later rollout batches cost nothing.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.loss.loss import token_statistics
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_RS
from verl_clipx.worker.announced import Call, announced_gradient, left_in_bypass_mode, missing_corrections
from verl_clipx.worker.layout import flat, in_model_output, padded, response_part
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.probe import (
    DECISIONS,
    KINDS,
    MOST_TOKENS,
    OF_REJECTION,
    RESOLVED,
    TRIED,
    Expected,
    bounds_apart,
    bounds_of,
    deciding,
    leaf_of,
    no_policy_loss,
    on_probes,
    probed,
    probes,
    steady,
    telling,
)
from verl_clipx.worker.rollout_gap import compared_with_rollout, gap_to_rollout
from verl_clipx.worker.step import OptimizerStep, RolloutBatch, in_micro_batch

logger = logging.getLogger(__name__)

# The sum of the statistics' absolute values may differ by this share between the extra pass and the training pass: less
# than a missing micro-batch changes it, and more than rounding does.
SAME_TOKENS = 0.01

# What engines multiply a loss by is the same for every micro-batch of an update.
SAME_FACTOR = 1e-3

# What a decision from the training pass's statistics may differ by from the one that trains, relative to its size, and
# a micro-batch's mean distance from ratio 1 in nats: for engines that compute in float32, and in half precision, where
# the same weights gave log-probabilities 0.014 nats apart (rollout_gap.py) and bounds 0.59 of half their width.
SAME_DECISION, AT_RATIO_ONE = {False: 0.05, True: 0.9}, {False: 1e-3, True: 0.05}


class Receipt:
    """Compares what one rank's first updates do with what the run announces.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        called: (step, model_output, data) -> the arguments that the loss function gets in training.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rank: of this process; rank 0 prints the receipt.
        tested: whether tests have run all of the run's options. If not, under clipx.receipt=auto only what is compared
            on copies stops the run; what depends on the engine is logged as a warning.
        half: whether the engine computes in half precision.

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
        tested: bool,
        half: bool = False,
    ):
        self.open = True
        self._all_reduce, self._rank = all_reduce, rank
        self._settings, self._run, self._tested, self._half = settings, run, tested, half
        self._loss_fn, self._called = loss_fn, called
        # How many tokens were compared on copies, how many of them verl would reject, and the largest difference.
        self._tokens, self._rejected, self._largest = 0, 0, 0.0
        # The number of micro-batches and updates whose backward pass was compared, and the largest difference there.
        self._micro_batches, self._updates, self._backward = 0, 0, 0.0
        # What the printed line says about the rollout's log-probabilities.
        self._gap: str | None = None
        # Lopti's pass, as announced, and what is kept of the update's micro-batches until it ends.
        self._pass: str | None = None
        self._called_at_all = False
        self._begin()

    def _begin(self) -> None:
        self._calls, self._aside, self._divisors = 0, 0, set()
        self._differences: list[Tensor] = []
        self._incoming: list[Tensor] = []
        self._distances: list[Tensor] = []
        self._counted: list[Tensor] = []

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Called when an optimizer step is planned. After an extra pass, the training pass adds up its own statistics.

        Raises:
            RuntimeError: bounds over the mini-batch are announced but none were decided, or Lopti's pass is not the one
                whose turn it is, and the receipt stops runs.
        """
        if not self.open:
            return
        if self._settings.adaptive and self._settings.scope != "micro_batch" and step.decision is None:
            self._wrong(f"no bounds were decided for the mini-batch under {NODE}.scope={self._settings.scope}")
        if step.token_pass is not None:
            self._pass = self._settings.update.passes[min(batch.updates_before_pass, 1)]
            if step.token_pass.name != self._pass:
                self._wrong(f"Lopti's pass over the {self._pass} tokens takes the {step.token_pass.name} ones")
        step.collect |= self._by_extra_pass(step)

    def before(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> Expected:
        """Compares a micro-batch before its loss is computed.

        Args:
            model_output, data, dp_group: the loss function's arguments.

        Returns:
            What the backward pass must do to the model's log-probabilities, per unit of the gradient that reaches the
            loss.

        Raises:
            RuntimeError: the policy's term is not the announced one, or verl's trainer has left out a correction, and
                the receipt stops runs.
        """
        self._called_at_all, self._allowed = True, RESOLVED[flat(model_output["log_probs"]).dtype]
        if not self._tokens:
            for wrong in missing_corrections(self._run.options, data):
                self._wrong(wrong, on_copies=True)
            self._compare_on_copies(step, model_output, data, dp_group)
        if self._gap is None:
            self._gap = compared_with_rollout(gap_to_rollout(model_output, data))
        with no_policy_loss():
            besides = self._gradient(step, model_output, data, dp_group)
        mask, old = padded(data["response_mask"]).bool(), padded(data["old_log_probs"])
        counted = padded(data["loss_mask"]) if "loss_mask" in data else mask
        moved = (response_part(model_output["log_probs"], data, mask.shape[1]) - old).abs().double()
        self._calls += 1
        self._divisors.add(round(data["batch_num_tokens"]))
        self._counted.append(counted.sum(dtype=torch.float64))
        self._distances.append(torch.where(mask & moved.isfinite(), moved, 0.0).sum() / mask.sum().clamp(min=1))
        return self._expected(step, model_output, data, besides)

    def follow(self, loss: Tensor, log_probs: Tensor, expected: Expected) -> None:
        """Compares the real backward pass when it happens.

        Args:
            expected: from `before`.
        """
        incoming: list[Tensor] = []
        loss.register_hook(incoming.append)

        def compare(gradient: Tensor) -> None:
            hook.remove()
            if not incoming:
                self._aside += 1
                return
            self._incoming.append(incoming[0].double())
            self._differences.append(expected.difference(flat(gradient) / incoming[0]))

        hook = log_probs.register_hook(compare)

    def end_update(self, step: OptimizerStep) -> None:
        """Called when an optimizer step ends, by every rank.

        Raises:
            RuntimeError: a micro-batch's backward pass or normaliser is not the announced one, the first update does
                not start at ratio 1 although the line says so, or the bounds come from other tokens than those that
                were trained on, and the receipt stops runs.
        """
        if not self.open:
            return
        vector = self._counted or [torch.zeros((), dtype=torch.float64)]
        by_extra_pass = self._by_extra_pass(step) and step.collected is not None
        collected = [step.collected.to(vector[0].device)] if by_extra_pass else []
        tokens, *trained = self._all_reduce(torch.cat([torch.stack(vector).sum()[None], *collected])).split(
            [1, *map(len, collected)]
        )
        if self._calls:
            self._judge(tokens, self._apart(step, *trained) if by_extra_pass else tokens.new_zeros(3))
        self._updates += 1
        self._begin()

    def _judge(self, tokens: Tensor, statistics: Tensor) -> None:
        """Reads what was compared in an update, in one transfer.

        Args:
            tokens: of the mini-batch over all ranks, (1,).
            statistics: from `_apart`.
        """
        seen, device = len(self._differences), tokens.device
        of_backward = [torch.stack(part).to(device) for part in (self._differences, self._incoming) if seen]
        extremes = [of_backward[0].max(), *of_backward[1].aminmax()] if seen else [tokens.new_zeros(())] * 3
        distance = torch.stack(self._distances).max().to(device)
        numbers = torch.cat([torch.stack([*extremes, distance]), tokens, statistics])
        largest, low, high, distance, counted, trained, decided, apart = numbers.tolist()
        self._micro_batches += seen
        self._backward = max(self._backward, largest)
        if self._aside:
            self._wrong("the backward pass does not come through the loss that the worker returns")
        elif seen < self._calls:
            missing = f"{self._calls - seen} of {self._calls} micro-batches"
            self._wrong(f"no backward pass came from the loss of {missing} to the model's log-probabilities")
        self._hold("in the backward pass", largest, on_copies=False)
        if seen and not 0 < low <= high <= low * (1 + SAME_FACTOR):
            self._wrong(f"the losses of one update's micro-batches are multiplied by factors from {low:g} to {high:g}")
        if self._divisors != {round(counted)}:
            divisors = ", ".join(map(str, sorted(self._divisors)))
            self._wrong(f"losses are divided by a mini-batch's {divisors} tokens, which has {counted:.0f}")
        at_start, allowed = self._run.old_policy_starts_the_update and not self._updates, AT_RATIO_ONE[self._half]
        if at_start and not distance <= allowed:
            self._wrong(
                f"old_log_probs are announced as recomputed with the weights of the first update, but a micro-batch of "
                f"it is {distance:.2g} nats away on average, more than {allowed:g}"
            )
        # Statistics that are not finite pass: verl skips their update.
        if abs(trained - decided) > SAME_TOKENS * trained:
            self._wrong(
                f"the statistics behind the bounds sum to {decided:g} in absolute value, those of the tokens that "
                f"were trained on to {trained:g}"
            )
        elif apart > SAME_DECISION[self._half]:
            self._wrong(f"the bounds differ by {apart:.2g} of their size from those of the tokens that were trained on")

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Called when a rollout batch ends, by every rank. The first one closes the receipt, which rank 0 prints.

        Returns:
            By key, the largest difference relative to a token's gradient, or NaN if no rank could compare anything.
            Empty after the first rollout batch.

        Raises:
            RuntimeError: the number of updates is not the announced one, or nothing was compared, and the receipt stops
                runs.
        """
        if not self.open:
            return {}
        self.open = False
        passes = 1 if self._settings.update is None else len(self._settings.update.passes)
        made, announced = batch.updates_before_pass + batch.update, self._run.updates
        if announced is not None and made != announced * passes:
            self._wrong(f"{made} updates on the first rollout batch, not {announced * passes} as announced")
        compared = float(self._all_reduce(torch.tensor([float(self._tokens)], dtype=torch.float64)))
        if not compared and self._called_at_all:
            self._wrong(NOTHING, stops=self._settings.receipt == "stop")
        if self._rank == 0:
            print(f"clipx: {self}", flush=True)
        return {RECEIPT.key: [max(self._largest, self._backward) if compared else math.nan]}

    def __str__(self) -> str:
        """The line that says what was compared."""
        if not self._tokens:
            return f"receipt: {NOTHING}"
        parts = [
            f"receipt: at ratios of its own choosing the gradient of {self._tokens} tokens is that of "
            f"clipx_{self._settings.method.name} under {self._run.loss_agg_mode} to {self._largest:.1e} of a token's"
        ]
        if self._rejected:
            parts.append(f"verl's {self._run.options[ROLLOUT_RS]} leaves {self._rejected} of them without a gradient")
        parts.append(
            f"in the backward pass of {self._micro_batches} micro-batches in {self._updates} updates to "
            f"{self._backward:.1e}"
        )
        return "; ".join([*parts, self._gap])

    def _by_extra_pass(self, step: OptimizerStep) -> bool:
        adaptive = self._settings.adaptive and self._settings.scope == "mini_batch"
        return adaptive and step.statistics is not None and step.decided_from is not DecidedFrom.RATIO_ONE

    def _apart(self, step: OptimizerStep, trained: Tensor) -> Tensor:
        """How far the statistics of the training pass are from those behind the bounds.

        Args:
            trained: the statistics of the training pass over all ranks.

        Returns:
            The sums of both's absolute values and, as a share of half their width, the largest difference of the bounds
            of the update's last micro-batch, (3,), float64.
        """
        method, decided = self._settings.method, step.statistics.to(trained.device)
        of = [bounds_of(method, self._last, of) for of in (step.decision.to(trained.device), method.decide(trained))]
        return torch.stack([trained.abs().sum(), decided.abs().sum(), bounds_apart(*of)])

    def _compare_on_copies(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> None:
        """Compares the policy's term under probes: under the step's decision, and under decisions from the probes."""
        mask = padded(data["response_mask"]).bool()
        if not mask.any():
            return
        made_up = list(itertools.islice(probes(mask), max(KINDS, min(TRIED, MOST_TOKENS // mask.numel()))))
        rejects = self._run.options.get(BYPASS) and self._run.options.get(ROLLOUT_RS)
        of_each_kind = range(min(OF_REJECTION if rejects else KINDS, len(made_up)))
        method, shaping = self._settings.method, self._settings.shaping
        known = self._called(aside(step), leaf_of(model_output)[0], data).micro_batch
        log_prob = response_part(model_output["log_probs"], data, mask.shape[1])
        inputs = inputs_of(
            self._settings, known, log_prob=log_prob, old_log_prob=log_prob, advantages=log_prob, mask=mask
        )._replace(counted=None)
        decision = step.decision
        if decision is None:
            decision = method.decide(token_statistics(method, shaping, on_probes(inputs, made_up[:1])))
        own = dataclasses.replace(aside(step), decision=None, statistics=None)

        def compare(probe_step: OptimizerStep, numbers: Iterable[int]) -> None:
            for number in numbers:
                self._compare_probe(probe_step, model_output, probed(model_output, data, made_up[number]), dp_group)

        compare(step, of_each_kind)
        if len(decision):
            compare(own, sorted({*of_each_kind, *deciding(method, shaping, inputs, made_up[:DECISIONS])}))
        compare(step, sorted(telling(method, shaping, inputs, decision, made_up).difference(of_each_kind)))

    def _compare_probe(self, step: OptimizerStep, model_output: Any, copy: Any, dp_group: Any) -> None:
        with no_policy_loss():
            besides = self._gradient(step, model_output, copy, dp_group)
        whole = self._gradient(step, model_output, copy, dp_group)
        largest = float(self._expected(step, model_output, copy, besides).difference(whole))
        mask = padded(copy["response_mask"]).bool()
        log_ratio = response_part(model_output["log_probs"], copy, mask.shape[1]) - padded(copy["old_log_probs"])
        self._rejected += int((mask & ~left_in_bypass_mode(self._run, mask, log_ratio)).sum())
        self._tokens += int(mask.sum())
        self._largest = max(self._largest, largest)
        self._hold("at ratios of its own choosing", largest, on_copies=True)

    def _gradient(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> Tensor:
        """The whole loss's gradient on the model's log-probabilities, (tokens,)."""
        output, leaf = leaf_of(model_output)
        call = self._called(aside(step), output, data)
        with in_micro_batch(call.micro_batch), torch.enable_grad():
            loss, _ = self._loss_fn(model_output=call.model_output, data=call.data, dp_group=dp_group)
        if not loss.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]

    def _flat_announced(self, step: OptimizerStep, model_output: Any, data: Any, **how: Any) -> tuple[Tensor, ...]:
        """The announced gradient and its size at F = 1, (tokens,) each, and the tokens."""
        call = self._called(aside(step), leaf_of(model_output)[0], data)
        # Of verl's own micro-batch and not of the one that the worker has restricted to a pass.
        call, tokens_of_pass = call._replace(data=data, model_output=model_output), None
        if step.token_pass is not None:
            turn = self._settings.update.passes[0] if self._pass is None else self._pass
            tokens_of_pass = dataclasses.replace(step.token_pass, name=turn).tokens(data)
            call.micro_batch.counted, advantages = tokens_of_pass, padded(data["advantages"])
            call = call._replace(data=data.copy())
            call.data["advantages"] = torch.where(tokens_of_pass, advantages, 0)
        announced = announced_gradient(self._settings, self._run, call, **how)
        total = flat(model_output["log_probs"]).shape[0]
        gradient = announced.gradient
        if tokens_of_pass is not None:
            gradient = torch.where(tokens_of_pass, gradient, 0.0)
        flattened = (in_model_output(values, data, total) for values in (gradient, announced.unit))
        return *flattened, announced.tokens

    def _expected(self, step: OptimizerStep, model_output: Any, data: Any, besides: Tensor) -> Expected:
        gradient, unit, self._last = self._flat_announced(step, model_output, data)

        def moved(by: float) -> Tensor:
            return self._flat_announced(step, model_output, data, moved=by)[0]

        return Expected(gradient, besides, unit, steady(gradient, unit, moved))

    def _hold(self, where: str, largest: float, *, on_copies: bool) -> None:
        if not largest <= self._allowed:
            self._wrong(
                f"{where} the gradient differs by {largest:.1e} of a token's, more than {self._allowed:g}, from that "
                f"of clipx_{self._settings.method.name} under {self._run.loss_agg_mode}",
                on_copies=on_copies,
            )

    def _wrong(self, what: str, *, on_copies: bool = False, stops: bool | None = None) -> None:
        message = f"receipt: {what}: the run does not train what its line says"
        if stops is None:
            stops = self._settings.receipt == "stop" or (
                self._settings.receipt == "auto" and (on_copies or self._tested)
            )
        if stops:
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)


NOTHING = "no token of the first rollout batch could be compared, so nothing shows what the run trains"


def aside(step: OptimizerStep) -> OptimizerStep:
    """A copy of an optimizer step for calls that must not change it."""
    return dataclasses.replace(step, collect=False, not_finite={})


def in_half_precision(engine: Any) -> bool:
    """Whether an engine computes in half precision.

    Args:
        engine: verl's configuration of the actor's engine, which computes in bfloat16 by default.
    """
    precision = getattr(engine, "mixed_precision", None)
    dtype = precision.get("param_dtype", "bf16") if isinstance(precision, Mapping) else "bf16"
    return str(dtype) not in ("fp32", "float32", "32")
