"""The receipt: compares what a run's loss does to log_prob in the first rollout batch with what its line announces.

At the first update every ratio is 1, where nearly every method has F = 1 and any two losses look alike. Therefore
verl's own loss function is called on copies of a micro-batch with the old log-probabilities and advantages of
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
from verl_clipx.training.worker.layout import TokenPass, flat, pad_rows, with_leaf, with_leaves
from verl_clipx.training.worker.rows import OLD_LOG_PROBS, Rows, hash_rows_by_field
from verl_clipx.training.worker.step import (
    MicroBatch,
    Observer,
    OptimizerStep,
    RolloutBatch,
    in_micro_batch,
    prepare_call,
)

# With 25 tokens, this many probes tell any two groups apart, and a method from itself with one of its numbers a
# twentieth smaller.
PROBES = 120

# One of this many probes is under the step's own decision, and the others are under decisions of their own.
PROBES_PER_STEP_DECISION = 3

# Relative differences that are put down to rounding: of what an engine multiplies the losses of micro-batches by, and
# of a weight of the rollout correction from that of verl's own code.
SAME_FACTOR = 1e-3

# The relative difference that is put down to rounding in what verl divides these weights by.
SAME_NORMALISER = 0.01

# In bypass mode old_log_probs are a copy of the rollout's. This is how much they may differ, in nats.
SAME_COPY = 1e-4

# The share by which the number of selected tokens may differ between two passes: a few tokens lie so close to the
# threshold that they fall on another side of it.
SAME_SELECTED = 0.05

# The relative difference that is put down to rounding in a decision, which every rank makes of the same sums.
SAME_DECISION = 1e-9

# How far a micro-batch may be from ratio 1 at the same weights, in nats on average. The key says whether the engine
# computes in half precision.
DISTANCE = {False: 1e-3, True: 0.05}

# In half precision less is allowed if two passes with these weights, over micro-batches of different sizes, are nearer
# to each other: their distance multiplied by this. Up to 8 times were measured, against float32 (docs/floor.md).
TIMES_ROUNDING = 8

# But never less than this, because some sizes of micro-batches gave equal numbers where others gave 0.009.
LEAST_DISTANCE = 0.01

# How far rounding may move bounds, as a share of half their width. The key says whether the engine computes in half
# precision. Up to 0.59 were measured in half precision.
SAME_BOUNDS = {False: 0.05, True: 0.9}

NOTHING_COMPARED = "no token of the first rollout batch could be compared, so nothing shows what the run trains"

# The places in the vector that the ranks sum in each update. The method's statistics follow.
RANKS = 0
FACTOR = 1
SETTINGS = 2
DECISION = 3
INFINITE_DECISIONS = 4
COUNTS = slice(5, 9)
STATISTICS_FROM = 9


@dataclass
class Receipt(Observer):
    """Compares what one rank's first updates do with what the run announces, and raises RuntimeError or warns.

    After the first rollout batch it is finished, and updates cost nothing.

    Args:
        settings: the run's settings, as this worker has them.
        record: what the driver announces.
        loss_fn: verl's loss function (model_output, data, dp_group) -> (loss, metrics).
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rank: the data-parallel rank. Rank 0 prints the receipt.
        tested: whether tests have run all of the run's options. If not, then under clipx.receipt=auto only what is
            compared on copies stops the run, and what depends on the engine is logged as a warning.
        half: whether the engine computes in half precision.
        scaled: whether the engine scales losses by a power of two that changes, as in float16.
        has_outputs: whether this rank reports its data-parallel rank's outputs to verl. Other ranks print nothing, and
            in a pipeline some of them see no loss.

    Raises:
        RuntimeError: when it is built, the worker's settings or sources are not those of the driver, and that stops the
            run.
    """

    settings: Settings
    record: RunRecord
    loss_fn: Callable[..., Any]
    all_reduce: Callable[[Tensor], Tensor]
    rank: int
    tested: bool
    half: bool = False
    scaled: bool = False
    has_outputs: bool = True
    # How often this rank compared a token on a copy, and how often all ranks did, which is known at the end.
    _token_comparisons: int = 0
    _token_comparisons_of_all_ranks: float = 0.0
    # How many updates were made.
    _updates: int = 0
    # The largest difference of a token's gradient on each copy, and in the backward pass of each micro-batch.
    _differences_on_copies: list[float] = field(default_factory=list)
    _differences_in_training: list[float] = field(default_factory=list)
    # The current update as it was planned, and its micro-batches.
    _step: OptimizerStep = field(default_factory=OptimizerStep)
    _micro_batches_of_update: list[Announced] = field(default_factory=list)
    # Whether `_rows` are all rows of the rollout batch, and not only those of the first update's micro-batches.
    _has_all_rows: bool = False
    _rows: Rows = field(default_factory=Rows)
    # What verl's weights are divided by, and the sum and the number of the weights before that division.
    _normaliser: float | None = None
    _weights: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    # What the first update's losses were multiplied by, and into how many micro-batches it was divided.
    _factor: float | None = None
    _micro_batches: int = 0
    # How many checks failed on some rank. It is known at the end.
    _failed_checks: int = 0

    def __post_init__(self) -> None:
        self.checks = Checks(self.settings.receipt, tested=self.tested)
        identity = identity_of(self.settings)
        differences = "; ".join(differences_from(self.record.identity, identity))
        failure = f"this worker is not set up as the driver: {differences}"
        self._expect(Check.SETTINGS, not differences, failure, stops=True)
        digest = hashlib.sha256(repr(sorted(identity.items())).encode()).digest()
        # 32 bits: a float64 still holds their sum over a million ranks exactly.
        self._identity = float(int.from_bytes(digest[:4], "big"))

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Keep the rows as the worker got them."""
        self._has_all_rows = True
        self._rows = Rows()
        self._rows.receive(data)

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Keep the step as it is planned, but with a decision of the receipt's own, and compare both decisions."""
        settings = self.settings
        self._micro_batches_of_update = []
        decision = None
        if step.statistics is not None:
            decision = settings.method.decide(step.statistics.clone())
        self._step = replace(step, collected=None, not_finite={}, decision=decision)
        failure = "the bounds are not those that the method decides from the step's statistics"
        self._expect(Check.DECISION, is_same_decision(decision, step.decision), failure)
        is_decided = not settings.adaptive or settings.scope == "micro_batch" or step.decision is not None
        failure = f"no bounds were decided for the mini-batch under {NODE}.scope={settings.scope}"
        self._expect(Check.DECISION, is_decided, failure)
        if step.token_pass is not None:
            self._expect_pass(step.token_pass, batch)

    def _expect_pass(self, token_pass: TokenPass, batch: RolloutBatch) -> None:
        """Check that Lopti's pass is the next one of the schedule and has the threshold of the settings."""
        passes = self.record.schedule.passes
        is_first_pass = batch.updates_before_pass == 0
        expected = passes[0] if is_first_pass else passes[1]
        failure = f"Lopti's pass should train the {expected} tokens, and trains the {token_pass.name} ones"
        self._expect(Check.PASS, token_pass.name == expected, failure)
        lopti = self.settings.update
        is_same = (token_pass.eta, token_pass.equal) == (lopti.eta, lopti.equal)
        failure = (
            f"Lopti's pass has eta={token_pass.eta:g} and equal={token_pass.equal}, and the settings have "
            f"eta={lopti.eta:g} and equal={lopti.equal}"
        )
        self._expect(Check.PASS, is_same, failure)

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Check a micro-batch before its backward pass, and record that pass for `end_update`.

        The policy's term is compared on copies of a micro-batch until some of its tokens could be compared.

        A loss without a graph, such as that of a call under no_grad, trains nothing and is not checked.
        """
        if not loss.requires_grad:
            return
        # Its rows and the gradient of other terms are filled in below; factors and gradients by the backward pass.
        announced = Announced(self.settings, self.record, self._step, model_output, data)
        announced.rows = hash_rows_by_field(data)
        self._expect_rows(announced, data)
        has_compared = self._token_comparisons > 0
        if not has_compared and pad_rows(data["response_mask"]).any():
            self._compare_on_copies(announced, dp_group)
        is_first_update = self._updates == 0
        if self.record.schedule.starts_at_ratio_one and is_first_update:
            self._expect_recomputed(announced)
        announced.gradient_of_other_terms = self._gradient(announced, dp_group, with_policy_term=False)
        self._expect_verls_terms(announced)
        self._expect_terms_of_outputs(announced, model_output, dp_group)
        # The backward pass appends what it multiplies the loss by, and the gradient on the log-probabilities.
        loss.register_hook(announced.factors.append)
        keep_gradient(model_output["log_probs"], announced.gradients.append)
        self._micro_batches_of_update.append(announced)

    def _expect_recomputed(self, announced: Announced) -> None:
        """Compare old_log_probs with what the first update computes at the same weights."""
        inputs = announced.inputs
        distance = mean_distance(inputs.log_prob[inputs.mask], inputs.old_log_prob[inputs.mask])
        largest = largest_distance(self._rounding_of(announced)) if self.half else DISTANCE[False]
        failure = (
            "old_log_probs are announced as recomputed with the weights of the first update, but a micro-batch of it "
            f"is {distance:.2g} nats away on average, more than {largest:.2g}"
        )
        self._expect(Check.OLD_LOG_PROBS, distance <= largest, failure)

    def _rounding_of(self, announced: Announced) -> float | None:
        """Return how far rounding alone moves a micro-batch's log-probabilities, in nats on average.

        It is the mean distance between those of the first update and those of the floor's second measurement. Both were
        computed with the same weights, even if old_log_probs were not. None if that was not measured.
        """
        second_pass = self._step.recut
        rows = announced.rows.get((OLD_LOG_PROBS, None), [])
        if second_pass is None or not second_pass.log_probs.keys() >= {*rows}:
            return None
        log_probs = torch.cat([second_pass.log_probs[row] for row in rows])
        response = pad_rows(announced.data["response_mask"]).bool()
        return mean_distance(announced.inputs.log_prob[response], log_probs)

    def end_update(self, step: OptimizerStep) -> None:
        """Compare the update's backward passes, and what it counted over all ranks."""
        self._updates += 1
        micro_batches = self._micro_batches_of_update
        trained = [announced for announced in micro_batches if announced.factors and announced.gradients]
        # If the loss is called twice for the same rows, only one of the calls is trained. The other is not missed.
        missed = [
            announced for announced in micro_batches if announced not in trained and not has_rows(trained, announced)
        ]
        factors = [float(sum(announced.factors)) for announced in trained]
        if not factors:
            factors = [1.0]
        sums = self._sum_over_ranks(max(factors), [*trained, *missed], step)
        # A rank of a pipeline may see no loss.
        if not micro_batches:
            return
        self._expect_backward(trained, missed)
        self._expect_factors(factors, sums)
        self._expect_sizes(trained + missed, sums, step)
        self._expect_bounds(trained + missed, sums, step)

    def _sum_over_ranks(self, factor: float, micro_batches: list[Announced], step: OptimizerStep) -> "Sums":
        """Sum over the ranks, by one collective, what micro-batches count and what all ranks must have in common.

        Args:
            factor: the largest number that the engine multiplied a loss of this rank by; 1.0 if it trained none.
            micro_batches: those of this rank.
            step: the optimizer step of the update.
        """
        method = self.settings.method
        statistics_size = method.statistics_size + method.second_statistics_size
        one_rank = torch.zeros(STATISTICS_FROM + statistics_size, dtype=torch.float64)
        decision_checksum, infinite_decisions = decision_number(step.decision)
        # In the order of RANKS, FACTOR, SETTINGS, DECISION and INFINITE_DECISIONS.
        in_common = [1.0, factor, self._identity, decision_checksum, infinite_decisions]
        # In float32 the last bits of the settings' number and of the checksum would be lost.
        one_rank[: COUNTS.start] = torch.tensor(in_common, dtype=torch.float64)
        for announced in micro_batches:
            # As `Announced.sums` orders them: the counts, then the method's statistics.
            one_rank[COUNTS.start :] += announced.sums()
        return Sums(one_rank, self.all_reduce(one_rank).cpu())

    def _expect_backward(self, trained: list[Announced], missed: list[Announced]) -> None:
        """Compare the gradients of an update's backward passes with the announced ones.

        Args:
            trained: the micro-batches that a backward pass reached.
            missed: those that none reached.
        """
        failure = (
            f"no backward pass came from the loss of {len(missed)} of {len(trained) + len(missed)} micro-batches to "
            "the model's log-probabilities"
        )
        self._expect(Check.BACKWARD, not missed, failure)
        for announced in trained:
            is_repeated = self._rows.train(announced.rows)
            failure = "some rows of the rollout batch were trained again before others"
            self._expect(Check.TRAINED_ONCE, not is_repeated, failure)
        for announced in trained:
            difference, _ = announced.difference(sum(announced.gradients) / sum(announced.factors))
            if not math.isnan(difference):
                self._differences_in_training.append(difference)
        if trained:
            self._expect_gradient(Check.BACKWARD, "in the backward pass", self._differences_in_training, trained[0])

    def _expect_factors(self, factors: list[float], sums: "Sums") -> None:
        """Compare what the engine multiplies losses by: within one update, on all ranks, and since the first update."""
        low = min(factors)
        high = max(factors)
        failure = f"the losses of one update's micro-batches are multiplied by factors from {low:g} to {high:g}"
        self._expect(Check.FACTORS, 0 < low <= high <= low * (1 + SAME_FACTOR), failure)
        mean = sums.factor / sums.ranks
        failure = f"a rank's losses are multiplied by {high:g}, all ranks' by {mean:g} on average"
        self._expect(Check.FACTORS, abs(mean - high) <= SAME_FACTOR * high, failure)
        if self._factor is None:
            self._factor = high
            self._micro_batches = len(factors)
            return
        failure = f"the losses of this update are multiplied by {high:g}, those of the first one by {self._factor:g}"
        self._expect(Check.FACTORS, self._may_become(high, len(factors)), failure)

    def _may_become(self, factor: float, micro_batches: int) -> bool:
        """Return whether the engine may multiply an update's losses by a factor, given that of the first update.

        Args:
            factor: what it multiplied them by.
            micro_batches: the number of micro-batches into which the update was divided.
        """
        change = factor / self._factor
        # Megatron multiplies by the number of micro-batches.
        allowed = [1.0, micro_batches / self._micro_batches]
        if self.scaled and change > 0:
            allowed.append(2.0 ** round(math.log2(change)))
        return any(abs(change - size) <= SAME_FACTOR * size for size in allowed)

    def _expect_sizes(self, micro_batches: list[Announced], sums: "Sums", step: OptimizerStep) -> None:
        """Compare the numbers of tokens, sequences and ranks that losses are divided by with the sums over ranks."""
        sizes = (
            ("batch_num_tokens", "tokens", sums.tokens),
            ("global_batch_size", "sequences", sums.rows),
            ("dp_size", "ranks", sums.ranks),
        )
        for key, unit, trained in sizes:
            divisors = sorted({float(announced.data[key]) for announced in micro_batches})
            listed = ", ".join(f"{divisor:g}" for divisor in divisors)
            failure = f"losses are divided by a mini-batch's {listed} {unit}, which has {trained:g}"
            self._expect(Check.SIZES, divisors == [trained], failure)
        failure = (
            f"bounds or metrics are those of {step.counted_tokens or 0:g} tokens, and {sums.counted:g} were trained on"
        )
        self._expect(Check.COUNTED, step.counted_tokens in (None, sums.counted), failure)
        if step.selected_tokens is not None:
            selected = float(step.selected_tokens)
            largest = (2 + SAME_SELECTED * selected) * self.record.schedule.selects_by_pass
            failure = f"losses are divided by {selected:g} selected tokens, and {sums.selected:g} were selected"
            self._expect(Check.SELECTED, abs(selected - sums.selected) <= largest, failure)

    def _expect_bounds(self, micro_batches: list[Announced], sums: "Sums", step: OptimizerStep) -> None:
        """Compare a rank's settings and bounds with the other ranks', and the bounds with their statistics."""
        failure = "this rank's settings or sources are not those of the other ranks"
        self._expect(Check.SETTINGS, sums.same_on_all_ranks(SETTINGS), failure, stops=True)
        is_same = sums.same_on_all_ranks(DECISION) and sums.same_on_all_ranks(INFINITE_DECISIONS)
        self._expect(Check.DECISION, is_same, "this rank's bounds are not those of the other ranks", stops=True)
        if step.decision is not None and step.decided_from is not DecidedFrom.LAGGED:
            decision = self.settings.method.decide(sums.statistics)
            difference = max(announced.bounds_apart(step.decision, decision) for announced in micro_batches)
            failure = (
                f"the bounds differ by {difference:.2g} of their size from those of the tokens that were trained on"
            )
            # NaN passes, because verl skips such an update.
            self._expect(Check.BOUNDS, not difference > SAME_BOUNDS[self.half], failure)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Close the receipt after the first rollout batch, and print it on rank 0.

        Returns:
            The largest difference on this rank, NaN if no rank compared any token; and how many checks failed on some
            rank.
        """
        self.finished = True
        updates_made = batch.updates_before_pass + batch.update
        updates_announced = self.record.schedule.updates_on_batch
        failure = f"{updates_made} updates on the first rollout batch, not {updates_announced} as announced"
        self._expect(Check.UPDATES, updates_announced in (None, updates_made), failure)
        if self._has_all_rows:
            failure = "some rows of the rollout batch were trained more often than others"
            self._expect(Check.TRAINED_ONCE, self._rows.are_trained_equally_often(), failure)
        # The comparisons on copies, the sum and the number of the weights, and the checks that failed so far.
        comparisons = torch.tensor([float(self._token_comparisons)], dtype=torch.float64)
        one_rank = torch.cat([comparisons, self._weights, self.checks.failures()])
        all_comparisons, weight_sum, weight_count, *failures = self.all_reduce(one_rank).tolist()
        self._token_comparisons_of_all_ranks = all_comparisons
        if self.record.correction.weights_normalised and self._normaliser and weight_sum:
            failure = f"weights are divided by {self._normaliser:g}, but their mean is {weight_sum / weight_count:g}"
            difference = abs(self._normaliser * weight_count / weight_sum - 1)
            # NaN passes: a loss with such a weight is not finite, and its update is skipped.
            self._expect(Check.WEIGHTS, not difference > SAME_NORMALISER, failure)
        may_see_no_loss = self._updates == 0 or not self.has_outputs
        is_compared = all_comparisons > 0 or may_see_no_loss
        self._expect(Check.COMPARED, is_compared, NOTHING_COMPARED, stops=False)
        # Including those that have failed on this rank since the sum: the two above.
        self._failed_checks = self.checks.count_failed(failures)
        if self.rank == 0 and self.has_outputs:
            print(f"clipx: {self}", flush=True)
        largest = math.nan
        if all_comparisons:
            largest = max(self._differences_on_copies + self._differences_in_training, default=0.0)
        return {RECEIPT.key: [largest], RECEIPT_FAILED.key: [float(self._failed_checks)]}

    def __str__(self) -> str:
        if not self._token_comparisons_of_all_ranks:
            return f"receipt: {NOTHING_COMPARED}"
        if not self._token_comparisons:
            line = (
                "receipt: this rank could compare no token; other ranks made "
                f"{self._token_comparisons_of_all_ranks:.0f} comparisons of a token"
            )
        else:
            line = (
                "receipt: on copies with made-up ratios, this rank's gradient differs by at most "
                f"{max(self._differences_on_copies):.1e} of a token's from that of clipx_{self.settings.method.name} "
                f"under {self.record.aggregation_mode}, in {self._token_comparisons} comparisons of a token"
            )
        if self._differences_in_training:
            line += (
                f"; in the backward pass, the gradient differs by at most {max(self._differences_in_training):.1e}, in "
                f"{len(self._differences_in_training)} micro-batches of {self._updates} updates"
            )
        if self._failed_checks:
            line += f"; warned: {self._failed_checks} checks did not hold, so this is no proof of what the run trains"
        return line

    def _expect_rows(self, announced: Announced, data: Any) -> None:
        """Compare a micro-batch's rows with those that the worker got, and their correction with verl's own code."""
        correction = self.record.correction
        if not self._has_all_rows and self._updates == 0:
            # Called without a rollout batch: the rows of the first update are those that the worker got.
            self._rows.receive(data)
        changed = self._rows.find_changed(announced.rows)
        failure = f"{', '.join(changed)} of some rows are not those that the worker got for them"
        self._expect(Check.ROWS, not changed, failure)
        weights = f"{ROLLOUT_IS}={correction.weights}"
        rejection = f"{ROLLOUT_RS}={correction.rejection}"
        is_weighted = correction.weights is not None
        has_weights = "rollout_is_weights" in data
        if has_weights:
            failure = f"the samples came with the weights of {weights}"
        else:
            failure = f"the samples came without the weights of {weights}"
        self._expect(Check.WEIGHTS, is_weighted == has_weights, failure, stops=True)
        failure = (
            f"{announced.wrongly_masked_tokens} tokens that {rejection} rejects came as if it did not, or the reverse"
        )
        # A trainer of one's own may train fewer tokens than it counts.
        stops = correction.rejection is not None or announced.trains_rejected_tokens
        self._expect(Check.REJECTION, not announced.wrongly_masked_tokens, failure, stops=stops)
        if is_weighted and has_weights:
            difference, self._normaliser, sums = announced.weights_apart(self._normaliser)
            self._weights = self._weights + sums
            rounding = torch.finfo(data["rollout_is_weights"].dtype).eps
            failure = f"a weight differs by {difference:.1e} of it from that of {weights} for its log-probabilities"
            self._expect(Check.WEIGHTS, not difference > max(SAME_FACTOR, rounding), failure, stops=True)
        if correction.bypass:
            distance = announced.rollout_apart()
            failure = f"old_log_probs: {BYPASS}=True announces the rollout's own, but one is {distance:.2g} nats away"
            self._expect(Check.OLD_LOG_PROBS, not distance > SAME_COPY, failure, stops=True)

    def _compare_on_copies(self, real: Announced, dp_group: Any) -> None:
        """Compare the policy's term on probes. Some have the step's bounds, and the others bounds of their own.

        Args:
            real: the micro-batch that is copied.
            dp_group: as verl's loss function gets it.
        """
        without_decision = replace(self._step, decision=None, statistics=None)
        own_bounds = Announced(self.settings, self.record, without_decision, real.model_output, real.data)
        for number in range(PROBES):
            has_step_decision = number % PROBES_PER_STEP_DECISION == 0
            original = real if has_step_decision else own_bounds
            announced = original.probe(number)
            announced.gradient_of_other_terms = self._gradient(announced, dp_group, with_policy_term=False)
            difference, tokens = announced.difference(self._gradient(announced, dp_group))
            if not tokens:
                continue
            self._token_comparisons += tokens
            self._differences_on_copies.append(difference)
            where = "on copies with made-up ratios"
            self._expect_gradient(Check.COPIES, where, self._differences_on_copies, announced, stops=True)
            self._expect_verls_terms(announced)

    def _gradient(self, announced: Announced, dp_group: Any, *, with_policy_term: bool = True) -> Tensor:
        """Return the gradient of verl's loss on the log-probabilities, with or without the policy's term, (tokens,)."""
        output, leaf = with_leaf(announced.model_output)
        with torch.enable_grad():
            loss = self._loss(announced, output, dp_group, with_policy_term=with_policy_term)
            # A loss without a graph has a gradient of 0.
            return torch.autograd.grad(loss + 0.0 * leaf.sum(), leaf)[0]

    def _loss(self, announced: Announced, output: Any, dp_group: Any, *, with_policy_term: bool) -> Tensor:
        """Return verl's loss of a model's output, with or without the policy's term, 0-d."""
        from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as REGISTRY

        micro_batch, output, data = prepare_call(self.settings, replace(announced.step), output, announced.data)
        replaced = {}
        if not with_policy_term:
            replaced = {name: return_zero_loss for name in REGISTRY if name.startswith("clipx_")}
        with patch.dict(REGISTRY, replaced), in_micro_batch(micro_batch):
            return self.loss_fn(model_output=output, data=data, dp_group=dp_group)[0]

    def _expect_verls_terms(self, announced: Announced) -> None:
        """Compare what verl's loss function adds to the policy's term with KL and distillation by verl's formulas."""
        _, output, data = prepare_call(self.settings, replace(announced.step), announced.model_output, announced.data)
        # At the log-probabilities as they are, and moved by rounding to either side.
        expected = [gradient_of_verls_terms(self.loss_fn, output, data, moved) for moved in (0.0, ROUNDING, -ROUNDING)]
        if expected[0] is None:
            return
        other_terms = announced.gradient_of_other_terms
        nothing = torch.zeros_like(other_terms)
        differences = apart(other_terms, torch.stack(expected), announced.gradient_at_ratio_1(), nothing)
        largest = largest_known(differences)
        failure = (
            "verl's loss function adds to the policy's term what is neither KL nor entropy nor distillation: its "
            f"gradient differs by {largest:.1e} of a token's, more than {announced.resolved:g}, from theirs"
        )
        self._expect(Check.BESIDES, not largest > announced.resolved, failure, stops=True)

    def _expect_terms_of_outputs(self, announced: Announced, model_output: Any, dp_group: Any) -> None:
        """Compare the gradient on the model's other outputs, such as the entropy, with that of verl's own terms."""
        names = [name for name, values in model_output.items() if name != "log_probs" and is_trained(values)]
        if not names:
            return
        output, leaves = with_leaves(model_output, names)
        with torch.enable_grad():
            loss = self._loss(announced, output, dp_group, with_policy_term=False)
            _, output, data = prepare_call(self.settings, replace(announced.step), output, announced.data)
            expected = verls_terms(self.loss_fn, output, data)
        if expected is None:
            return
        largest_of_policy = announced.gradient_at_ratio_1().abs().amax()
        for name, leaf in leaves.items():
            expected_gradient = gradient_on(expected, leaf).expand(3, *leaf.shape)
            size = largest_of_policy.to(leaf.dtype).expand_as(leaf)
            largest = largest_known(apart(gradient_on(loss, leaf), expected_gradient, size, torch.zeros_like(leaf)))
            failure = (
                f"verl's loss function has a gradient on the model's {name} that differs by {largest:.1e} of a "
                f"token's, more than {announced.resolved:g}, from that of verl's own terms"
            )
            self._expect(Check.BESIDES, not largest > announced.resolved, failure, stops=True)

    def _expect_gradient(
        self, check: Check, where: str, differences: list[float], announced: Announced, stops: bool | None = None
    ) -> None:
        """Expect the largest of the differences of gradients to be within what the dtype resolves; as `_expect`."""
        largest = max(differences, default=0.0)
        failure = (
            f"{where} the gradient differs by {largest:.1e} of a token's, more than {announced.resolved:g}, from that "
            f"of clipx_{self.settings.method.name} under {self.record.aggregation_mode}"
        )
        self._expect(check, largest <= announced.resolved, failure, stops=stops)

    def _expect(self, check: Check, holds: bool, failure: str, *, stops: bool | None = None) -> None:
        """Note a check that does not hold, and stop the run or warn; see `Checks.expect`."""
        self.checks.expect(check, holds, failure, stops=stops)


class Sums:
    """What one rank counted in an update, and the sums over all ranks.

    Args:
        one_rank: float64; the places of its numbers are named at the top of the file.
        over_ranks: its sum over the ranks.

    Attributes:
        ranks: the number of ranks.
        factor: the sum of what each rank's losses are multiplied by.
        rows: sequences.
        tokens: tokens that verl counts.
        counted: tokens that the method counts.
        selected: tokens that are selected.
        statistics: the method's.
    """

    def __init__(self, one_rank: Tensor, over_ranks: Tensor):
        self._one_rank = one_rank
        self._over_ranks = over_ranks
        self.ranks = float(over_ranks[RANKS])
        self.factor = float(over_ranks[FACTOR])
        self.rows, self.tokens, self.counted, self.selected = over_ranks[COUNTS].tolist()
        self.statistics = over_ranks[STATISTICS_FROM:]

    def same_on_all_ranks(self, place: int) -> bool:
        """Return whether all ranks have the same number at a place: whether this rank's is the mean over the ranks."""
        mean = float(self._over_ranks[place]) / self.ranks
        own = float(self._one_rank[place])
        return math.isclose(mean, own, rel_tol=SAME_DECISION)


def return_zero_loss(log_prob: Tensor, **_: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return, in the place of a registered loss, a loss of 0 with a graph, and no metrics."""
    return 0.0 * log_prob.sum(), {}


def is_same_decision(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two decisions are equal but for rounding; None equals None alone."""
    if first is None or second is None:
        return first is second
    return torch.allclose(first, second, rtol=SAME_DECISION, atol=0.0, equal_nan=True)


def mean_distance(first: Tensor, second: Tensor) -> float:
    """Return the mean absolute difference of log-probabilities, (tokens,), in nats; those not finite count as 0."""
    distances = (first.double() - second.double()).abs()
    return float(distances[distances.isfinite()].sum()) / max(len(distances), 1)


def largest_distance(rounding: float | None) -> float:
    """Return how far old_log_probs may be in half precision from those of the same weights, in nats on average.

    Args:
        rounding: how far two passes with these weights are apart. If it is None or 0, nothing is known of rounding.
    """
    if not rounding:
        return DISTANCE[True]
    return min(max(TIMES_ROUNDING * rounding, LEAST_DISTANCE), DISTANCE[True])


def decision_number(decision: Tensor | None) -> tuple[float, float]:
    """Return two numbers by which ranks compare their decisions without sending them.

    Returns:
        The sum of the magnitudes of the finite values, each multiplied by its position from 1 on, so that equal values
        in another order give another number; and the number of values that are not finite.
    """
    if decision is None:
        return 0.0, 0.0
    is_finite = decision.isfinite()
    weights = torch.arange(1, len(decision) + 1, dtype=torch.float64, device=decision.device)
    weighted_sum = (decision.where(is_finite, 0.0).abs() * weights).sum()
    return float(weighted_sum), float((~is_finite).sum())


def is_trained(values: Any) -> bool:
    """Return whether a value of the model's output is a tensor whose gradient reaches the model."""
    return isinstance(values, Tensor) and values.requires_grad


def gradient_on(loss: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient of a loss on a leaf, of its shape; 0 where the loss does not depend on it."""
    return torch.autograd.grad(loss + 0.0 * leaf.sum(), leaf, retain_graph=True)[0]


def has_rows(trained: list[Announced], announced: Announced) -> bool:
    """Return whether all rows of a micro-batch were trained in other micro-batches, by each field that they have."""
    for field_name, rows in announced.rows.items():
        trained_rows = {row for micro_batch in trained for row in micro_batch.rows.get(field_name, ())}
        if not trained_rows.issuperset(rows):
            return False
    return True


def keep_gradient(log_probs: Tensor, keep: Callable[[Tensor], None]) -> None:
    """Have a function called with the gradient that goes on from the log-probabilities to the model.

    The gradient is taken where their graph begins, so after all hooks on the log-probabilities themselves, including
    hooks that are registered later.

    Args:
        log_probs: the model's, with or without a graph.
        keep: gets a copy of the gradient, (tokens,), in each backward pass.
    """
    if log_probs.grad_fn is None:
        log_probs.register_hook(lambda gradient: keep(flat(gradient).clone()))
        return
    # The function that computed the log-probabilities may have other outputs. This is their index among them.
    output_number = log_probs.output_nr

    def keep_own(gradients: tuple[Tensor | None, ...]) -> None:
        """Keep the gradient of the output that the log-probabilities are, if there is one."""
        if gradients[output_number] is not None:
            keep(flat(gradients[output_number]).clone())

    log_probs.grad_fn.register_prehook(keep_own)
