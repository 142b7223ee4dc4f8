"""A method's registered loss beside verl's own of that name, and beside a formula, through composed configurations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import registered_loss

ACTOR = "actor_rollout_ref.actor"
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def ragged(
    seed: int, *, spread: float = 0.6, sequences: int = 8, length: int = 12, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Sequences of 1 to `length` tokens, the last one empty, with advantages of both signs that differ by token.

    Their log-ratios have the standard deviation `spread`.
    """
    generator = torch.Generator().manual_seed(seed)
    old_log_prob = -6 * torch.rand(sequences, length, dtype=torch.float64, generator=generator)
    drift = spread * torch.randn(sequences, length, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, length + 1, (sequences, 1), generator=generator)
    lengths[-1] = 0
    return {
        "old_log_prob": old_log_prob.to(dtype),
        "log_prob": (old_log_prob + drift).clamp(max=-1e-3).to(dtype),
        "advantages": torch.randn(sequences, length, dtype=torch.float64, generator=generator).to(dtype),
        "response_mask": torch.arange(length) < lengths,
    }


def change_nothing(batch: dict[str, Tensor]) -> None:
    """Leave a batch as it is."""


@dataclass(frozen=True, kw_only=True)
class SameInVerl:
    """A method and verl's own loss, each under settings with which they are the same.

    Args:
        overrides: those that choose the method.
        verl_overrides: those that choose verl's loss, below the actor.
        metrics: those that have the same meaning in both, below "actor/".
        spreads: as of `ragged`.
        aggregations: those under which they are the same.
        weighted: whether rollout correction's weights are compared too.
        sequences: as of `ragged`.
        change_batch: what is done to the batch.
        rtol: of loss and gradient.
    """

    overrides: tuple[str, ...]
    verl_overrides: tuple[str, ...]
    metrics: tuple[str, ...] = ("pg_clipfrac", "ppo_kl")
    spreads: tuple[float, ...] = (0.6,)
    aggregations: tuple[str, ...] = AGGREGATIONS
    weighted: bool = False
    sequences: int = 8
    change_batch: Callable[[dict[str, Tensor]], None] = change_nothing
    rtol: float = 1e-12

    def check(self, aggregation: str, spread: float) -> None:
        """Assert that loss, gradient and the metrics are the same on a batch."""
        batch = ragged(0, spread=spread, sequences=self.sequences)
        self.change_batch(batch)
        self._compare(batch, loss_agg_mode=aggregation)
        if self.weighted:
            weights = torch.rand(batch["log_prob"].shape, generator=torch.Generator().manual_seed(1)).double()
            self._compare(batch, loss_agg_mode=aggregation, rollout_is_weights=weights)

    def _compare(self, batch: dict[str, Tensor], **arguments: Any) -> None:
        """Assert that both losses are the same with some arguments of a call."""
        actor = built_once(self.overrides)
        verl_actor = built_once(tuple(f"++{ACTOR}.{override}" for override in self.verl_overrides))
        loss, gradient, metrics = registered_loss(actor, batch, **arguments)
        expected_loss, expected_gradient, expected_metrics = registered_loss(verl_actor, batch, **arguments)
        assert_close(loss, expected_loss, rtol=self.rtol, atol=self.rtol / 100)
        assert_close(gradient, expected_gradient, rtol=self.rtol, atol=self.rtol / 100)
        assert gradient.any()
        for name in self.metrics:
            # verl's masked mean divides by (tokens + 1e-8), and counts in float32.
            assert_close(metrics[f"actor/{name}"], expected_metrics[f"actor/{name}"], rtol=1e-6, atol=1e-12)


def assert_gradient_of(
    group: str,
    batch: dict[str, Tensor],
    objective: Callable[[Tensor], Tensor],
    overrides: tuple[str, ...] = (),
    **further: Tensor,
) -> dict[str, float]:
    """Assert that a registered loss and its gradient are those of minus an objective's mean over the tokens.

    Return the loss's metrics.

    Args:
        objective: of each token, from log_prob, by the paper's formula.
        **further: arguments of the loss.
    """
    log_prob, mask = batch["log_prob"].clone().requires_grad_(True), batch["response_mask"]
    expected = -torch.where(mask, objective(log_prob), 0.0).sum() / mask.sum()
    expected.backward()
    loss, gradient, metrics = registered_loss(built_once((f"+clipx={group}", *overrides)), batch, **further)
    assert_close(loss, expected.detach())
    assert_close(gradient, log_prob.grad)
    assert gradient.any() and gradient.isfinite().all()
    return metrics
