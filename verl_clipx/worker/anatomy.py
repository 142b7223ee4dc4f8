"""Adds up, over a rollout batch, where the ratio comes from, and sums it over the ranks once."""

from collections.abc import Callable

import torch
from torch import Tensor

from verl_clipx.base.tokens import Inputs
from verl_clipx.driver.config import Settings
from verl_clipx.driver.hydra_nodes import RunFacts
from verl_clipx.loss.anatomy import SIZE, anatomy_metrics, anatomy_sums
from verl_clipx.worker.step import MicroBatch, OptimizerStep, RolloutBatch


class AnatomySums:
    """The sums of `loss.anatomy` over one rank's share of a rollout batch.

    Args:
        run: the facts that tell which weights computed the old log-probabilities.
        all_reduce: sums a float64 vector over the data-parallel ranks.
        device: where the tokens are.
    """

    def __init__(self, run: RunFacts, all_reduce: Callable[[Tensor], Tensor], device: torch.device | str):
        self._bypass = bool(run.bypass)
        # Outside bypass mode, the weights before the first update are the old policy's if the trainer recomputes the
        # old log-probabilities. If a rollout batch comes in parts, updates on earlier parts have moved the weights.
        self._starts_equal = (run.old_policy_starts_the_update or self._bypass) and run.batches_a_step == 1
        self._all_reduce, self._device = all_reduce, device
        self._sums: Tensor | None = None

    def begin_update(self, step: OptimizerStep, batch: RolloutBatch) -> None:
        """Has the step's micro-batches added, and sets whether its weights computed the old log-probabilities.

        In bypass mode this is true only of tokens of age 0.
        """
        step.anatomy, step.equal_weights = self, self._starts_equal and batch.at_start

    def end_update(self, step: OptimizerStep) -> None:
        """Does nothing: the micro-batches have been added."""

    def add(self, settings: Settings, inputs: Inputs, decision: Tensor, known: MicroBatch) -> None:
        """Adds a micro-batch's tokens without waiting for the accelerator.

        Args:
            inputs, decision: as the loss got them.
            known: what is known of the micro-batch.
        """
        with torch.no_grad():
            found = anatomy_sums(
                settings.method,
                settings.shaping,
                inputs,
                decision,
                rollout_log_prob=known.rollout_log_prob,
                age=known.age,
                equal_weights=known.step.equal_weights,
                bypass=self._bypass,
            )
            self._sums = found if self._sums is None else self._sums + found

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """The metrics of the rollout batch by key. Every rank must call this."""
        own = torch.zeros(SIZE, dtype=torch.float64, device=self._device) if self._sums is None else self._sums
        self._sums = None
        return {key: [value] for key, value in anatomy_metrics(self._all_reduce(own)).items()}
