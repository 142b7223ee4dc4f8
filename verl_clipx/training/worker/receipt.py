"""The receipt: what a run's loss does to log_prob in the first rollout batch, against what its line announces.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on copies of the first micro-batch with the old log-probabilities and advantages of
`Announced.probe`: once as it is, and once with the registered loss replaced by one that returns 0. The difference of
the two gradients is the policy's term, whatever else verl adds. The backward pass of every micro-batch is compared as
well. What both gradients are computed from is compared with what was not read from the same place: the rows with those
that the worker got, sizes with sums over ranks, bounds with their statistics, corrections with verl's own code.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.shared_metrics import RECEIPT
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.facts import RunFacts
from verl_clipx.run.keys import BYPASS, ROLLOUT_IS, ROLLOUT_RS, WITH_ROLLOUT_IS
from verl_clipx.training.worker.announced import Announced
from verl_clipx.training.worker.layout import flat, pad_rows, with_leaf
from verl_clipx.training.worker.step import MicroBatch, Observer, OptimizerStep, RolloutBatch, call_of, in_micro_batch

logger = logging.getLogger(__name__)

# With 25 tokens, as many probes tell any two groups apart, and a method from itself with a number a twentieth smaller.
PROBES = 120
# What engines multiply a loss by is the same for every micro-batch, and a weight is that of verl's own code.
SAME_FACTOR, SAME_NORMALISER = 1e-3, 0.01
# In bypass mode old_log_probs are a copy, in nats. The tokens above a threshold may differ between two passes.
SAME_COPY, SAME_SELECTED = 1e-4, 0.05
# What a loss reads of a row that its prompt and response don't say, and which does not change from update to update.
OF_ROW = ("response_mask", "loss_mask", "attention_mask", "old_log_probs", "advantages", "ref_log_prob")
OF_ROW += ("rollout_log_probs", "rollout_is_weights")
# What rounding does in full and in half precision: a micro-batch's mean distance from ratio 1, in nats, where the same
# weights gave 0.014, and a change of bounds by a share of half their width, where they gave 0.59.
DISTANCE, SAME_BOUNDS = {False: 1e-3, True: 0.05}, {False: 0.05, True: 0.9}
NOTHING = "no token of the first rollout batch could be compared, so nothing shows what the run trains"


@dataclass
class Receipt(Observer):
    """Compares what one rank's first updates do with what the run announces, and raises RuntimeError or warns.

    After the first rollout batch it is finished, and updates cost nothing.

    Args:
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rank: of this process; rank 0 prints the receipt.
        tested: whether tests have run all of the run's options. If not, under clipx.receipt=auto only what is compared
            on copies stops the run; what depends on the engine is logged as a warning.
        half: whether the engine computes in half precision.
    """

    settings: Settings
    run: RunFacts
    loss_fn: Callable[..., Any]
    all_reduce: Callable[[Tensor], Tensor]
    rank: int
    tested: bool
    half: bool = False
    # The tokens compared on copies, and the updates; the differences of each copy and of each backward pass.
    _tokens: int = 0
    _updates: int = 0
    _on_copies: list[float] = field(default_factory=list)
    _in_training: list[float] = field(default_factory=list)
    # The current update: as it was planned, and its micro-batches.
    _step: OptimizerStep = field(default_factory=OptimizerStep)
    _followed: list[Announced] = field(default_factory=list)
    # The fields of each row that the worker got, at the latest in the first update; how often each was trained; what
    # verl's weights are divided by; the sum and the number of those before.
    _begun: bool = False
    _got: Counter[tuple[str, int]] = field(default_factory=Counter)
    _trained: Counter[tuple[str, int]] = field(default_factory=Counter)
    _normaliser: float | None = None
    _weights: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Keeps what the worker got of each row."""
        self._begun, self._got = True, Counter(fields_of(data))

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Keeps the step as it is planned, with the method's own decision."""
        settings, self._followed = self.settings, []
        own = None if step.statistics is None else settings.method.decide(step.statistics.clone())
        self._step, given = replace(step, collected=None, not_finite={}, decision=own), step.decision
        none = own is None or given is None
        same = own is given if none else torch.allclose(own, given, rtol=1e-9, atol=0.0, equal_nan=True)
        self._expect(same, "the bounds are not those that the method decides from the step's statistics")
        decides = not settings.adaptive or settings.scope == "micro_batch" or step.decision is not None
        self._expect(decides, f"no bounds were decided for the mini-batch under {NODE}.scope={settings.scope}")
        if step.token_pass is not None:
            turn, taken = self.run.schedule.passes[min(batch.updates_before_pass, 1)], step.token_pass.name
            self._expect(taken == turn, f"Lopti's pass over the {turn} tokens takes the {taken} ones")
            ends, lopti = step.token_pass.eta, settings.update
            same = (ends, step.token_pass.equal) == (lopti.eta, lopti.equal)
            self._expect(same, f"Lopti's pass ends at a probability of {ends:g}, not as {lopti.eta:g} says")

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Compares the first micro-batch on copies, and follows the backward pass of each."""
        announced = Announced(self.settings, self.run, self._step, model_output, data)
        self._look_at_rows(announced, data)
        if not self._tokens and pad_rows(data["response_mask"]).any():
            self._compare_on_copies(announced, dp_group)
        if self.run.schedule.starts_at_ratio_one and not self._updates:
            moved = (announced.inputs.log_prob - announced.inputs.old_log_prob)[announced.inputs.mask].abs().double()
            away, most = float(moved[moved.isfinite()].sum()) / max(len(moved), 1), DISTANCE[self.half]
            recomputed = "old_log_probs are announced as recomputed with the weights of the first update"
            other = f"a micro-batch of it is {away:.2g} nats away on average, more than {most:g}"
            self._expect(away <= most, f"{recomputed}, but {other}")
        announced.besides = self._gradient(announced, dp_group, policy=False)
        loss.register_hook(announced.factors.append)
        model_output["log_probs"].register_hook(lambda gradient: announced.gradients.append(flat(gradient).clone()))
        self._followed.append(announced)

    def end_update(self, step: OptimizerStep) -> None:
        """Compares the update's backward passes, and what it counted over all ranks."""
        self._updates += 1
        followed, step, method = self._followed, self._step, self.settings.method
        back = [one for one in followed if one.factors and one.gradients]
        # Of all its backward passes together.
        factors = [float(sum(one.factors)) for one in back] or [1.0]
        low, high = min(factors), max(factors)
        one_rank = torch.zeros(6 + method.statistics_size + method.second_statistics_size, dtype=torch.float64)
        one_rank[:2] = torch.tensor([1.0, high])
        for one in followed:
            one_rank[2:] += one.sums()
        sums = self.all_reduce(one_rank)
        # A rank of a pipeline may see no loss.
        if not followed:
            return
        ranks, factor, rows, tokens, counted, selected = sums[:6].tolist()
        missing = f"{len(followed) - len(back)} of {len(followed)} micro-batches to the model's log-probabilities"
        self._expect(len(back) == len(followed), f"no backward pass came from the loss of {missing}")
        differences = [one.difference(sum(one.gradients) / sum(one.factors))[0] for one in back]
        self._in_training += [difference for difference in differences if not math.isnan(difference)]
        self._expect_gradient("in the backward pass", self._in_training, followed[0])
        multiplied = f"the losses of one update's micro-batches are multiplied by factors from {low:g} to {high:g}"
        self._expect(0 < low <= high <= low * (1 + SAME_FACTOR), multiplied)
        apart = f"a rank's losses are multiplied by {high:g}, all ranks' by {factor / ranks:g} on average"
        self._expect(abs(factor / ranks - high) <= SAME_FACTOR * high, apart)
        sizes = {"batch_num_tokens": tokens, "global_batch_size": rows, "dp_size": ranks}
        for (size, has), unit in zip(sizes.items(), ("tokens", "sequences", "ranks"), strict=True):
            given = sorted({float(one.data[size]) for one in followed})
            numbers = f"{', '.join(f'{one:g}' for one in given)} {unit}, which has {has:g}"
            self._expect(given == [has], f"losses are divided by a mini-batch's {numbers}")
        planned = f"bounds or metrics are those of {step.counted_tokens or 0:g} tokens"
        self._expect(step.counted_tokens in (None, counted), f"{planned}, and {counted:g} were trained on")
        if step.selected_tokens is not None:
            kept = float(step.selected_tokens)
            most = (2 + SAME_SELECTED * kept) * self.run.schedule.selects_by_pass
            other = f"losses are divided by {kept:g} selected tokens, and {selected:g} were selected"
            self._expect(abs(kept - selected) <= most, other)
        if step.decision is not None and step.decided_from is not DecidedFrom.LAGGED:
            decided = method.decide(sums[6:])
            moved = max(one.bounds_apart(step.decision, decided) for one in followed)
            other = f"the bounds differ by {moved:.2g} of their size from those of the tokens that were trained on"
            # Not a number passes: verl skips the update.
            self._expect(not moved > SAME_BOUNDS[self.half], other)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Closes the receipt after the first rollout batch: rank 0 prints it, NaN is logged if no rank compared any."""
        self.finished = True
        made, announced = batch.updates_before_pass + batch.update, self.run.schedule.updates_on_batch
        other = f"{made} updates on the first rollout batch, not {announced} as announced"
        self._expect(announced in (None, made), other)
        # A rank of a pipeline may see no loss.
        often = {self._trained[row] / times for row, times in self._got.items() if self._begun and self._trained}
        self._expect(len(often) < 2, "some rows of the rollout batch were trained more often than others")
        one_rank = torch.cat([torch.tensor([float(self._tokens)], dtype=torch.float64), self._weights])
        compared, weights, number = self.all_reduce(one_rank).tolist()
        if self.run.options.get(WITH_ROLLOUT_IS[1]) and self._normaliser and weights:
            other = f"weights are divided by {self._normaliser:g}, but their mean is {weights / number:g}"
            self._expect(not abs(self._normaliser * number / weights - 1) > SAME_NORMALISER, other)
        self._expect(compared or not self._updates, NOTHING, stops=False)
        if self.rank == 0:
            print(f"clipx: {self}", flush=True)
        return {RECEIPT.key: [max(self._on_copies + self._in_training, default=0.0) if compared else math.nan]}

    def __str__(self) -> str:
        if not self._tokens:
            return f"receipt: {NOTHING}"
        on_copies, in_training = max(self._on_copies), max(self._in_training, default=0.0)
        return (
            f"receipt: at ratios of its own choosing the gradient of {self._tokens} tokens is that of "
            f"clipx_{self.settings.method.name} under {self.run.loss_agg_mode} to {on_copies:.1e} of a token's; in the "
            f"backward pass of {len(self._in_training)} micro-batches in {self._updates} updates to {in_training:.1e}"
        )

    def _look_at_rows(self, announced: Announced, data: Any) -> None:
        """Compares what a micro-batch brings of its rows with what the worker got, and with what verl's code makes."""
        options, rows = self.run.options, fields_of(data)
        self._trained.update(rows)
        if not (self._begun or self._updates):
            self._got.update(rows)
        changed = sorted({row[0] for row in rows if row not in self._got})
        self._expect(not changed, f"{', '.join(changed)} of some rows are not those that the worker got for them")
        epoch = math.ceil(self._trained.total() / self._got.total())
        again = any(self._trained[row] > epoch * self._got[row] for row in rows)
        self._expect(not again, "some rows of the rollout batch were trained again before others")
        weights, rejects = (f"{key}={options.get(key)}" for key in (ROLLOUT_IS, ROLLOUT_RS))
        asked, there = options.get(ROLLOUT_IS) is not None, "rollout_is_weights" in data
        without = f"the samples came with{'' if there else 'out'} the weights of {weights}"
        self._expect(asked == there, without, stops=True)
        wrong = f"{announced.other_tokens} tokens that {rejects} rejects came as if it did not, or the reverse"
        # A trainer of one's own may train fewer tokens than it counts.
        stops = options.get(ROLLOUT_RS) is not None or announced.more_tokens
        self._expect(not announced.other_tokens, wrong, stops=stops)
        if asked and there:
            apart, self._normaliser, sums = announced.weights_apart(self._normaliser)
            self._weights, least = self._weights + sums, torch.finfo(data["rollout_is_weights"].dtype).eps
            other = f"a weight differs by {apart:.1e} of it from that of {weights} for its log-probabilities"
            self._expect(not apart > max(SAME_FACTOR, least), other, stops=True)
        if options.get(BYPASS):
            apart = announced.rollout_apart()
            other = f"{BYPASS}=True announces the rollout's own, but one is {apart:.2g} nats away"
            self._expect(not apart > SAME_COPY, f"old_log_probs: {other}", stops=True)

    def _compare_on_copies(self, real: Announced, dp_group: Any) -> None:
        """Compares the policy's term on probes under their own decisions and, every third, under the step's."""
        free = replace(self._step, decision=None, statistics=None)
        own = Announced(self.settings, self.run, free, real.model_output, real.data)
        for number in range(PROBES):
            announced = (own if number % 3 else real).probe(number)
            announced.besides = self._gradient(announced, dp_group, policy=False)
            difference, tokens = announced.difference(self._gradient(announced, dp_group))
            if not tokens:
                continue
            self._on_copies.append(difference)
            self._expect_gradient("at ratios of its own choosing", self._on_copies, announced, stops=True)
            self._tokens += tokens

    def _gradient(self, of: Announced, dp_group: Any, *, policy: bool = True) -> Tensor:
        """Returns the whole loss's gradient on the log-probabilities, or that without the policy's term, (tokens,)."""
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as REGISTRY

        output, leaf = with_leaf(of.model_output)
        micro_batch, output, data = call_of(self.settings, replace(of.step), output, of.data)
        ours = [name for name in REGISTRY if name.startswith("clipx_") and not policy]
        without = dict.fromkeys(ours, lambda log_prob, **_: (0.0 * log_prob.sum(), {}))
        with patch.dict(REGISTRY, without), in_micro_batch(micro_batch), torch.enable_grad():
            loss, _ = self.loss_fn(model_output=output, data=data, dp_group=dp_group)
            # A loss without a graph has a gradient of 0.
            return torch.autograd.grad(loss + 0.0 * leaf.sum(), leaf)[0]

    def _expect_gradient(self, where: str, apart: list[float], of: Announced, stops: bool | None = None) -> None:
        largest = max(apart, default=0.0)
        differs = f"{where} the gradient differs by {largest:.1e} of a token's, more than {of.resolved:g}, from that"
        announced = f"clipx_{self.settings.method.name} under {self.run.loss_agg_mode}"
        self._expect(largest <= of.resolved, f"{differs} of {announced}", stops=stops)

    def _expect(self, holds: bool, otherwise: str, *, stops: bool | None = None) -> None:
        """Stops or warns if something does not hold; `stops`: whether `auto` stops, None: where tests ran."""
        if holds:
            return
        message, asked = f"receipt: {otherwise}: the run does not train what its line says", self.settings.receipt
        if asked == "stop" or (asked == "auto" and (self.tested if stops is None else stops)):
            raise RuntimeError(f"{message}. To continue with only a warning, set {NODE}.receipt=warn.")
        logger.warning("clipx: %s.", message)


def fields_of(data: Any) -> list[tuple[str, int]]:
    """Returns the name and a hash of every row's value of each field in `OF_ROW`, with its prompt and response."""
    columns = {name: data[name].cpu().unbind() for name in ("prompts", "responses", *OF_ROW) if name in data}
    read = {name: [row.contiguous().view(torch.uint8).numpy().tobytes() for row in of] for name, of in columns.items()}
    prompts, responses = read.pop("prompts"), read.pop("responses")
    return [(name, hash(row)) for name, of in read.items() for row in zip(prompts, responses, of, strict=True)]
