"""Decides before each optimizer step which statistics its bounds come from, and keeps what later steps need.

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

# If the bounds at ratio 1 differ from those of the training pass by more than this, the closed form is no longer used.
# The first number is for float32, the second for engines that compute in half precision. In half precision, rounding
# moved the bounds by up to 0.59 (docs/scopes.md). Ratios with a standard deviation of 0.09, for which ACPO's epsilon is
# 0.47 and not 0.2, move them by 1.35. A false alarm costs one forward pass per update; a missed one gives wrong bounds.
TOLERATED_DIFFERENCE, TOLERATED_IN_HALF = 1e-2, 0.9


class MiniBatchStatistics(NamedTuple):
    """What the extra pass over this rank's mini-batch found.

    Args:
        statistics: what the bounds are decided from, (statistics_size,), float64. If only a sample was passed, they are
            split by group: (GROUPS, statistics_size).
        entropies: histogram of the tokens' entropies, float64; empty unless selection is over the mini-batch.
        selected: how many tokens a selection within each sequence keeps, float64, (1,).
    """

    statistics: Tensor
    entropies: Tensor
    selected: Tensor


class StepPlanner:
    """Plans the optimizer steps of one training worker.

    Args:
        extra_pass: runs the extra pass, without gradient, over a mini-batch.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        rejects: whether verl's trainer removes tokens from response_mask that verl's own token count still includes.
        rejection: what the loss rejects by the current weights, in bypass mode.
        tolerated: from `tolerated_difference`.
        rank, ranks: the data-parallel rank and the number of ranks.
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
        # False as soon as one first update was assumed to start at ratio 1 and did not.
        self.ratio_starts_at_one = True
        # Whether this rank found its latest closed form wrong. The next all-reduce tells the other ranks.
        self._alarmed = False
        self._extra_pass = extra_pass
        self._all_reduce = all_reduce
        # scope=lagged: the latest update's position and this rank's part of its statistics. The next step's all-reduce
        # sums it over the ranks.
        self._pending: tuple[str, Tensor] | None = None
        # Of the latest sample: the estimate that its bounds were decided from, and this rank's part of the exact
        # statistics that the training pass found.
        self._sampled: tuple[Tensor, Tensor] | None = None

    @property
    def uses_closed_form(self) -> bool:
        """Whether statistics computed at ratio 1 may replace those of an extra pass."""
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
        """Whether only an extra pass can tell how many tokens a selection within each sequence keeps."""
        select = self.settings.select
        return select is not None and select.over == "sequence" and bool(self.rejection.criteria)

    @property
    def needs_extra_pass(self) -> bool:
        """Whether some optimizer steps need the extra pass."""
        return self.settings.needs_extra_pass or self.counts_selected

    def passes(self, data: Any) -> list[TokenPass | None]:
        """The passes over a rollout batch: those of Lopti, or a single one over all tokens, which is None.

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
            position: names the update within its rollout batch.
            weights_moved: whether this rank's weights differ from those that computed old_log_probs, 0-d bool; None if
                they certainly differ, or if this is unknown. Either all ranks pass None or none does.

        Returns:
            The step, with everything that its micro-batches need.

        Raises:
            ValueError: the method needs a field that the mini-batch lacks.
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
            # The old log-probabilities are the rollout's, or other weights computed them. One such update decides for
            # the rest of the run, because checking each time would take a second all-reduce.
            self.ratio_starts_at_one = False
            step.assumed = None
            del totals["statistics"]
            step.sample = self._sample(data, step)
            totals |= self._summed(self._statistics(self._extra_pass(data, step), step))
        self._decide(step, totals)
        return step

    def _counts(self, data: Any, token_pass: TokenPass | None) -> dict[str, Tensor]:
        """This rank's numbers of tokens, where verl's own count is not the one that the loss uses."""
        select, parts = self.settings.select, {}
        if token_pass is not None:
            parts["counted"] = token_pass.tokens(data).sum(dtype=torch.float64)[None]
        elif self.rejects:
            parts["counted"] = padded(data["response_mask"]).sum(dtype=torch.float64)[None]
        if select is not None and select.over == "sequence" and not self.counts_selected:
            parts["selected"] = select.counts(padded(data["response_mask"])).sum(dtype=torch.float64)[None]
        return parts

    def _behind_bounds(self, data: Any, step: OptimizerStep, *, closed_form: bool) -> dict[str, Tensor]:
        """This rank's part of what must be known before the update: statistics, entropies, selected tokens."""
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
        """The sequences of this rank that the extra pass takes; the latest update at the same position decides."""
        sequences = data["response_mask"].shape[0]
        if not self.settings.precision or sequences * self.ranks < LEAST:
            return None
        # The number of selected tokens must be exact, so that no sequence may be left out.
        share = 1.0 if self.counts_selected else self.state.shares.get(step.position, 1.0)
        seed = f"{self.state.step}/{step.position}"
        return drawn(sequences, share, rank=self.rank, ranks=self.ranks, seed=seed)

    @staticmethod
    def _statistics(found: MiniBatchStatistics, step: OptimizerStep) -> dict[str, Tensor]:
        """This rank's statistics from an extra pass; for a sample, by group and with the numbers of sequences."""
        step.decided_from = DecidedFrom.MINI_BATCH if step.sample is None else DecidedFrom.SAMPLE
        if step.sample is None:
            return {"statistics": found.statistics}
        numbers = [float(len(step.sample.rows)), float(step.sample.sequences)]
        return {"groups": found.statistics.flatten(), "numbers": torch.tensor(numbers, dtype=torch.float64)}

    def _decide(self, step: OptimizerStep, totals: dict[str, Tensor]) -> None:
        """Fills in what the sums over all ranks determine of the step."""
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
            # The extra pass took either no sequence or all of them.
            step.passed, step.predicted_error = (0.0, None) if step.assumed is not None else (1.0, 0.0)
        if step.statistics is None and lagged:
            step.statistics, step.decided_from = self.state.statistics[step.position], DecidedFrom.LAGGED
        if step.statistics is not None:
            step.decision = self.method.decide(step.statistics)
        step.collect = lagged or step.assumed is not None or step.estimated

    def finish(self, step: OptimizerStep, *, taken: bool) -> dict[str, float]:
        """Ends a step and keeps its statistics.

        Args:
            taken: whether the optimizer took the step; verl skips a step whose gradient is not finite.

        Returns:
            Metrics by key: if the bounds at ratio 1 were used, how far they were from those of the training pass on
            this rank's tokens; if a sample was used, its size and errors.
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
        """Continues from a checkpoint's state. What waits for the next step is dropped: it belongs to other weights."""
        self.state, self._pending, self._sampled = state, None, None

    def flush(self) -> None:
        """Sums the statistics that wait for the next step over the ranks now. Every rank must call this."""
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
        engine: verl's configuration of the actor's engine, which computes in bfloat16 by default.
    """
    precision = getattr(engine, "mixed_precision", None)
    dtype = precision.get("param_dtype", "bf16") if isinstance(precision, Mapping) else "bf16"
    return TOLERATED_DIFFERENCE if str(dtype) in ("fp32", "float32", "32") else TOLERATED_IN_HALF


def differing_log_probs(data: Any) -> Tensor:
    """How many tokens' old log-probability differs from the rollout's, 0-d float64; 1 if the rollout returned none."""
    old = padded(data["old_log_probs"])
    if "rollout_log_probs" not in data:
        return torch.ones((), dtype=torch.float64, device=old.device)
    different = (old != padded(data["rollout_log_probs"])) & padded(data["response_mask"]).bool()
    return different.sum(dtype=torch.float64)


RATIO_NOT_ONE = (
    "clipx: the first update of a rollout batch was assumed to start at ratio 1, but its bounds differ by %.3g "
    "times half their width. Either old_log_probs do not come from these weights, or they were computed with another "
    "kernel or precision. From now on every update has an extra pass."
)
