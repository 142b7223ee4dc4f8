"""The receipt: what a run's loss does to log_prob, compared with what its line announces, before the first update.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. So verl's own
loss function is called on the first micro-batch with old log-probabilities and advantages of the receipt's own, once as
it is and once with the registered loss replaced by nothing: the difference of the gradients is the policy's term,
whatever verl adds to it, and must be F * A as announced. Then the gradient of the real backward pass must be that of
the whole loss, the statistics behind bounds from the extra pass must be over the tokens that are trained on, and the
updates of the first rollout batch as many as announced. Later updates pay nothing.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.driver.config import Settings
from verl_clipx.driver.hydra_nodes import RunFacts
from verl_clipx.driver.support import BYPASS, ROLLOUT_IS, ROLLOUT_RS, WITH_ROLLOUT_RS
from verl_clipx.loss.loss import token_statistics, tokens_in
from verl_clipx.worker.layout import flat, padded, response_part
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rows import AGE
from verl_clipx.worker.step import MicroBatch, OptimizerStep, RolloutBatch, in_micro_batch

logger = logging.getLogger(__name__)

# Ratios of the probe. In the order of the tokens both signs of A come at each, and neighbours are far apart.
RATIOS = (0.3, 4.0)
STEPS, STRIDE = 31, 12

# Of the probes under rejection, which neighbouring sequences take in turn: how far the log-ratios are from 0, as a
# factor, and whether their mean over the sequence is 0. Any of verl's criteria finds some too far and some not.
PROBES = ((1.0, False), (1.0, True), (0.1, True), (0.003, True))

# By how much of the largest gradient two may differ, in units of what log_prob's dtype resolves.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

# A token's F is away from 1 by more than this where its gradient tells methods apart; and the share of such tokens.
APART, SHARE_APART = 0.05, 0.01

# By how much the sum of the statistics' absolute values may differ between the extra pass and the training pass: less
# than a micro-batch, more than what two passes' rounding moves.
SAME_TOKENS = 0.01

# A mean gap between the actor's and the rollout's log-probabilities above this, in nats, is named in a warning.
# Measured on a random model of 2 layers, 24 November 2026: Ulysses under sdpa, on 2 ranks and without its refusal, was
# 0.18 apart from 1 rank (16 sequences of up to 18 tokens, half of which are right all the same), bfloat16 0.014 from
# float32 (16 of 100).
GAP = 0.1


class Call(NamedTuple):
    """The arguments with which verl's loss function is called in training."""

    micro_batch: MicroBatch
    model_output: Any
    data: Any


class Difference(NamedTuple):
    """Two gradients compared.

    Args:
        largest: difference between two of their elements, over the largest element of the expected one.
        allowed: how large it may be.
        tokens: how many elements were compared.
    """

    largest: float
    allowed: float
    tokens: int


class Receipt:
    """Compares what one rank's first updates do with what the run announces.

    Args:
        settings: the clipx node.
        run: what is announced of the run.
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        called: (step, model_output, data) -> the arguments that it gets in training.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rank: of this process; 0 prints the receipt.
        stops: whether a difference stops the run, or only warns.

    Attributes:
        open: whether the receipt still looks at updates; those after it pay nothing.
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
        # How many tokens verl would reject there.
        self._rejected = 0
        self._backward: list[Difference] = []
        # What the line says of the rollout's log-probabilities.
        self._gap: str | None = None
        # Of the update under way: its number, and whether a backward pass of it is awaited.
        self._update, self._awaited = 0, False

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """An optimizer step is planned; where an extra pass found its statistics, the training pass adds up its own.

        Raises:
            RuntimeError: bounds of the mini-batch are announced and none were decided, and the receipt stops runs.
        """
        if not self.open:
            return
        if self._settings.adaptive and self._settings.scope != "micro_batch" and step.decision is None:
            self._wrong(f"no bounds were decided for the mini-batch under {NODE}.scope={self._settings.scope}")
        step.collect |= self._by_extra_pass(step)

    def before(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> Tensor | None:
        """Looks at a micro-batch before its loss is computed.

        Args:
            step: the optimizer step.
            model_output, data, dp_group: the loss function's arguments.

        Returns:
            The gradient on the model's log-probabilities that the backward pass must have, over what reaches the loss,
            (tokens,); None where this micro-batch is not followed.

        Raises:
            RuntimeError: the policy's term is not the announced one, and `stops`.
        """
        if self._announced is None:
            self._hold_corrections(data)
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
        """Compares a real backward pass once it happens.

        Args:
            loss: what the loss function returns.
            log_probs: the model's output that the loss is computed from.
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
        """An optimizer step ends; every rank must call it.

        Raises:
            RuntimeError: its loss had no backward pass to the model's log-probabilities, or its bounds are those of
                other tokens, and the receipt stops runs.
        """
        if not self.open:
            return
        if self._by_extra_pass(step) and step.collected is not None:
            trained, decided = (float(part.abs().sum()) for part in (self._all_reduce(step.collected), step.statistics))
            # Statistics that are not finite are those of an update that verl skips.
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
        """The first rollout batch ends, and with it the receipt, which rank 0 prints.

        Returns:
            By key, the largest difference, of the largest gradient; NaN where nothing could be compared. Nothing after
            the first rollout batch.

        Raises:
            RuntimeError: another number of updates than announced, and the receipt stops runs.
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
        return adaptive and step.statistics is not None and step.assumed is None

    def _hold_corrections(self, data: Any) -> None:
        """Raises if verl's trainer has left out what it corrects in decoupled mode, and the receipt stops runs."""
        options = self._run.options
        if options.get(BYPASS):
            return
        if options.get(ROLLOUT_IS) is not None and "rollout_is_weights" not in data:
            self._wrong(f"the samples came without the weights of {ROLLOUT_IS}={options[ROLLOUT_IS]}")
        if options.get(ROLLOUT_RS) is None or not {"rollout_log_probs", "loss_mask"} <= set(data.keys()):
            return
        whole, mask = (padded(data[key]).bool() for key in ("loss_mask", "response_mask"))
        if whole.shape != mask.shape:
            return
        # A jagged tensor that doesn't know its longest row is padded to the length of all rows together.
        width = mask.shape[1]
        old, rollout = (padded(data[key])[:, :width] for key in ("old_log_probs", "rollout_log_probs"))
        # Where the trainer rejects in both masks, a sequence's divergence is that of the tokens that are left.
        several = len(str(options[ROLLOUT_RS]).split(",")) > 1
        wrong = int((mask & ~left_by_verl(options, whole, old - rollout)).sum())
        if wrong and not (several and torch.equal(whole, mask)):
            self._wrong(f"{wrong} tokens that {ROLLOUT_RS}={options[ROLLOUT_RS]} rejects came as if it did not")

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
        # With the mask: a token without gradient by its place in the model's output is not one more that agrees.
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


def announced_weight(settings: Settings, run: RunFacts, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """F and F * A of each token as announced, by the formulas themselves: (sequences, response length), 0 outside.

    Args:
        settings: the clipx node.
        run: what is announced of the run.
        call: what verl's loss function gets.

    Returns:
        F, F * A, and the tokens that are not rejected, bool.
    """
    known, data = call.micro_batch, call.data
    mask = left_in_bypass_mode(run, call, padded(data["response_mask"]).bool())
    inputs = inputs_of(
        settings,
        known,
        log_prob=response_part(call.model_output["log_probs"], data, mask.shape[1]),
        old_log_prob=padded(data["old_log_probs"]),
        advantages=padded(data["advantages"]),
        mask=mask,
    )
    method, decision = settings.method, known.step.decision
    if decision is None:
        decision = method.decide(token_statistics(method, settings.shaping, inputs))
    tokens = tokens_in(method, settings.shaping, inputs)
    weight = torch.where(mask, method.gradient_weight(tokens, method.bounds(tokens, decision)), 0.0)
    return weight, torch.where(mask, method.gradient(tokens, weight), 0.0), mask


def announced_gradient(settings: Settings, run: RunFacts, call: Call) -> Tensor:
    """The gradient that the policy's term must have on log_prob: (sequences, response length).

    Args:
        settings: the clipx node.
        run: what is announced of the run.
        call: what verl's loss function gets.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    known, data = call.micro_batch, call.data
    _, weighted, averaged = announced_weight(settings, run, call)
    if "rollout_is_weights" in data:
        weighted = weighted * padded(data["rollout_is_weights"])
    tokens = data["batch_num_tokens"]
    if settings.select is not None:
        selected = settings.select.selected(known.entropy, averaged, known.step.entropy_bucket)
        weighted = torch.where(selected, weighted, 0.0)
        if settings.select.normaliser == "selected":
            averaged = selected
            tokens = tokens if known.step.selected_tokens is None else known.step.selected_tokens
    with torch.enable_grad():
        ones = torch.ones_like(weighted, requires_grad=True)
        total = agg_loss(
            loss_mat=ones,
            loss_mask=averaged,
            loss_agg_mode=run.loss_agg_mode,
            dp_size=data["dp_size"],
            batch_num_tokens=tokens,
            global_batch_size=data["global_batch_size"],
            loss_scale_factor=run.loss_scale_factor,
        )
    return -weighted * torch.autograd.grad(total, ones)[0]


def left_in_bypass_mode(run: RunFacts, call: Call, mask: Tensor) -> Tensor:
    """The tokens that verl's own bypass loss would leave, by verl's own code: bool, (sequences, response length).

    Args:
        run: what is announced of the run.
        call: what verl's loss function gets.
        mask: bool, of all of them.
    """
    if not run.options.get(BYPASS) or run.options.get(ROLLOUT_RS) is None:
        return mask
    log_prob = response_part(call.model_output["log_probs"], call.data, mask.shape[1])
    return left_by_verl(run.options, mask, log_prob - padded(call.data["old_log_probs"]))


def left_by_verl(options: Mapping[str, Any], mask: Tensor, log_ratio: Tensor) -> Tensor:
    """The tokens that verl's rejection leaves: bool, (sequences, response length).

    Args:
        options: of the run.
        mask: bool, (sequences, response length).
        log_ratio: to the rollout policy, likewise.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not mask.any():
        return mask
    names, threshold = options[ROLLOUT_RS], options.get(WITH_ROLLOUT_RS[0])
    return compute_rollout_rejection_mask(log_ratio, mask, names, threshold)[0].bool()


def aside(step: OptimizerStep) -> OptimizerStep:
    """An optimizer step like this one, to which a call leaves nothing behind."""
    return dataclasses.replace(step, collect=False, not_finite={})


def probed(model_output: Any, data: Any, probes: Sequence[tuple[float, bool]] = PROBES[:1]) -> Any:
    """A micro-batch with the receipt's old log-probabilities and advantages; the given one is not changed.

    Args:
        model_output, data: verl's loss function's arguments.
        probes: of `PROBES`, which the sequences take in turn.
    """
    mask = padded(data["response_mask"]).bool()
    number = mask.flatten().cumsum(0).view(mask.shape) - 1
    low, high = (math.log(ratio) for ratio in RATIOS)
    log_ratio = low + (high - low) * (number * STRIDE % STEPS) / (STEPS - 1)
    scales, centred = (
        torch.tensor([probe[part] for probe in probes], device=mask.device)[torch.arange(len(mask)) % len(probes), None]
        for part in (0, 1)
    )
    mean = torch.where(mask, log_ratio, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    log_ratio = scales * (log_ratio - torch.where(centred, mean, 0.0))
    sign = 1 - 2 * (number % 2)
    probe = data.copy()
    probe["old_log_probs"] = response_part(model_output["log_probs"], data, mask.shape[1]).float() - log_ratio
    probe["advantages"] = (sign * (1 + number % 7) / 4).to(padded(data["advantages"]).dtype)
    return probe


def leaf_of(model_output: Any) -> tuple[dict[str, Any], Tensor]:
    """The model's output without its graph, and the log-probabilities in it as a leaf, (tokens,)."""
    output = {key: value.detach() if isinstance(value, Tensor) else value for key, value in model_output.items()}
    log_probs = output["log_probs"]
    leaf = flat(log_probs).clone().requires_grad_()
    nested = log_probs.is_nested
    output["log_probs"] = torch.nested.nested_tensor_from_jagged(leaf, offsets=log_probs.offsets()) if nested else leaf
    return output, leaf


@contextmanager
def no_policy_loss() -> Iterator[None]:
    """Has each of the plugin's registered losses return nothing for the duration of the block."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    ours = {name: loss for name, loss in POLICY_LOSS_REGISTRY.items() if name.startswith("clipx_")}
    POLICY_LOSS_REGISTRY.update(dict.fromkeys(ours, lambda *, log_prob, **_: (log_prob.sum() * 0.0, {})))
    try:
        yield
    finally:
        POLICY_LOSS_REGISTRY.update(ours)


def difference(found: Tensor, expected: Tensor) -> Difference | None:
    """How far a gradient is from the expected one; None where there is nothing to compare.

    Args:
        found, expected: of the same shape.
    """
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    apart = float((found.to(expected.dtype) - expected).abs().max()) if expected.numel() else 0.0
    # An update that is not finite says nothing, and verl skips it.
    if not (math.isfinite(largest) and math.isfinite(apart)) or largest == apart == 0.0:
        return None
    return Difference(apart / largest if largest else math.inf, RESOLVED[found.dtype], expected.numel())


def gap_to_rollout(model_output: Any, data: Any) -> tuple[float, int] | None:
    """How far the model is from the rollout on tokens that the weights before the first update have sampled.

    Args:
        model_output, data: verl's loss function's arguments in a run's first update; the model's own log-probabilities
            count, since bypass mode has the rollout's in the place of the old policy's.

    Returns:
        The mean distance in nats and the number of such tokens, all where no sequence's age is known; None if the
        rollout returned no log-probabilities.
    """
    if "rollout_log_probs" not in data:
        return None
    fresh, age = padded(data["response_mask"]).bool(), data.get(AGE, None)
    if age is not None:
        fresh = fresh & (age.to(fresh.device) == 0)[:, None]
    width = fresh.shape[1]
    gap = response_part(model_output["log_probs"], data, width) - padded(data["rollout_log_probs"])[:, :width]
    return float(gap.abs()[fresh].double().sum() / fresh.sum().clamp(min=1)), int(fresh.sum())


def compared_with_rollout(found: tuple[float, int] | None) -> str:
    """What the line says of the rollout's log-probabilities; warns where they are far from the actor's.

    Args:
        found: from `gap_to_rollout`.
    """
    if found is None:
        return "the rollout returns no log-probabilities that the actor's could be compared with"
    gap, tokens = found
    if tokens == 0:
        return "no token was sampled with the actor's current weights, so its log-probabilities cannot be compared"
    if gap > GAP:
        logger.warning(WIDE_GAP, gap, tokens)
    return f"actor and rollout differ by {gap:.2g} nats a token on {tokens} tokens of the same weights"


WIDE_GAP = (
    "clipx: actor and rollout give the same tokens log-probabilities that differ by %.2g nats on average of %d, though "
    "of the same weights: their precision, temperature or attention is not the same."
)
