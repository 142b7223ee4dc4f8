"""The receipt: what a run's loss does to log_prob in the first rollout batch, against what its line announces.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on copies of the first micro-batch with the old log-probabilities and advantages of
`Announced.probe`: once as it is, and once with the registered loss replaced by one that returns 0. The difference of
the two gradients is the policy's term, whatever else verl adds. The backward pass of every micro-batch is compared as
well. What both gradients are computed from is compared with what was not read from the same place: the rows with those
that the worker got, sizes with sums over ranks, bounds with their statistics, corrections with verl's own code.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from verl_clipx.losses.applying.apart import ROUNDING, apart, largest_known
from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.shared_metrics import RECEIPT, RECEIPT_FAILED
from verl_clipx.run.config import Settings
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.identity import differences_from, identity_of
from verl_clipx.run.keys import BYPASS, ROLLOUT_IS, ROLLOUT_RS
from verl_clipx.run.record import RunRecord
from verl_clipx.training.worker.announced import Announced
from verl_clipx.training.worker.besides import gradient_of_verls_terms, verls_terms
from verl_clipx.training.worker.checks import Check, Checks
from verl_clipx.training.worker.layout import flat, pad_rows, with_leaf, with_leaves
from verl_clipx.training.worker.rows import OLD_LOG_PROBS, Rows, hash_rows_by_field
from verl_clipx.training.worker.step import MicroBatch, Observer, OptimizerStep, RolloutBatch, call_of, in_micro_batch

# With 25 tokens, as many probes tell any two groups apart, and a method from itself with a number a twentieth smaller.
PROBES = 120
# What engines multiply a loss by is the same for every micro-batch, and a weight is that of verl's own code.
SAME_FACTOR = 1e-3
SAME_NORMALISER = 0.01
# In bypass mode old_log_probs are a copy, in nats. The tokens above a threshold may differ between two passes.
SAME_COPY = 1e-4
SAME_SELECTED = 0.05
# Of a decision, which every rank makes of the same sums.
SAME_DECISION = 1e-9
# How far a micro-batch may be from ratio 1 at the same weights, in full and in half precision, in nats on average.
DISTANCE = {False: 1e-3, True: 0.05}
# In half precision less is allowed where two passes with these weights, cut differently, are nearer to each other: so
# many times as much. Measured were up to 8 times as much, against float32 (docs/floor.md).
TIMES_ROUNDING = 8
# But never less than this, because some ways to cut the rows gave equal numbers where others gave 0.009.
LEAST_DISTANCE = 0.01
# What rounding does to bounds in full and in half precision, as a share of half their width: it gave 0.59 in half.
SAME_BOUNDS = {False: 0.05, True: 0.9}
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
        scaled: whether the engine scales losses by a power of two that changes, as in float16.

    Raises:
        RuntimeError: as built, if the worker's settings or sources are not those of the driver, and that stops the run.
    """

    settings: Settings
    record: RunRecord
    loss_fn: Callable[..., Any]
    all_reduce: Callable[[Tensor], Tensor]
    rank: int
    tested: bool
    half: bool = False
    scaled: bool = False
    # The tokens compared on copies, and the updates; the differences of each copy and of each backward pass.
    _tokens: int = 0
    _updates: int = 0
    _on_copies: list[float] = field(default_factory=list)
    _in_training: list[float] = field(default_factory=list)
    # The current update: as it was planned, and its micro-batches.
    _step: OptimizerStep = field(default_factory=OptimizerStep)
    _followed: list[Announced] = field(default_factory=list)
    # Whether the worker got the rows of the rollout batch, at the latest in the first update.
    _begun: bool = False
    _rows: Rows = field(default_factory=Rows)
    # What verl's weights are divided by; the sum and the number of those before.
    _normaliser: float | None = None
    _weights: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    # What the first update's losses were multiplied by, and into how many micro-batches it was cut.
    _factor: float | None = None
    _micro_batches: int = 0
    # How many checks did not hold on any rank; known at the end.
    _warned: int = 0

    def __post_init__(self) -> None:
        self.checks = Checks(self.settings.receipt, tested=self.tested)
        identity = identity_of(self.settings)
        other = "; ".join(differences_from(self.record.identity, identity))
        self._expect(Check.SETTINGS, not other, f"this worker is not set up as the driver: {other}", stops=True)
        digest = hashlib.sha256(repr(sorted(identity.items())).encode()).digest()
        # As many bits as a float64 holds after a sum over a million ranks.
        self._identity = float(int.from_bytes(digest[:4], "big"))

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Keeps what the worker got of each row."""
        self._begun = True
        self._rows = Rows()
        self._rows.get(data)

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Keeps the step as it is planned, with the method's own decision."""
        settings = self.settings
        self._followed = []
        own = None if step.statistics is None else settings.method.decide(step.statistics.clone())
        self._step = replace(step, collected=None, not_finite={}, decision=own)
        given = step.decision
        none = own is None or given is None
        same = own is given if none else torch.allclose(own, given, rtol=1e-9, atol=0.0, equal_nan=True)
        other = "the bounds are not those that the method decides from the step's statistics"
        self._expect(Check.DECISION, same, other)
        decides = not settings.adaptive or settings.scope == "micro_batch" or step.decision is not None
        undecided = f"no bounds were decided for the mini-batch under {NODE}.scope={settings.scope}"
        self._expect(Check.DECISION, decides, undecided)
        if step.token_pass is not None:
            turn = self.record.schedule.passes[min(batch.updates_before_pass, 1)]
            taken = step.token_pass.name
            self._expect(Check.PASS, taken == turn, f"Lopti's pass over the {turn} tokens takes the {taken} ones")
            ends = step.token_pass.eta
            lopti = settings.update
            same = (ends, step.token_pass.equal) == (lopti.eta, lopti.equal)
            other = f"Lopti's pass ends at a probability of {ends:g}, not as {lopti.eta:g} says"
            self._expect(Check.PASS, same, other)

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Compares the first micro-batch on copies, and follows the backward pass of each.

        A loss without a graph, as of a call under no_grad, trains nothing and is not looked at.
        """
        if not loss.requires_grad:
            return
        announced = Announced(self.settings, self.record, self._step, model_output, data)
        announced.rows = hash_rows_by_field(data)
        self._look_at_rows(announced, data)
        if not self._tokens and pad_rows(data["response_mask"]).any():
            self._compare_on_copies(announced, dp_group)
        if self.record.schedule.starts_at_ratio_one and not self._updates:
            self._expect_recomputed(announced)
        announced.besides = self._gradient(announced, dp_group, policy=False)
        self._expect_verls_terms(announced)
        self._expect_terms_of_outputs(announced, model_output, dp_group)
        loss.register_hook(announced.factors.append)
        keep_gradient(model_output["log_probs"], announced.gradients.append)
        self._followed.append(announced)

    def _expect_recomputed(self, announced: Announced) -> None:
        """Compares old_log_probs with what the first update computes at the same weights."""
        inputs = announced.inputs
        away = mean_distance(inputs.log_prob[inputs.mask], inputs.old_log_prob[inputs.mask])
        most = largest_distance(self._rounding_of(announced)) if self.half else DISTANCE[False]
        recomputed = "old_log_probs are announced as recomputed with the weights of the first update"
        other = f"a micro-batch of it is {away:.2g} nats away on average, more than {most:.2g}"
        self._expect(Check.OLD_LOG_PROBS, away <= most, f"{recomputed}, but {other}")

    def _rounding_of(self, announced: Announced) -> float | None:
        """Returns how far the floor's second pass is from the first update on a micro-batch, in nats on average.

        Both have the same weights, whichever those of old_log_probs were. It is None if there was no such pass.
        """
        measured = self._step.recut
        rows = announced.rows.get((OLD_LOG_PROBS, None), [])
        if measured is None or not measured.log_probs.keys() >= {*rows}:
            return None
        again = torch.cat([measured.log_probs[row] for row in rows])
        response = pad_rows(announced.data["response_mask"]).bool()
        return mean_distance(announced.inputs.log_prob[response], again)

    def end_update(self, step: OptimizerStep) -> None:
        """Compares the update's backward passes, and what it counted over all ranks."""
        self._updates += 1
        trained = [part for part in self._followed if part.factors and part.gradients]
        # A loss that was called twice for the same rows trains once.
        missed = [part for part in self._followed if part not in trained and not has_rows(trained, part)]
        factors = [float(sum(part.factors)) for part in trained]
        if not factors:
            factors = [1.0]
        sums = self._sums_over_ranks(max(factors), [*trained, *missed], step)
        # A rank of a pipeline may see no loss.
        if not self._followed:
            return
        self._expect_backward(trained, missed)
        self._expect_factors(factors, sums)
        self._expect_sizes(trained + missed, sums, step)
        self._expect_bounds(trained + missed, sums, step)

    def _sums_over_ranks(self, factor: float, parts: list[Announced], step: OptimizerStep) -> "Sums":
        """Returns what this rank's micro-batches count, summed over the ranks in one collective."""
        method = self.settings.method
        one_rank = torch.zeros(9 + method.statistics_size + method.second_statistics_size, dtype=torch.float64)
        one_rank[:5] = torch.tensor([1.0, factor, self._identity, *decision_number(step.decision)])
        for part in parts:
            one_rank[5:] += part.sums()
        return Sums(one_rank, self.all_reduce(one_rank).cpu())

    def _expect_backward(self, trained: list[Announced], missed: list[Announced]) -> None:
        """Compares the gradients of an update's backward passes with the announced ones.

        Args:
            trained: the micro-batches that a backward pass reached.
            missed: those that none reached.
        """
        number = len(trained) + len(missed)
        other = f"{len(missed)} of {number} micro-batches to the model's log-probabilities"
        self._expect(Check.BACKWARD, not missed, f"no backward pass came from the loss of {other}")
        for part in trained:
            again = self._rows.train(part.rows)
            other = "some rows of the rollout batch were trained again before others"
            self._expect(Check.TRAINED_ONCE, not again, other)
        differences = [part.difference(sum(part.gradients) / sum(part.factors))[0] for part in trained]
        self._in_training += [difference for difference in differences if not math.isnan(difference)]
        if trained:
            self._expect_gradient(Check.BACKWARD, "in the backward pass", self._in_training, trained[0])

    def _expect_factors(self, factors: list[float], sums: "Sums") -> None:
        """Compares what the engine multiplies losses by: in one update, on all ranks, and since the first update."""
        low = min(factors)
        high = max(factors)
        multiplied = f"the losses of one update's micro-batches are multiplied by factors from {low:g} to {high:g}"
        self._expect(Check.FACTORS, 0 < low <= high <= low * (1 + SAME_FACTOR), multiplied)
        mean = sums.factor / sums.ranks
        other = f"a rank's losses are multiplied by {high:g}, all ranks' by {mean:g} on average"
        self._expect(Check.FACTORS, abs(mean - high) <= SAME_FACTOR * high, other)
        if self._factor is None:
            self._factor = high
            self._micro_batches = len(factors)
            return
        other = f"the losses of this update are multiplied by {high:g}, those of the first one by {self._factor:g}"
        self._expect(Check.FACTORS, self._may_become(high, len(factors)), other)

    def _may_become(self, factor: float, micro_batches: int) -> bool:
        """Returns whether an engine may multiply an update's losses by a factor, after that of the first update."""
        change = factor / self._factor
        # Megatron multiplies by the number of micro-batches.
        allowed = [1.0, micro_batches / self._micro_batches]
        if self.scaled and change > 0:
            allowed.append(2.0 ** round(math.log2(change)))
        return any(abs(change - size) <= SAME_FACTOR * size for size in allowed)

    def _expect_sizes(self, parts: list[Announced], sums: "Sums", step: OptimizerStep) -> None:
        """Compares the numbers of tokens, sequences and ranks that losses are divided by with the sums over ranks."""
        sizes = {"batch_num_tokens": sums.tokens, "global_batch_size": sums.rows, "dp_size": sums.ranks}
        for (size, has), unit in zip(sizes.items(), ("tokens", "sequences", "ranks"), strict=True):
            given = sorted({float(part.data[size]) for part in parts})
            numbers = f"{', '.join(f'{number:g}' for number in given)} {unit}, which has {has:g}"
            self._expect(Check.SIZES, given == [has], f"losses are divided by a mini-batch's {numbers}")
        planned = f"bounds or metrics are those of {step.counted_tokens or 0:g} tokens"
        counted = step.counted_tokens in (None, sums.counted)
        self._expect(Check.COUNTED, counted, f"{planned}, and {sums.counted:g} were trained on")
        if step.selected_tokens is not None:
            kept = float(step.selected_tokens)
            most = (2 + SAME_SELECTED * kept) * self.record.schedule.selects_by_pass
            other = f"losses are divided by {kept:g} selected tokens, and {sums.selected:g} were selected"
            self._expect(Check.SELECTED, abs(kept - sums.selected) <= most, other)

    def _expect_bounds(self, parts: list[Announced], sums: "Sums", step: OptimizerStep) -> None:
        """Compares a rank's settings and bounds with the other ranks', and the bounds with their statistics."""
        other = "this rank's settings or sources are not those of the other ranks"
        self._expect(Check.SETTINGS, sums.same_on_all_ranks(2), other, stops=True)
        same = sums.same_on_all_ranks(3) and sums.same_on_all_ranks(4)
        self._expect(Check.DECISION, same, "this rank's bounds are not those of the other ranks", stops=True)
        if step.decision is not None and step.decided_from is not DecidedFrom.LAGGED:
            decided = self.settings.method.decide(sums.statistics)
            moved = max(part.bounds_apart(step.decision, decided) for part in parts)
            other = f"the bounds differ by {moved:.2g} of their size from those of the tokens that were trained on"
            # Not a number passes: verl skips the update.
            self._expect(Check.BOUNDS, not moved > SAME_BOUNDS[self.half], other)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Closes the receipt after the first rollout batch: rank 0 prints it.

        Returns:
            The largest difference, NaN if no rank compared any token; and how many checks did not hold.
        """
        self.finished = True
        made = batch.updates_before_pass + batch.update
        announced = self.record.schedule.updates_on_batch
        other = f"{made} updates on the first rollout batch, not {announced} as announced"
        self._expect(Check.UPDATES, announced in (None, made), other)
        if self._begun:
            other = "some rows of the rollout batch were trained more often than others"
            self._expect(Check.TRAINED_ONCE, self._rows.are_trained_equally_often(), other)
        tokens = torch.tensor([float(self._tokens)], dtype=torch.float64)
        one_rank = torch.cat([tokens, self._weights, self.checks.failures()])
        compared, weights, number, *failures = self.all_reduce(one_rank).tolist()
        if self.record.correction.weights_normalised and self._normaliser and weights:
            other = f"weights are divided by {self._normaliser:g}, but their mean is {weights / number:g}"
            same = not abs(self._normaliser * number / weights - 1) > SAME_NORMALISER
            self._expect(Check.WEIGHTS, same, other)
        self._expect(Check.COMPARED, compared or not self._updates, NOTHING, stops=False)
        self._warned = self.checks.number(failures)
        if self.rank == 0:
            print(f"clipx: {self}", flush=True)
        largest = max(self._on_copies + self._in_training, default=0.0) if compared else math.nan
        return {RECEIPT.key: [largest], RECEIPT_FAILED.key: [float(self._warned)]}

    def __str__(self) -> str:
        if not self._tokens:
            return f"receipt: {NOTHING}"
        on_copies = max(self._on_copies)
        in_training = max(self._in_training, default=0.0)
        line = (
            f"receipt: at ratios of its own choosing the gradient of {self._tokens} tokens is that of "
            f"clipx_{self.settings.method.name} under {self.record.aggregation_mode} to {on_copies:.1e} of a token's; "
            f"in the backward pass of {len(self._in_training)} micro-batches in {self._updates} updates to "
            f"{in_training:.1e}"
        )
        if not self._warned:
            return line
        return f"{line}; warned: {self._warned} checks did not hold, so this is no proof of what the run trains"

    def _look_at_rows(self, announced: Announced, data: Any) -> None:
        """Compares what a micro-batch brings of its rows with what the worker got, and with what verl's code makes."""
        correction = self.record.correction
        if not (self._begun or self._updates):
            self._rows.get(data)
        changed = self._rows.find_changed(announced.rows)
        other = f"{', '.join(changed)} of some rows are not those that the worker got for them"
        self._expect(Check.ROWS, not changed, other)
        weights = f"{ROLLOUT_IS}={correction.weights}"
        rejects = f"{ROLLOUT_RS}={correction.rejection}"
        asked = correction.weights is not None
        there = "rollout_is_weights" in data
        without = f"the samples came with{'' if there else 'out'} the weights of {weights}"
        self._expect(Check.WEIGHTS, asked == there, without, stops=True)
        wrong = f"{announced.other_tokens} tokens that {rejects} rejects came as if it did not, or the reverse"
        # A trainer of one's own may train fewer tokens than it counts.
        stops = correction.rejection is not None or announced.more_tokens
        self._expect(Check.REJECTION, not announced.other_tokens, wrong, stops=stops)
        if asked and there:
            differs, self._normaliser, sums = announced.weights_apart(self._normaliser)
            self._weights = self._weights + sums
            least = torch.finfo(data["rollout_is_weights"].dtype).eps
            other = f"a weight differs by {differs:.1e} of it from that of {weights} for its log-probabilities"
            self._expect(Check.WEIGHTS, not differs > max(SAME_FACTOR, least), other, stops=True)
        if correction.bypass:
            nats = announced.rollout_apart()
            other = f"{BYPASS}=True announces the rollout's own, but one is {nats:.2g} nats away"
            self._expect(Check.OLD_LOG_PROBS, not nats > SAME_COPY, f"old_log_probs: {other}", stops=True)

    def _compare_on_copies(self, real: Announced, dp_group: Any) -> None:
        """Compares the policy's term on probes under their own decisions and, every third, under the step's."""
        free = replace(self._step, decision=None, statistics=None)
        deciding = Announced(self.settings, self.record, free, real.model_output, real.data)
        for number in range(PROBES):
            # Every third probe has the step's own decision.
            start = deciding if number % 3 else real
            announced = start.probe(number)
            announced.besides = self._gradient(announced, dp_group, policy=False)
            difference, tokens = announced.difference(self._gradient(announced, dp_group))
            if not tokens:
                continue
            self._on_copies.append(difference)
            where = "at ratios of its own choosing"
            self._expect_gradient(Check.COPIES, where, self._on_copies, announced, stops=True)
            self._tokens += tokens
            self._expect_verls_terms(announced)

    def _gradient(self, announced: Announced, dp_group: Any, *, policy: bool = True) -> Tensor:
        """Returns the whole loss's gradient on the log-probabilities, or that without the policy's term, (tokens,)."""
        output, leaf = with_leaf(announced.model_output)
        with torch.enable_grad():
            loss = self._loss(announced, output, dp_group, policy=policy)
            # A loss without a graph has a gradient of 0.
            return torch.autograd.grad(loss + 0.0 * leaf.sum(), leaf)[0]

    def _loss(self, announced: Announced, output: Any, dp_group: Any, *, policy: bool) -> Tensor:
        """Returns the whole loss of a model's output, or that without the policy's term, 0-d."""
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as REGISTRY

        micro_batch, output, data = call_of(self.settings, replace(announced.step), output, announced.data)
        ours = [name for name in REGISTRY if name.startswith("clipx_") and not policy]
        without = dict.fromkeys(ours, lambda log_prob, **_: (0.0 * log_prob.sum(), {}))
        with patch.dict(REGISTRY, without), in_micro_batch(micro_batch):
            return self.loss_fn(model_output=output, data=data, dp_group=dp_group)[0]

    def _expect_verls_terms(self, announced: Announced) -> None:
        """Compares what verl's loss function adds to the policy's term with KL and distillation by verl's formulas."""
        _, output, data = call_of(self.settings, replace(announced.step), announced.model_output, announced.data)
        sides = [gradient_of_verls_terms(self.loss_fn, output, data, moved) for moved in (0.0, ROUNDING, -ROUNDING)]
        if sides[0] is None:
            return
        nothing = torch.zeros_like(announced.besides)
        differences = apart(announced.besides, torch.stack(sides), announced.at_ratio_1(), nothing)
        largest = largest_known(differences)
        other = (
            "verl's loss function adds to the policy's term what is neither KL nor entropy nor distillation: its "
            f"gradient differs by {largest:.1e} of a token's, more than {announced.resolved:g}, from theirs"
        )
        self._expect(Check.BESIDES, not largest > announced.resolved, other, stops=True)

    def _expect_terms_of_outputs(self, announced: Announced, model_output: Any, dp_group: Any) -> None:
        """Compares the gradient on the model's other outputs, such as the entropy, with that of verl's own terms."""
        names = [name for name, values in model_output.items() if name != "log_probs" and is_trained(values)]
        if not names:
            return
        output, leaves = with_leaves(model_output, names)
        with torch.enable_grad():
            loss = self._loss(announced, output, dp_group, policy=False)
            _, output, data = call_of(self.settings, replace(announced.step), output, announced.data)
            expected = verls_terms(self.loss_fn, output, data)
        if expected is None:
            return
        largest_of_policy = announced.at_ratio_1().abs().amax()
        for name, leaf in leaves.items():
            sides = gradient_on(expected, leaf).expand(3, *leaf.shape)
            size = largest_of_policy.to(leaf.dtype).expand_as(leaf)
            largest = largest_known(apart(gradient_on(loss, leaf), sides, size, torch.zeros_like(leaf)))
            other = (
                f"verl's loss function has a gradient on the model's {name} that differs by {largest:.1e} of a "
                f"token's, more than {announced.resolved:g}, from that of verl's own terms"
            )
            self._expect(Check.BESIDES, not largest > announced.resolved, other, stops=True)

    def _expect_gradient(
        self, check: Check, where: str, differences: list[float], announced: Announced, stops: bool | None = None
    ) -> None:
        largest = max(differences, default=0.0)
        differs = (
            f"{where} the gradient differs by {largest:.1e} of a token's, more than {announced.resolved:g}, from that"
        )
        loss_name = f"clipx_{self.settings.method.name} under {self.record.aggregation_mode}"
        self._expect(check, largest <= announced.resolved, f"{differs} of {loss_name}", stops=stops)

    def _expect(self, check: Check, holds: bool, otherwise: str, *, stops: bool | None = None) -> None:
        """Notes whether a check holds; see `Checks.expect`."""
        self.checks.expect(check, holds, otherwise, stops=stops)


class Sums:
    """What one rank counted in an update, and the sums over all ranks, float64 vectors.

    In both: the ranks, the factor of their losses, two numbers of their settings and decision and how many of the
    latter are infinite; sequences, and tokens that verl counts, that the method counts and that are selected; the
    method's statistics.
    """

    def __init__(self, one_rank: Tensor, over_ranks: Tensor):
        self._one_rank = one_rank
        self._over_ranks = over_ranks
        self.ranks, self.factor = over_ranks[:2].tolist()
        self.rows, self.tokens, self.counted, self.selected = over_ranks[5:9].tolist()
        self.statistics = over_ranks[9:]

    def same_on_all_ranks(self, place: int) -> bool:
        """Returns whether every rank has the same number there, as far as this rank's tells."""
        mean = float(self._over_ranks[place]) / self.ranks
        own = float(self._one_rank[place])
        return math.isclose(mean, own, rel_tol=SAME_DECISION)


def mean_distance(first: Tensor, second: Tensor) -> float:
    """Returns the mean absolute difference of log-probabilities, (tokens,), in nats; those not finite count as 0."""
    distances = (first.double() - second.double()).abs()
    return float(distances[distances.isfinite()].sum()) / max(len(distances), 1)


def largest_distance(rounding: float | None) -> float:
    """Returns how far old_log_probs may be from those of the same weights in half precision, in nats on average.

    Args:
        rounding: how far two passes with these weights are apart. If it is None or 0, nothing is known of rounding.
    """
    if not rounding:
        return DISTANCE[True]
    return min(max(TIMES_ROUNDING * rounding, LEAST_DISTANCE), DISTANCE[True])


def decision_number(decision: Tensor | None) -> tuple[float, float]:
    """Returns one number of the finite values of a decision, in which each has its own weight, and how many are not."""
    if decision is None:
        return 0.0, 0.0
    finite = decision.isfinite()
    weights = torch.arange(1, len(decision) + 1, dtype=torch.float64, device=decision.device)
    return float((decision.where(finite, 0.0).abs() * weights).sum()), float((~finite).sum())


def is_trained(values: Any) -> bool:
    """Returns whether a value of the model's output is a tensor whose gradient reaches the model."""
    return isinstance(values, Tensor) and values.requires_grad


def gradient_on(loss: Tensor, leaf: Tensor) -> Tensor:
    """Returns the gradient of a loss on a leaf, of its shape; 0 where the loss does not depend on it."""
    return torch.autograd.grad(loss + 0.0 * leaf.sum(), leaf, retain_graph=True)[0]


def has_rows(trained: list[Announced], part: Announced) -> bool:
    """Returns whether the rows of a micro-batch are all in others, by each field that they have."""
    for field_name, rows in part.rows.items():
        others = {row for other in trained for row in other.rows.get(field_name, ())}
        if not others.issuperset(rows):
            return False
    return True


def keep_gradient(log_probs: Tensor, keep: Callable[[Tensor], None]) -> None:
    """Has a function called with the gradient that goes on from the log-probabilities to the model.

    It is taken where their graph begins, after all hooks on the log-probabilities themselves, those that are registered
    later included.

    Args:
        log_probs: the model's, with or without a graph.
        keep: gets a copy of the gradient, (tokens,), in each backward pass.
    """
    if log_probs.grad_fn is None:
        log_probs.register_hook(lambda gradient: keep(flat(gradient).clone()))
        return
    place = log_probs.output_nr

    def keep_own(gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradient of the output that the log-probabilities are, if there is one."""
        if gradients[place] is not None:
            keep(flat(gradients[place]).clone())

    log_probs.grad_fn.register_prehook(keep_own)
