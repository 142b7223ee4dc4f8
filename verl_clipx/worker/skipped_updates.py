"""Counts the updates that verl skips because their gradient is not finite, and reports what was not finite."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_clipx.base.shared_metrics import NOT_FINITE_LOG_PROBS, NOT_FINITE_RANK, SKIPPED_UPDATES
from verl_clipx.worker.not_finite import OF_LOG_PROBS, NotFiniteLog, not_finite_in, together
from verl_clipx.worker.step import OptimizerStep, RolloutBatch


class SkippedUpdates:
    """Counts skipped updates over a rollout batch, and logs what was not finite in this rank's mini-batches.

    Args:
        engine: verl's engine.
        rank: of this process, for the log.
        all_reduce: sums a float64 vector over the data-parallel ranks.
    """

    def __init__(self, engine: Any, rank: int, all_reduce: Callable[[Tensor], Tensor]):
        self._engine, self._all_reduce = engine, all_reduce
        self._log = NotFiniteLog(rank)

    def end_update(self, step: OptimizerStep, batch: RolloutBatch | None, data: Any) -> None:
        """Counts the update that ends if verl skipped it.

        Args:
            batch: the rollout batch in which a skipped update is counted; None outside one.
            data: this rank's mini-batch.
        """
        found = step.not_finite
        if not step.taken and not found and self._engine.is_mp_src_rank_with_outputs():
            # The policy's loss was finite, but another term, such as verl's KL loss, may not be.
            found = not_finite_in(data)
        self._log.say(found, taken=step.taken, norm=step.gradient_norm)
        if batch is not None and not step.taken:
            batch.skipped += 1
            batch.not_finite = together(batch.not_finite, found)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Metrics by key: how many updates verl skipped and, if any, on which rank values were not finite."""
        logged = {SKIPPED_UPDATES.key: [float(batch.skipped)]}
        if batch.skipped:
            # All ranks reach this line, because the gradient's norm is the same on all of them.
            of_ranks = torch.zeros(self._engine.get_data_parallel_size() + 1, dtype=torch.float64)
            of_ranks[self._engine.get_data_parallel_rank()] = float(bool(batch.not_finite))
            of_log_probs = [batch.not_finite[name].sequences for name in OF_LOG_PROBS if name in batch.not_finite]
            of_ranks[-1] = max(of_log_probs, default=0)
            *wrong, sequences = self._all_reduce(of_ranks).tolist()
            first = next((rank for rank, number in enumerate(wrong) if number), -1)
            logged |= {NOT_FINITE_RANK.key: [float(first)], NOT_FINITE_LOG_PROBS.key: [sequences]}
        return logged
