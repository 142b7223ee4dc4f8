"""Counts the updates that verl skips because their gradient is not finite, and warns of what was not finite."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from verl_clipx.base.shared_metrics import NOT_FINITE_LOG_PROBS, NOT_FINITE_RANK, SKIPPED_UPDATES
from verl_clipx.common.observing import Part
from verl_clipx.worker.not_finite import OF_LOG_PROBS, describe, merge_counts, not_finite_in
from verl_clipx.worker.step import OptimizerStep, RolloutBatch

logger = logging.getLogger(__name__)

# Stands among the fields' names for a gradient that is not finite although every field is.
GRADIENT = "gradient"


@contextmanager
def keep_gradient_norm(engine: Any, step: OptimizerStep) -> Iterator[None]:
    """Keeps in a step, on every rank, the norm of the gradient with which the engine takes it within the block.

    verl's metrics have the norm only on ranks with outputs, but every rank must know whether the step was taken.
    """
    take = engine.optimizer_step

    def optimizer_step(*args: Any, **kwargs: Any) -> Any:
        norm = take(*args, **kwargs)
        step.gradient_norm = None if norm is None else float(norm)
        return norm

    with patch.object(engine, "optimizer_step", optimizer_step):
        yield


class SkippedUpdates:
    """Counts skipped updates over a rollout batch, and names what was not finite in this rank's mini-batches once."""

    def __init__(self, engine: Any, rank: int, all_reduce: Callable[[Tensor], Tensor]):
        self._engine, self._rank, self._all_reduce = engine, rank, all_reduce
        self._named: set[str] = set()
        self.naming = Part("naming what was not finite")
        # verl's Megatron engine steps whatever the gradient is.
        strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
        self._verb = "takes" if strategy == "megatron" else "skips"

    def end_update(self, step: OptimizerStep, batch: RolloutBatch | None, data: Any) -> None:
        """Counts the update that ends if verl skipped it, and warns of what no earlier warning named."""
        if batch is not None and not step.taken:
            batch.skipped += 1
        self.naming.run(lambda: self._name(step, batch, data))

    def _name(self, step: OptimizerStep, batch: RolloutBatch | None, data: Any) -> None:
        wrong = step.not_finite
        if not step.taken and not wrong and self._engine.is_mp_src_rank_with_outputs():
            # The policy's loss was finite, but another term, such as verl's KL loss, may not be.
            wrong = not_finite_in(data)
        if batch is not None and not step.taken:
            batch.not_finite = merge_counts(batch.not_finite, wrong)
        if new := wrong.keys() - self._named:
            self._named |= new
            verb = "takes" if step.taken else self._verb
            logger.warning(NOT_FINITE, verb, step.gradient_norm, self._rank, describe(wrong))
        elif not step.taken and not wrong and self._rank == 0 and GRADIENT not in self._named:
            self._named.add(GRADIENT)
            logger.warning(GRADIENT_NOT_FINITE, self._verb, step.gradient_norm)

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """Returns metrics by key: how many updates verl skipped and, if any, on which rank values were not finite."""
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


NOT_FINITE = (
    "clipx: verl %s an update whose gradient's norm is %s. Not finite in rank %s's part of its mini-batch: %s. Each is "
    "named only once; clipx/skipped_updates counts such updates."
)
GRADIENT_NOT_FINITE = (
    "clipx: verl %s an update whose gradient's norm is %s, although everything that the loss is computed from is "
    "finite on rank 0. Either another rank names what is not finite, or it arose in the backward pass through the "
    "model. This is said only once; clipx/skipped_updates counts such updates."
)
