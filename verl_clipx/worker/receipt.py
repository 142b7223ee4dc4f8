"""The receipt: in the first rollout batch, what a run's loss does to log_prob is compared with what its line announces.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on copies of the first micro-batch with old log-probabilities and advantages that the
receipt makes up: once as it is, and once with the registered loss replaced by one that returns 0. The difference of the
two gradients is the policy's term, whatever else verl adds. The backward pass of every micro-batch is compared as well,
with its normaliser, and so are the bounds, the first update's ratio and the number of updates.
"""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.method import NODE, Bounds
from verl_clipx.base.neighbours import MOVED, neighbours
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.base.tokens import Inputs
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.loss.loss import apply, token_statistics
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_IS, ROLLOUT_RS
from verl_clipx.worker.announced import Announced
from verl_clipx.worker.layout import flat, padded, with_leaf
from verl_clipx.worker.probe import KINDS, no_policy_loss, probe
from verl_clipx.worker.step import MicroBatch, Observer, OptimizerStep, RolloutBatch, in_micro_batch

logger = logging.getLogger(__name__)

# How far two gradients may differ, relative to a token's, by the dtype of log_prob.
RESOLVED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
# How many probes are tried to tell the method from its neighbours.
PROBES = 20 * KINDS
# What engines multiply a loss by is the same for every micro-batch of an update.
SAME_FACTOR = 1e-3
# The sum of the statistics' absolute values may differ by this share beyond what rounding does: less than a missing
# micro-batch changes it.
SAME_TOKENS = 0.01
# What rounding does in full and in half precision: a micro-batch's mean distance from ratio 1, in nats, where the same
# weights gave 0.014, and a change of bounds by a share of half their width, where they gave 0.59.
DISTANCE, SAME_BOUNDS = {False: 1e-3, True: 0.05}, {False: 0.05, True: 0.9}


@dataclass
class Followed:
    """A micro-batch whose backward pass is followed.

    Args:
        inputs: what the method announces to see.
        sums: the tokens that verl counts, then the statistics as trained on and as moved by rounding, float64.
        divisor: the tokens of the whole mini-batch, as the micro-batch's loss is told.
        foreseen: the difference of a gradient on log_prob from the one that the backward pass must bring.
        factor: the gradient that reached the loss; difference: of the gradient on log_prob; None before they come.
    """

    inputs: Inputs
    sums: Tensor
    divisor: int
    foreseen: Callable[[Tensor], Tensor]
    factor: Tensor | None = None
    difference: Tensor | None = None


@dataclass
class Receipt(Observer):
    """Compares what one rank's first updates do with what the run announces.

    Every method raises RuntimeError where something is not as announced and the receipt stops runs.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        called: (step, model_output, data) -> the arguments that the loss function gets in training.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rank: of this process; rank 0 prints the receipt.
        tested: whether tests have run all of the run's options. If not, under clipx.receipt=auto only what is compared
            on copies stops the run; what depends on the engine is logged as a warning.
        half: whether the engine computes in half precision.
        open: whether the receipt still compares updates. Once it is closed, updates cost nothing.
    """

    settings: Settings
    run: RunFacts
    loss_fn: Callable[..., Any]
    called: Callable[[OptimizerStep, Any, Any], Any]
    all_reduce: Callable[[Tensor], Tensor]
    rank: int
    tested: bool
    half: bool = False
    open: bool = True
    # Tokens compared on copies, those of them that verl rejects, and the largest differences there and in training.
    _tokens: int = 0
    _rejected: int = 0
    _largest: float = 0.0
    _backward: float = 0.0
    _micro_batches: int = 0
    _updates: int = 0
    _allowed: float = 0.0
    _step: OptimizerStep = field(default_factory=OptimizerStep)
    _followed: list[Followed] = field(default_factory=list)
    # By how many nats log_prob is moved where statistics are compared.
    _moves: tuple[float, ...] = ()

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Called when an optimizer step is planned. The statistics behind it are those of now."""
        settings, self._step, self._followed, self._moves = self.settings, aside(step), [], ()
        if not self.open:
            return
        decides = not settings.adaptive or settings.scope == "micro_batch" or step.decision is not None
        self._expect(decides, f"no bounds were decided for the mini-batch under {NODE}.scope={settings.scope}")
        if step.decided_from is DecidedFrom.MINI_BATCH and step.statistics is not None:
            self._moves = (0.0, DISTANCE[self.half], -DISTANCE[self.half])
        if step.token_pass is not None:
            turn = settings.update.passes[min(batch.updates_before_pass, 1)]
            taken = step.token_pass.name
            self._expect(taken == turn, f"Lopti's pass over the {turn} tokens takes the {taken} ones")

    def begin_micro_batch(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any) -> None:
        """Called before the loss of a micro-batch, which is compared on copies, and whose backward pass is foreseen."""
        if not self.open:
            return
        mask, options = padded(data["response_mask"]).bool(), self.run.options
        self._allowed = RESOLVED[flat(model_output["log_probs"]).dtype]
        announced = self._announced(self._step, model_output, data)
        if not options.get(BYPASS):
            weighted = options.get(ROLLOUT_IS) is None or "rollout_is_weights" in data
            missing = f"the samples came without the weights of {ROLLOUT_IS}={options.get(ROLLOUT_IS)}"
            self._expect(weighted, missing, on_copies=True)
            wrong, names = int((mask & ~announced.inputs.mask).sum()), f"{ROLLOUT_RS}={options.get(ROLLOUT_RS)}"
            self._expect(not wrong, f"{wrong} tokens that {names} rejects came as if it did not", on_copies=True)
        if not self._tokens and mask.any():
            self._compare_on_copies(announced.inputs, model_output, data, dp_group)
        besides = self._gradient(self._step, model_output, data, dp_group, policy=False)
        sums = [padded(data.get("loss_mask", mask)).sum(dtype=torch.float64)[None]]
        for by in self._moves:
            moved = announced.inputs._replace(log_prob=announced.inputs.log_prob + by)
            sums.append(token_statistics(self.settings.method, self.settings.shaping, moved))
        foreseen = partial(announced.difference, besides=besides)
        self._followed.append(Followed(announced.inputs, torch.cat(sums), round(data["batch_num_tokens"]), foreseen))

    def end_micro_batch(self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any) -> None:
        """Called after the loss of a micro-batch and before its backward pass, which is compared when it happens."""
        if not self.open:
            return
        followed = self._followed[-1]

        def follow_loss(gradient: Tensor) -> None:
            followed.factor = gradient

        def compare(gradient: Tensor) -> None:
            hook.remove()
            if followed.factor is not None:
                followed.difference = followed.foreseen(flat(gradient) / followed.factor)

        loss.register_hook(follow_loss)
        hook = model_output["log_probs"].register_hook(compare)

    def end_update(self, step: OptimizerStep) -> None:
        """Called when an optimizer step ends, by every rank."""
        if not self.open:
            return
        followed, size, distance = self._followed, self.settings.method.statistics_size, DISTANCE[self.half]
        nothing = torch.zeros(1 + len(self._moves) * size, dtype=torch.float64)
        sums = self.all_reduce(sum(one.sums for one in followed) if followed else nothing)
        tokens, *statistics = sums.split([1, *(size for _ in self._moves)])
        self._updates += 1
        # A rank of a pipeline may see no loss.
        if not followed:
            return
        back = [one for one in followed if one.difference is not None]
        missing = f"the loss of {len(followed) - len(back)} of {len(followed)} micro-batches"
        same = len(back) == len(followed)
        self._expect(same, f"no backward pass came from {missing} to the model's log-probabilities")
        self._backward = max([self._backward, *(float(one.difference) for one in back)])
        self._expect_gradient("in the backward pass", self._backward, on_copies=False)
        low, high = (extreme(float(one.factor) for one in back) if back else 1.0 for extreme in (min, max))
        same, factors = 0 < low <= high <= low * (1 + SAME_FACTOR), f"factors from {low:g} to {high:g}"
        self._expect(same, f"the losses of one update's micro-batches are multiplied by {factors}")
        divisors, counted = sorted({one.divisor for one in followed}), round(float(tokens))
        numbers = f"{', '.join(map(str, divisors))} tokens, which has {counted}"
        self._expect(divisors == [counted], f"losses are divided by a mini-batch's {numbers}")
        if self._updates == 1 and self.run.old_policy_starts_the_update:
            farthest = max(distance_from_1(one.inputs) for one in followed)
            self._expect(farthest <= distance, OTHER_OLD_POLICY.format(farthest, distance))
        if statistics:
            self._compare_statistics(*statistics)
        self._micro_batches += len(back)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Called when a rollout batch ends, by every rank. The first one closes the receipt, which rank 0 prints.

        Returns:
            By key, the largest difference relative to a token's gradient, or NaN if no rank could compare anything.
            Empty after the first rollout batch.
        """
        if not self.open:
            return {}
        self.open = False
        passes = 1 if self.settings.update is None else len(self.settings.update.passes)
        made, announced = batch.updates_before_pass + batch.update, (self.run.updates or 0) * passes
        same = self.run.updates is None or made == announced
        self._expect(same, f"{made} updates on the first rollout batch, not {announced} as announced")
        compared = float(self.all_reduce(torch.tensor([float(self._tokens)], dtype=torch.float64)))
        self._expect(compared or not self._updates, NOTHING, stops=self.settings.receipt == "stop")
        if self.rank == 0:
            print(f"clipx: {self}", flush=True)
        return {RECEIPT.key: [max(self._largest, self._backward) if compared else math.nan]}

    def __str__(self) -> str:
        if not self._tokens:
            return f"receipt: {NOTHING}"
        rejected = f"; verl's {self.run.options[ROLLOUT_RS]} leaves {self._rejected} of them without a gradient"
        return (
            f"receipt: at ratios of its own choosing the gradient of {self._tokens} tokens is that of {self._line} to "
            f"{self._largest:.1e} of a token's{rejected if self._rejected else ''}; in the backward pass of "
            f"{self._micro_batches} micro-batches in {self._updates} updates to {self._backward:.1e}"
        )

    @property
    def _line(self) -> str:
        return f"clipx_{self.settings.method.name} under {self.run.loss_agg_mode}"

    def _compare_on_copies(self, inputs: Inputs, model_output: Any, data: Any, dp_group: Any) -> None:
        """Compares the policy's term on probes: of every kind, and those that tell a neighbour of the run from it.

        Under the step's decision the neighbours are that decision moved; under decisions from the probes themselves,
        they are methods with a number moved.
        """
        method, step, decision = self.settings.method, self._step, self._step.decision
        rounds = [(replace(step, decision=None, statistics=None), [(other, None) for other in neighbours(method)])]
        if decision is not None:
            rounds.insert(0, (step, [(method, decision * (1 + by)) for by in (MOVED, -MOVED)]))
        # Whole sequences are rejected, so that fewer tokens of each kind are left.
        always = 2 * KINDS if self.run.options.get(ROLLOUT_RS) else KINDS
        for of_round, alike in rounds:
            for number in range(PROBES):
                if number >= always and not alike:
                    break
                copy = probe(number, self.settings, of_round.decision, inputs, data)
                announced, before = self._announced(of_round, model_output, copy), len(alike)
                gradients = [(other, announced.gradient(*other)) for other in alike]
                alike = [other for other, one in gradients if announced.difference(one) <= 2 * RESOLVED[one.dtype]]
                if number < always or len(alike) < before:
                    besides = self._gradient(of_round, model_output, copy, dp_group, policy=False)
                    whole = self._gradient(of_round, model_output, copy, dp_group, policy=True)
                    self._largest = max(self._largest, float(announced.difference(whole, besides)))
                    self._expect_gradient("at ratios of its own choosing", self._largest, on_copies=True)
                    mask = padded(copy["response_mask"]).bool()
                    self._tokens += int(mask.sum())
                    self._rejected += int((mask & ~announced.inputs.mask).sum())

    def _compare_statistics(self, trained: Tensor, *moved: Tensor) -> None:
        """Compares what the bounds were decided from with the tokens that were trained on, and the two decisions.

        Args:
            trained: the statistics of the training pass over all ranks; moved: where rounding moves log_prob.
        """
        decided, size, *sizes = (float(one.abs().sum()) for one in (self._step.statistics, trained, *moved))
        # Statistics that are not finite pass: verl skips their update.
        other = abs(size - decided) > SAME_TOKENS * size + max(abs(one - size) for one in sizes)
        self._expect(not other, OTHER_STATISTICS.format(decided, size))
        method, shaping = self.settings.method, self.settings.shaping
        decisions, inputs = (self._step.decision, method.decide(trained)), self._followed[-1].inputs
        apart = bounds_apart(*(apply(method, shaping, inputs, of).bounds for of in decisions))
        self._expect(other or not apart > SAME_BOUNDS[self.half], OTHER_BOUNDS.format(apart))

    def _announced(self, step: OptimizerStep, model_output: Any, data: Any) -> Announced:
        known = self.called(aside(step), with_leaf(model_output)[0], data).micro_batch
        return Announced(self.settings, self.run, known, model_output, data)

    def _gradient(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any, *, policy: bool) -> Tensor:
        """The whole loss's gradient on the model's log-probabilities, or that without the policy's term, (tokens,)."""
        output, leaf = with_leaf(model_output)
        call = self.called(aside(step), output, data)
        with nullcontext() if policy else no_policy_loss(), in_micro_batch(call.micro_batch), torch.enable_grad():
            loss, _ = self.loss_fn(model_output=call.model_output, data=call.data, dp_group=dp_group)
        if not loss.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]

    def _expect_gradient(self, where: str, largest: float, *, on_copies: bool) -> None:
        differs = f"{where} the gradient differs by {largest:.1e} of a token's, more than {self._allowed:g}, from that"
        self._expect(largest <= self._allowed, f"{differs} of {self._line}", on_copies=on_copies)

    def _expect(self, holds: bool, otherwise: str, *, on_copies: bool = False, stops: bool | None = None) -> None:
        if holds:
            return
        message, asked = f"receipt: {otherwise}: the run does not train what its line says", self.settings.receipt
        if stops is None:
            stops = asked == "stop" or (asked == "auto" and (on_copies or self.tested))
        if stops:
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)


def aside(step: OptimizerStep) -> OptimizerStep:
    """A copy of an optimizer step for calls that must not change it."""
    return replace(step, collected=None, not_finite={})


def distance_from_1(inputs: Inputs) -> float:
    """The mean distance of the tokens' ratios from 1, in nats."""
    moved = (inputs.log_prob - inputs.old_log_prob).abs().double()
    return float(moved.where(inputs.mask & moved.isfinite(), 0.0).sum() / inputs.mask.sum().clamp(min=1))


def bounds_apart(first: Bounds, second: Bounds) -> float:
    """The largest difference of bounds, relative to half the first ones' width; 0 for equal infinite ones."""
    first, second = (torch.stack([torch.as_tensor(one, dtype=torch.float64) for one in of]) for of in (first, second))
    half = ((first[1] - first[0]) / 2).nan_to_num(1.0, posinf=1.0).clamp(min=1e-12)
    return float(torch.where(first == second, 0.0, (first - second).abs() / half).max())


NOTHING = "no token of the first rollout batch could be compared, so nothing shows what the run trains"
OTHER_OLD_POLICY = (
    "old_log_probs are announced as recomputed with the weights of the first update, but a micro-batch of it is {:.2g} "
    "nats away on average, more than {:g}"
)
OTHER_STATISTICS = (
    "the statistics behind the bounds sum to {:g} in absolute value, those of the tokens that were trained on to {:g}"
)
OTHER_BOUNDS = "the bounds differ by {:.2g} of their size from those of the tokens that were trained on"
