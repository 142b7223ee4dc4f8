"""Decides, before each optimizer step, over which statistics its bounds are taken, and what the next ones remember.

Everything that ranks have to agree on goes through one all-reduce per optimizer step.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_clipx.modifiers.lopti import probability_quantile, probability_statistics
from verl_clipx.training.config import Settings
from verl_clipx.training.layout import TokenPass, padded
from verl_clipx.training.policy_loss import inputs_of
from verl_clipx.training.state import ControllerState
from verl_clipx.training.step import OptimizerStep, micro_batch_of

# A larger difference between the statistics at ratio 1 and those of the training pass is reported.
TOLERATED_DIFFERENCE = 1e-2


class Observation(NamedTuple):
    """What a pass without gradient over this rank's mini-batch found.

    Args:
        statistics: behind the bounds, (statistics_size,), float64.
        entropies: histogram of the tokens' entropies, float64; empty unless selection is over the mini-batch.
    """

    statistics: Tensor
    entropies: Tensor


class StepPlanner:
    """Plans the optimizer steps of one training worker.

    Args:
        settings: the clipx node.
        ratio_starts_at_one: whether old_log_probs come from the weights that a rollout batch's first update starts
            from, so that its ratio is 1 without a forward pass.
        observe: runs a pass without gradient over a mini-batch.
        all_reduce: sums a float64 vector over the data-parallel ranks.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        ratio_starts_at_one: bool,
        observe: Callable[[Any, OptimizerStep], Observation],
        all_reduce: Callable[[Tensor], Tensor],
    ):
        self.settings = settings
        self.method = settings.method
        self.state = ControllerState()
        self.ratio_starts_at_one = ratio_starts_at_one
        self._observe = observe
        self._all_reduce = all_reduce
        # Of scope=lagged: this rank's part of the latest statistics; summed over ranks with the next step's numbers.
        self._pending: tuple[str, Tensor] | None = None

    @property
    def selects_over_mini_batch(self) -> bool:
        """Whether entropy selection needs a threshold over the mini-batch."""
        return self.settings.select is not None and self.settings.select.over == "mini_batch"

    @property
    def observes(self) -> bool:
        """Whether some optimizer steps need a pass without gradient."""
        of_history = self.settings.scope == "lagged" and "entropy" in self.method.asks_for
        over_mini_batch = self.settings.scope == "mini_batch" or of_history
        return self.selects_over_mini_batch or (self.settings.adaptive and over_mini_batch)

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

    def plan(self, data: Any, *, position: str, token_pass: TokenPass | None, first: bool) -> OptimizerStep:
        """Decides an optimizer step's bounds.

        Args:
            data: this rank's mini-batch.
            position: of the update within its rollout batch.
            token_pass: Lopti's pass, or None.
            first: whether no update on this rollout batch came before.

        Returns:
            The step, with everything that its micro-batches need.
        """
        step = OptimizerStep(position, token_pass)
        select = self.settings.select
        wanted = self.settings.adaptive and self.settings.scope == "mini_batch"
        # Without a forward pass the current policy's entropy is unknown.
        entropy_known = "entropy" not in self.method.asks_for
        closed_form = (
            wanted and first and self.ratio_starts_at_one and not self.selects_over_mini_batch and entropy_known
        )
        no_history = self.settings.adaptive and self.settings.scope == "lagged" and not self._remembers(position)

        parts: dict[str, Tensor] = {}
        if token_pass is not None:
            parts["counted"] = token_pass.tokens(data).sum(dtype=torch.float64)[None]
        if select is not None and select.over == "sequence":
            parts["selected"] = select.counts(padded(data["response_mask"])).sum(dtype=torch.float64)[None]
        if closed_form or (no_history and entropy_known):
            parts["statistics"] = self._at_ratio_one(data, step)
            if closed_form:
                step.assumed = parts["statistics"]
                parts["differing"] = differing_log_probs(data)[None]
        observed = (wanted and not closed_form) or (no_history and not entropy_known)
        if self.selects_over_mini_batch or observed:
            observation = self._observe(data, step)
            if observed:
                parts["statistics"] = observation.statistics
            if self.selects_over_mini_batch:
                parts["entropies"] = observation.entropies
        if self._pending is not None:
            parts["pending"] = self._pending[1]

        totals = self._summed(parts)
        self._remember(totals.get("pending"))
        if closed_form and float(totals["differing"]) == 0:
            # The rollout's log-probabilities stand in for the old policy's: the ratio does not start at 1.
            self.ratio_starts_at_one = False
            step.assumed = None
            totals["statistics"] = self._all_reduce(self._observe(data, step).statistics)

        if "counted" in totals:
            step.counted_tokens = float(totals["counted"])
        if "selected" in totals:
            step.selected_tokens = totals["selected"].squeeze(0)
        if "entropies" in totals:
            step.entropy_bucket, step.selected_tokens = select.threshold(totals["entropies"])
        step.statistics = totals.get("statistics")
        if step.statistics is None and self.settings.adaptive and self.settings.scope == "lagged":
            step.statistics = self.state.statistics[position]
        if step.statistics is not None:
            step.decision = self.method.decide(step.statistics)
        step.observe = self.settings.adaptive and (self.settings.scope == "lagged" or step.assumed is not None)
        return step

    def finish(self, step: OptimizerStep, *, taken: bool) -> float | None:
        """Remembers a step's statistics.

        Args:
            step: the step.
            taken: whether the optimizer took it: verl skips a step whose gradient is not finite.

        Returns:
            How far the statistics at ratio 1 were from those of the training pass on this rank, where they were used.
        """
        if taken:
            self.state.step += 1
            if step.observed is not None and self.settings.scope == "lagged":
                self._pending = (step.position, step.observed)
            elif step.statistics is not None:
                self.state.statistics[step.position] = step.statistics
        if step.assumed is None or step.observed is None:
            return None
        return relative_difference(step.assumed, step.observed.to(step.assumed.device))

    def flush(self) -> None:
        """Sums what waits for the next step over the ranks now; every rank must call it."""
        if self._pending is not None:
            self._remember(self._all_reduce(self._pending[1]))

    def _remembers(self, position: str) -> bool:
        return position in self.state.statistics or (self._pending is not None and self._pending[0] == position)

    def _remember(self, total: Tensor | None) -> None:
        if total is None:
            return
        position = self._pending[0]
        past = self.state.statistics.get(position)
        share = self.settings.lagged_average
        if past is not None and share > 0:
            total = share * past.to(total.device) + (1 - share) * total
        self.state.statistics[position] = total
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


def differing_log_probs(data: Any) -> Tensor:
    """Number of tokens whose old log-probability is not the rollout's, 0-d float64; 1 if the rollout returned none."""
    old = padded(data["old_log_probs"])
    if "rollout_log_probs" not in data:
        return torch.ones((), dtype=torch.float64, device=old.device)
    different = (old != padded(data["rollout_log_probs"])) & padded(data["response_mask"]).bool()
    return different.sum(dtype=torch.float64)


def relative_difference(assumed: Tensor, found: Tensor) -> float:
    """Largest difference between two statistics vectors, relative to the largest number in them (at least 1)."""
    if not len(assumed):
        return 0.0
    scale = max(float(assumed.abs().max()), float(found.abs().max()), 1.0)
    difference = float((assumed - found).abs().max()) / scale
    return difference if math.isfinite(difference) else math.inf
