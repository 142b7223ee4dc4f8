"""The receipt: what a run's loss does to log_prob in the first rollout batch, against what its line announces.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on copies of the first micro-batch with old log-probabilities and advantages that
`probe` makes up: once as it is, and once with the registered loss replaced by one that returns 0. The difference of the
two gradients is the policy's term, whatever else verl adds. The backward pass of every micro-batch is compared as well,
and so are the tokens that it is averaged over, the bounds, the first update's ratio and the number of updates.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from verl_clipx.base.method import NODE, Bounds
from verl_clipx.base.neighbours import MOVED, neighbours
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.run.config import Settings
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.verl_keys import BYPASS, ROLLOUT_IS, ROLLOUT_RS
from verl_clipx.worker.announced import Announced
from verl_clipx.worker.layout import pad_rows, with_leaf
from verl_clipx.worker.probe import KINDS, probe
from verl_clipx.worker.step import MicroBatch, Observer, OptimizerStep, RolloutBatch, call_of, in_micro_batch

logger = logging.getLogger(__name__)

# How many probes are tried to tell the method from its neighbours.
PROBES = 20 * KINDS
# What engines multiply a loss by is the same for every micro-batch of an update.
SAME_FACTOR = 1e-3
# What rounding does in full and in half precision: a micro-batch's mean distance from ratio 1, in nats, where the same
# weights gave 0.014, and a change of bounds by a share of half their width, where they gave 0.59.
DISTANCE, SAME_BOUNDS = {False: 1e-3, True: 0.05}, {False: 0.05, True: 0.9}


@dataclass
class Receipt(Observer):
    """Compares what one rank's first updates do with what the run announces, and raises RuntimeError or warns.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
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
    all_reduce: Callable[[Tensor], Tensor]
    rank: int
    tested: bool
    half: bool = False
    open: bool = True
    # Tokens compared on copies, and the largest differences there and in training.
    _tokens: int = 0
    _largest: float = 0.0
    _backward: float = 0.0
    _micro_batches: int = 0
    _updates: int = 0
    # The current update: as it was planned, and its micro-batches.
    _step: OptimizerStep = field(default_factory=OptimizerStep)
    _followed: list[Announced] = field(default_factory=list)

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Keeps the step as it is planned."""
        if not self.open:
            return
        settings, self._followed = self.settings, []
        self._step = replace(step, collected=None, not_finite={})
        decides = not settings.adaptive or settings.scope == "micro_batch" or step.decision is not None
        self._expect(decides, f"no bounds were decided for the mini-batch under {NODE}.scope={settings.scope}")
        if step.token_pass is not None:
            turn, taken = settings.update.passes[min(batch.updates_before_pass, 1)], step.token_pass.name
            self._expect(taken == turn, f"Lopti's pass over the {turn} tokens takes the {taken} ones")

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Compares the first micro-batch on copies, and follows the backward pass of each."""
        if not self.open:
            return
        mask, options, step = pad_rows(data["response_mask"]).bool(), self.run.options, self._step
        announced = self._announced(step, model_output, data)
        if not options.get(BYPASS):
            weighted = options.get(ROLLOUT_IS) is None or "rollout_is_weights" in data
            weights, rejects = (f"{key}={options.get(key)}" for key in (ROLLOUT_IS, ROLLOUT_RS))
            self._expect(weighted, f"the samples came without the weights of {weights}", stops=True)
            wrong = f"{announced.rejected} tokens that {rejects} rejects came as if it did not"
            self._expect(not announced.rejected, wrong, stops=True)
        if not self._tokens and mask.any():
            self._compare_on_copies(announced, model_output, data, dp_group)
        besides = self._gradient(step, model_output, data, dp_group, policy=False)
        announced.follow(loss, model_output["log_probs"], besides)
        self._followed.append(announced)

    def end_update(self, step: OptimizerStep) -> None:
        """Compares the update's backward passes, and what it counted over all ranks."""
        if not self.open:
            return
        self._updates += 1
        followed, step = self._followed, self._step
        method = self.settings.method
        nothing = torch.zeros(2 + method.statistics_size + method.second_statistics_size, dtype=torch.float64)
        sums = self.all_reduce(sum(one.sums for one in followed) if followed else nothing)
        # A rank of a pipeline may see no loss.
        if not followed:
            return
        back = [one for one in followed if one.compared]
        self._micro_batches += len(back)
        missing = f"{len(followed) - len(back)} of {len(followed)} micro-batches to the model's log-probabilities"
        self._expect(len(back) == len(followed), f"no backward pass came from the loss of {missing}")
        self._backward = max([self._backward, *(one.compared[0] for one in back)])
        self._expect_gradient("in the backward pass", self._backward, followed[0])
        low, high = (extreme((float(one.factor[0]) for one in back), default=1.0) for extreme in (min, max))
        factors = f"the losses of one update's micro-batches are multiplied by factors from {low:g} to {high:g}"
        self._expect(0 < low <= high <= low * (1 + SAME_FACTOR), factors)
        divisors, (tokens, counted) = sorted({one.divisor for one in followed}), sums[:2].tolist()
        numbers = f"{', '.join(map(str, divisors))} tokens, which has {tokens:g}"
        self._expect(divisors == [tokens], f"losses are divided by a mini-batch's {numbers}")
        if self._updates == 1 and self.run.old_policy_starts_the_update:
            farthest, most = max(one.distance_from_1 for one in followed), DISTANCE[self.half]
            self._expect(farthest <= most, OTHER_OLD_POLICY.format(farthest, most))
        if step.counted_tokens is not None:
            planned = f"bounds or metrics are those of {step.counted_tokens:g} tokens"
            self._expect(counted == step.counted_tokens, f"{planned}, and {counted:g} were trained on")
        if step.decided_from is DecidedFrom.MINI_BATCH:
            decisions = (step.decision, self.settings.method.decide(sums[2:]))
            apart = bounds_apart(*(followed[-1].bounds(decision) for decision in decisions))
            # Not a number passes: verl skips the update.
            self._expect(not apart > SAME_BOUNDS[self.half], OTHER_BOUNDS.format(apart))

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Closes the receipt after the first rollout batch: rank 0 prints it, NaN is logged if no rank compared any."""
        if not self.open:
            return {}
        self.open = False
        passes = 1 if self.settings.update is None else len(self.settings.update.passes)
        made, announced = batch.updates_before_pass + batch.update, self.run.updates and self.run.updates * passes
        other = f"{made} updates on the first rollout batch, not {announced} as announced"
        self._expect(announced in (None, made), other)
        compared = float(self.all_reduce(torch.tensor([float(self._tokens)], dtype=torch.float64)))
        self._expect(compared or not self._updates, NOTHING, stops=False)
        if self.rank == 0:
            print(f"clipx: {self}", flush=True)
        return {RECEIPT.key: [max(self._largest, self._backward) if compared else math.nan]}

    def __str__(self) -> str:
        if not self._tokens:
            return f"receipt: {NOTHING}"
        return (
            f"receipt: at ratios of its own choosing the gradient of {self._tokens} tokens is that of {self._line} to "
            f"{self._largest:.1e} of a token's; in the backward pass of {self._micro_batches} micro-batches in "
            f"{self._updates} updates to {self._backward:.1e}"
        )

    @property
    def _line(self) -> str:
        return f"clipx_{self.settings.method.name} under {self.run.loss_agg_mode}"

    def _compare_on_copies(self, real: Announced, model_output: Any, data: Any, dp_group: Any) -> None:
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
                copy = probe(number, self.settings, of_round.decision, real.inputs, data)
                announced, before = self._announced(of_round, model_output, copy), len(alike)
                is_alike = 2 * announced.resolved
                alike = [one for one in alike if announced.difference(announced.gradient(*one)) <= is_alike]
                if number < always or len(alike) < before:
                    without, whole = (
                        self._gradient(of_round, model_output, copy, dp_group, policy=policy)
                        for policy in (False, True)
                    )
                    self._largest = max(self._largest, announced.difference(whole, without))
                    self._expect_gradient("at ratios of its own choosing", self._largest, announced, stops=True)
                    self._tokens += int(pad_rows(copy["response_mask"]).sum())

    def _announced(self, step: OptimizerStep, model_output: Any, data: Any) -> Announced:
        known = call_of(self.settings, replace(step), with_leaf(model_output)[0], data).micro_batch
        return Announced(self.settings, self.run, known, model_output, data)

    def _gradient(self, step: OptimizerStep, model_output: Any, data: Any, dp_group: Any, *, policy: bool) -> Tensor:
        """The whole loss's gradient on the model's log-probabilities, or that without the policy's term, (tokens,)."""
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as REGISTRY

        output, leaf = with_leaf(model_output)
        call = call_of(self.settings, replace(step), output, data)
        none = {name: without_gradient for name in REGISTRY if name.startswith("clipx_") and not policy}
        with patch.dict(REGISTRY, none), in_micro_batch(call.micro_batch), torch.enable_grad():
            loss, _ = self.loss_fn(model_output=call.model_output, data=call.data, dp_group=dp_group)
        if not loss.requires_grad:
            return torch.zeros_like(leaf)
        return torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0]

    def _expect_gradient(self, where: str, largest: float, of: Announced, stops: bool | None = None) -> None:
        differs = f"{where} the gradient differs by {largest:.1e} of a token's, more than {of.resolved:g}, from that"
        self._expect(largest <= of.resolved, f"{differs} of {self._line}", stops=stops)

    def _expect(self, holds: bool, otherwise: str, *, stops: bool | None = None) -> None:
        """Stops or warns if something does not hold; `stops`: whether `auto` stops, None: where tests ran."""
        if holds:
            return
        message, asked = f"receipt: {otherwise}: the run does not train what its line says", self.settings.receipt
        if asked == "stop" or (asked == "auto" and (self.tested if stops is None else stops)):
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)


def without_gradient(*, log_prob: Tensor, **_: Any) -> tuple[Tensor, dict[str, Any]]:
    """A policy loss of 0."""
    return log_prob.sum() * 0.0, {}


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
OTHER_BOUNDS = "the bounds differ by {:.2g} of their size from those of the tokens that were trained on"
