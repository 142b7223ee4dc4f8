"""Decides, before each optimizer step, which statistics its bounds come from, and what the next steps remember.

Everything that ranks have to agree on goes through one all-reduce per optimizer step.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.base.shared_metrics import CLOSED_FORM_DIFFERENCE, PREDICTED_ERROR, REAL_ERROR, SAMPLED
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.driver.config import Settings
from verl_clipx.loss.bounds import bounds_difference
from verl_clipx.modifiers.lopti import probability_quantile, probability_statistics
from verl_clipx.worker.layout import TokenPass, padded
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import NOTHING_REJECTED, Rejection
from verl_clipx.worker.sampling import GROUPS, LEAST, Sample, drawn, estimate
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import OptimizerStep, micro_batch_of

logger = logging.getLogger(__name__)

# A larger difference between the bounds at ratio 1 and those of the training pass ends the closed form: in float32, and
# where the engine computes in half precision. There rounding moved them by up to 0.59 (docs/scopes.md), and ratios that
# spread by 0.09, for which ACPO's epsilon is 0.47 and not 0.2, move them by 1.35. An alarm costs a forward pass an
# update, silence wrong bounds.
TOLERATED_DIFFERENCE, TOLERATED_IN_HALF = 1e-2, 0.9


class MiniBatchStatistics(NamedTuple):
    """What the extra pass over this rank's mini-batch found.

    Args:
        statistics: behind the bounds, (statistics_size,), float64; of a sample by group, (GROUPS, statistics_size).
        entropies: histogram of the tokens' entropies, float64; empty unless selection is over the mini-batch.
        selected: number of the tokens that a selection in each sequence keeps, float64, (1,).
    """

    statistics: Tensor
    entropies: Tensor
    selected: Tensor


class StepPlanner:
    """Plans the optimizer steps of one training worker.

    Args:
        settings: the clipx node.
        extra_pass: runs it, without gradient, over a mini-batch.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rejects: whether verl's trainer takes tokens out of response_mask, which its own count keeps.
        rejection: what the loss rejects by the current weights, in bypass mode.
        tolerated: from `tolerated_difference`.
        rank, ranks: data-parallel.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        extra_pass: Callable[[Any, OptimizerStep], MiniBatchStatistics],
        all_reduce: Callable[[Tensor], Tensor],
        rejects: bool = False,
        rejection: Rejection = NOTHING_REJECTED,
        tolerated: float = TOLERATED_DIFFERENCE,
        rank: int = 0,
        ranks: int = 1,
    ):
        self.settings = settings
        self.rejects, self.rejection, self.tolerated = rejects, rejection, tolerated
        self.rank, self.ranks = rank, ranks
        self.method = settings.method
        self.state = ControllerState()
        # Whether no first update has been found yet whose ratio was taken for 1 and was not.
        self.ratio_starts_at_one = True
        # Whether this rank's latest closed form was found wrong; the other ranks hear of it with the next numbers.
        self._alarmed = False
        self._extra_pass = extra_pass
        self._all_reduce = all_reduce
        # Of scope=lagged: this rank's part of the latest statistics; summed over ranks with the next step's numbers.
        self._pending: tuple[str, Tensor] | None = None
        # Of the latest sample: what its bounds were decided from, and this rank's part of what is exact.
        self._sampled: tuple[Tensor, Tensor] | None = None

    @property
    def uses_closed_form(self) -> bool:
        """Whether statistics at ratio 1 may stand in for those of an extra pass."""
        # Without a forward pass the current policy's entropy is unknown.
        without_entropy = "entropy" not in self.method.asks_for and not self.settings.selects_over_mini_batch
        return (
            self.settings.adaptive
            and self.settings.scope == "mini_batch"
            and without_entropy
            and self.ratio_starts_at_one
        )

    @property
    def counts_selected(self) -> bool:
        """Whether it takes an extra pass to know how many tokens a selection in each sequence keeps."""
        select = self.settings.select
        return select is not None and select.over == "sequence" and bool(self.rejection.criteria)

    @property
    def needs_extra_pass(self) -> bool:
        """Whether some optimizer steps need the extra pass, without gradient."""
        return self.settings.needs_extra_pass or self.counts_selected

    def passes(self, data: Any) -> list[TokenPass | None]:
        """The passes over a rollout batch: Lopti's two, or one over all tokens.

        Args:
            data: this rank's share of the rollout batch.
        """
        update = self.settings.update
        if update is None:
            return [None]
        eta: float | Tensor = update.eta
        if update.quantile is not None:
            local = probability_statistics(padded(data["old_log_probs"]), padded(data["response_mask"]))
            eta = float(probability_quantile(self._all_reduce(local), portion=update.quantile))
        return [TokenPass(name, eta, update.equal) for name in update.passes]

    def plan(
        self, data: Any, *, position: str, token_pass: TokenPass | None, weights_moved: Tensor | None
    ) -> OptimizerStep:
        """Decides an optimizer step's bounds.

        Args:
            data: this rank's mini-batch.
            position: of the update within its rollout batch.
            token_pass: Lopti's pass, or None.
            weights_moved: whether this rank's weights are others than those that computed old_log_probs, 0-d; None if
                they are for certain, or this is not known. All ranks pass None, or none does.

        Returns:
            The step, with everything that its micro-batches need.
        """
        step = OptimizerStep(position, token_pass)
        closed_form = self.uses_closed_form and weights_moved is not None
        parts = self._counts(data, token_pass) | self._behind_bounds(data, step, closed_form=closed_form)
        if closed_form:
            step.assumed = parts["statistics"]
            parts["differing"] = differing_log_probs(data)[None]
            parts["moved"] = weights_moved.to(torch.float64)[None] + self._alarmed
        if self._pending is not None:
            parts["pending"] = self._pending[1]
        if self._sampled is not None:
            parts["exact"] = self._sampled[1]

        totals = self._summed(parts)
        self._remember(totals.get("pending"))
        if "exact" in totals:
            step.error_before = bounds_difference(self.method, self._sampled[0], totals["exact"])
            self._sampled = None
        if closed_form and (float(totals["differing"]) == 0 or float(totals["moved"]) > 0):
            # The rollout's log-probabilities stand in for the old policy's, or those of other weights do. One such
            # update stands for the run: to look again each time would mean to reduce twice.
            self.ratio_starts_at_one = False
            step.assumed = None
            del totals["statistics"]
            step.sample = self._sample(data, step)
            totals |= self._summed(self._statistics(self._extra_pass(data, step), step))
        self._decide(step, totals)
        return step

    def _counts(self, data: Any, token_pass: TokenPass | None) -> dict[str, Tensor]:
        """This rank's numbers of tokens that verl does not count as the loss does."""
        select, parts = self.settings.select, {}
        if token_pass is not None:
            parts["counted"] = token_pass.tokens(data).sum(dtype=torch.float64)[None]
        elif self.rejects:
            parts["counted"] = padded(data["response_mask"]).sum(dtype=torch.float64)[None]
        if select is not None and select.over == "sequence" and not self.counts_selected:
            parts["selected"] = select.counts(padded(data["response_mask"])).sum(dtype=torch.float64)[None]
        return parts

    def _behind_bounds(self, data: Any, step: OptimizerStep, *, closed_form: bool) -> dict[str, Tensor]:
        """This rank's part of what has to be known before the update: statistics, entropies."""
        settings, parts = self.settings, {}
        no_history = settings.adaptive and settings.scope == "lagged" and not self._remembers(step.position)
        at_ratio_one = closed_form or (no_history and "entropy" not in self.method.asks_for)
        if at_ratio_one:
            parts["statistics"], step.decided_from = self._at_ratio_one(data, step), DecidedFrom.RATIO_ONE
        wanted = no_history or (settings.adaptive and settings.scope == "mini_batch")
        by_extra_pass = wanted and not at_ratio_one
        if settings.selects_over_mini_batch or by_extra_pass or self.counts_selected:
            if by_extra_pass:
                step.sample = self._sample(data, step)
            found = self._extra_pass(data, step)
            if by_extra_pass:
                parts |= self._statistics(found, step)
            if settings.selects_over_mini_batch:
                parts["entropies"] = found.entropies
            if self.counts_selected:
                parts["selected"] = found.selected
        return parts

    def _sample(self, data: Any, step: OptimizerStep) -> Sample | None:
        """What the extra pass takes of this rank's sequences, by the latest update at the same position."""
        sequences = data["response_mask"].shape[0]
        if not self.settings.precision or sequences * self.ranks < LEAST:
            return None
        # The number of tokens that a selection keeps is no estimate.
        share = 1.0 if self.counts_selected else self.state.shares.get(step.position, 1.0)
        seed = f"{self.state.step}/{step.position}"
        return drawn(sequences, share, rank=self.rank, ranks=self.ranks, seed=seed)

    @staticmethod
    def _statistics(found: MiniBatchStatistics, step: OptimizerStep) -> dict[str, Tensor]:
        """This rank's statistics from an extra pass; of a sample by group, with the numbers of sequences."""
        step.decided_from = DecidedFrom.MINI_BATCH if step.sample is None else DecidedFrom.SAMPLE
        if step.sample is None:
            return {"statistics": found.statistics}
        numbers = [float(len(step.sample.rows)), float(step.sample.sequences)]
        return {"groups": found.statistics.flatten(), "numbers": torch.tensor(numbers, dtype=torch.float64)}

    def _decide(self, step: OptimizerStep, totals: dict[str, Tensor]) -> None:
        """Fills in the step what follows from the sums over all ranks."""
        if "counted" in totals:
            step.counted_tokens = float(totals["counted"])
        if "selected" in totals:
            step.selected_tokens = totals["selected"].squeeze(0)
        if "entropies" in totals:
            step.entropy_bucket, step.selected_tokens = self.settings.select.threshold(totals["entropies"])
        lagged = self.settings.adaptive and self.settings.scope == "lagged"
        step.statistics = totals.get("statistics")
        if "groups" in totals:
            sampled, sequences = totals["numbers"].tolist()
            step.statistics, step.passed, step.predicted_error, step.next_share = estimate(
                self.method,
                totals["groups"].view(GROUPS, -1),
                sampled=sampled,
                sequences=sequences,
                precision=self.settings.precision,
            )
        elif self.settings.precision:
            # Either none of it, or all.
            step.passed, step.predicted_error = (0.0, None) if step.assumed is not None else (1.0, 0.0)
        if step.statistics is None and lagged:
            step.statistics, step.decided_from = self.state.statistics[step.position], DecidedFrom.LAGGED
        if step.statistics is not None:
            step.decision = self.method.decide(step.statistics)
        step.collect = lagged or step.assumed is not None or step.estimated

    def finish(self, step: OptimizerStep, *, taken: bool) -> dict[str, float]:
        """Remembers a step's statistics.

        Args:
            step: the step.
            taken: whether the optimizer took it: verl skips a step whose gradient is not finite.

        Returns:
            By key, how far the bounds at ratio 1 were from those of the training pass, by this rank's tokens, where
            they were used, and what is logged of a sample.
        """
        found = {SAMPLED: step.passed, PREDICTED_ERROR: step.predicted_error, REAL_ERROR: step.error_before}
        logged = {metric.key: value for metric, value in found.items() if value is not None}
        if taken:
            self.state.step += 1
            if step.collected is not None and self.settings.scope == "lagged":
                self._pending = (step.position, step.collected)
            if step.next_share is not None:
                self.state.shares[step.position] = step.next_share
        if step.estimated and step.collected is not None:
            self._sampled = (step.statistics, step.collected)
        if step.assumed is not None and step.collected is not None:
            difference = bounds_difference(self.method, step.assumed, step.collected.to(step.assumed.device))
            self._alarmed = difference > self.tolerated
            if self._alarmed:
                logger.warning(RATIO_NOT_ONE, difference)
            logged[CLOSED_FORM_DIFFERENCE.key] = difference
        return logged

    def restore(self, state: ControllerState) -> None:
        """Goes on from a checkpoint's state; what waits for the next step belongs to the weights before it."""
        self.state, self._pending, self._sampled = state, None, None

    def flush(self) -> None:
        """Sums what waits for the next step over the ranks now; every rank must call it."""
        if self._pending is not None:
            self._remember(self._all_reduce(self._pending[1]))

    def _remembers(self, position: str) -> bool:
        return position in self.state.statistics or (self._pending is not None and self._pending[0] == position)

    def _remember(self, total: Tensor | None) -> None:
        if total is not None:
            self.state.remember(self._pending[0], total, average=self.settings.lagged_average)
            self._pending = None

    def _at_ratio_one(self, data: Any, step: OptimizerStep) -> Tensor:
        old = padded(data["old_log_probs"])
        inputs = inputs_of(
            self.settings,
            micro_batch_of(self.settings, data, step),
            log_prob=old,
            old_log_prob=old,
            advantages=padded(data["advantages"]),
            mask=padded(data["response_mask"]).bool(),
        )
        return self.settings.functions(old.device).statistics(inputs)

    def _summed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        if not parts:
            return {}
        device = next((part.device for part in parts.values() if part.device.type != "cpu"), torch.device("cpu"))
        total = self._all_reduce(torch.cat([part.to(device) for part in parts.values()]))
        return dict(zip(parts, total.split([len(part) for part in parts.values()]), strict=True))


def tolerated_difference(engine: Any) -> float:
    """How far bounds at ratio 1 may be from those of the training pass before they count as wrong.

    Args:
        engine: verl's configuration of the actor's engine, which computes in bfloat16 unless it says otherwise.
    """
    precision = getattr(engine, "mixed_precision", None)
    dtype = precision.get("param_dtype", "bf16") if isinstance(precision, Mapping) else "bf16"
    return TOLERATED_DIFFERENCE if str(dtype) in ("fp32", "float32", "32") else TOLERATED_IN_HALF


def differing_log_probs(data: Any) -> Tensor:
    """Number of tokens whose old log-probability is not the rollout's, 0-d float64; 1 if the rollout returned none."""
    old = padded(data["old_log_probs"])
    if "rollout_log_probs" not in data:
        return torch.ones((), dtype=torch.float64, device=old.device)
    different = (old != padded(data["rollout_log_probs"])) & padded(data["response_mask"]).bool()
    return different.sum(dtype=torch.float64)


RATIO_NOT_ONE = (
    "clipx: the first update of a rollout batch was assumed to start at ratio 1, but its bounds differ by %.3g of "
    "their width. Either old_log_probs do not come from these weights, or they were computed with another kernel or "
    "precision. From now on every update has an extra pass."
)
