"""Decides before each optimizer step which statistics its bounds come from, and keeps what later steps need.

Everything that ranks have to agree on goes through one all-reduce per optimizer step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.modifiers.lopti import probability_quantile, probability_statistics
from verl_clipx.run.config import Settings
from verl_clipx.worker.layout import TokenPass, padded
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import NOTHING_REJECTED, Rejection
from verl_clipx.worker.state import ControllerState
from verl_clipx.worker.step import FIRST, OptimizerStep, micro_batch_of


class MiniBatchStatistics(NamedTuple):
    """What the extra pass over this rank's mini-batch finds.

    Args:
        statistics: what the bounds are decided from, (statistics_size,), float64.
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
        at_ratio_one: whether each rollout batch gets a single update, which starts at ratio 1 by the configuration.
            The statistics are then those at ratio 1, and no extra pass is made for them.
        rejects: whether verl's trainer removes tokens from response_mask that verl's own token count still includes.
        rejection: what the loss rejects by the current weights, in bypass mode.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        extra_pass: Callable[[Any, OptimizerStep], MiniBatchStatistics],
        all_reduce: Callable[[Tensor], Tensor],
        at_ratio_one: bool = False,
        rejects: bool = False,
        rejection: Rejection = NOTHING_REJECTED,
    ):
        self.settings = settings
        self.at_ratio_one = at_ratio_one and settings.update is None
        self.rejects, self.rejection = rejects, rejection
        self.method = settings.method
        self.state = ControllerState()
        self._extra_pass = extra_pass
        self._all_reduce = all_reduce
        # scope=lagged: the latest update's position and this rank's part of its statistics. The next step's all-reduce
        # sums it over the ranks.
        self._pending: tuple[str, Tensor] | None = None

    @property
    def counts_selected(self) -> bool:
        """Whether only an extra pass can tell how many tokens a selection within each sequence keeps."""
        select = self.settings.select
        return select is not None and select.over == "sequence" and bool(self.rejection.criteria)

    @property
    def needs_extra_pass(self) -> bool:
        """Whether some optimizer steps may need the extra pass."""
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

    def plan(self, data: Any, *, position: str, token_pass: TokenPass | None) -> OptimizerStep:
        """Decides an optimizer step's bounds.

        Args:
            data: this rank's mini-batch.
            position: names the update within its rollout batch.

        Returns:
            The step, with everything that its micro-batches need.

        Raises:
            ValueError: the method needs a field that the mini-batch lacks.
        """
        step = OptimizerStep(token_pass, decided_from=self._source(position))
        parts = self._counts(data, token_pass) | self._behind_bounds(data, step)
        if self._pending is not None:
            parts["pending"] = self._pending[1]
        totals = self._summed(parts)
        self._remember(totals.get("pending"))
        self._decide(step, totals, position)
        return step

    def _source(self, position: str) -> DecidedFrom:
        """The tokens that the bounds of the update at a position are decided from."""
        settings = self.settings
        if not settings.adaptive or settings.scope == "micro_batch":
            return DecidedFrom.MICRO_BATCH
        if settings.scope == "lagged" and self._remembers(position):
            return DecidedFrom.LAGGED
        # verl may fill up a rollout batch to more updates than the configuration gives: only the first is at ratio 1.
        first = self.at_ratio_one and position == FIRST.position
        # Without a forward pass the current policy's entropy is unknown. A pass that is made anyway is used.
        at_ratio_one = settings.scope == "lagged" or (first and not settings.selects_over_mini_batch)
        needs_entropy = "entropy" in self.method.asks_for
        return DecidedFrom.RATIO_ONE if at_ratio_one and not needs_entropy else DecidedFrom.MINI_BATCH

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

    def _behind_bounds(self, data: Any, step: OptimizerStep) -> dict[str, Tensor]:
        """This rank's part of what must be known before the update: statistics, entropies, selected tokens."""
        parts = {}
        if step.decided_from is DecidedFrom.RATIO_ONE:
            parts["statistics"] = self._at_ratio_one(data, step)
        by_extra_pass = step.decided_from is DecidedFrom.MINI_BATCH
        if by_extra_pass or self.settings.selects_over_mini_batch or self.counts_selected:
            observed = self._extra_pass(data, step)
            if by_extra_pass:
                parts["statistics"] = observed.statistics
            if self.settings.selects_over_mini_batch:
                parts["entropies"] = observed.entropies
            if self.counts_selected:
                parts["selected"] = observed.selected
        return parts

    def _decide(self, step: OptimizerStep, totals: dict[str, Tensor], position: str) -> None:
        """Fills in what the sums over all ranks determine of the step."""
        if "counted" in totals:
            step.counted_tokens = float(totals["counted"])
        if "selected" in totals:
            step.selected_tokens = totals["selected"].squeeze(0)
        if "entropies" in totals:
            step.entropy_bucket, step.selected_tokens = self.settings.select.threshold(totals["entropies"])
        step.statistics = totals.get("statistics")
        if step.decided_from is DecidedFrom.LAGGED:
            step.statistics = self.state.statistics[position]
        if step.statistics is not None:
            step.decision = self.method.decide(step.statistics)
        if self.settings.adaptive and self.settings.scope == "lagged":
            step.collected = []

    def finish(self, step: OptimizerStep, position: str) -> None:
        """Ends a step and keeps its statistics if the optimizer took it.

        Args:
            position: as it was planned for.
        """
        if step.taken:
            self.state.step += 1
            if step.collected and self.settings.scope == "lagged":
                self._pending = (position, step.statistics_of_training)

    def restore(self, state: ControllerState) -> None:
        """Continues from a checkpoint's state. What waits for the next step is dropped: it belongs to other weights."""
        self.state, self._pending = state, None

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
