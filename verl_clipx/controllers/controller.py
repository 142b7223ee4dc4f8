"""What every controller offers."""

from typing import Protocol

import torch
from torch import Tensor


class Controller(Protocol):
    """Additive statistics in, clip bounds out.

    No method waits for the accelerator: none reads a tensor's value on the host, indexes with a boolean mask or
    branches on a value.
    """

    @property
    def statistics_size(self) -> int:
        """Length of the statistics vector; 0 for bounds that depend on nothing."""
        ...

    def statistics(
        self,
        *,
        ratio: Tensor,
        advantages: Tensor,
        mask: Tensor,
        log_prob: Tensor,
        old_log_prob: Tensor,
        rollout_log_prob: Tensor | None = None,
    ) -> Tensor:
        """Sums over the tokens in the mask.

        Args:
            ratio: importance-sampling ratio as the loss clamps it, (sequences, length), float32 or float64.
            advantages: (sequences, length).
            mask: bool, (sequences, length). Values outside it don't count, but must be finite in every argument.
            log_prob: log-probabilities under the current policy, (sequences, length).
            old_log_prob: under the old policy (the one the ratio is taken to), (sequences, length).
            rollout_log_prob: under the policy that sampled, (sequences, length), where a controller needs it.

        Returns:
            (statistics_size,), float64, on the ratio's device; additive over any split of the tokens.
        """
        ...

    def decide(self, statistics: Tensor) -> Tensor:
        """A small float64 vector, on the statistics' device, that determines the bounds of every token."""
        ...

    def token_bounds(
        self, decision: Tensor, *, log_prob: Tensor, old_log_prob: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor | float, Tensor | float]:
        """Lower and upper bound on the ratio: floats, or tensors of `dtype` that broadcast to (sequences, length).

        Args:
            decision: what `decide` returned.
            log_prob, old_log_prob: as for `statistics`.
            dtype: the ratio's dtype.
        """
        ...

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        """What to log: 0-d float64 tensors under keys that don't depend on the data.

        No key contains "max" or "min": verl's driver would reduce it by maximum or minimum instead of the mean.
        """
        ...
