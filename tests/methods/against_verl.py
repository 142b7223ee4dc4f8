"""A method's registered loss beside verl's own of that name, and in parts; through composed configurations."""

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.composition import built_once
from tests.golden.runs import per_token, registered_loss

ACTOR = "actor_rollout_ref.actor"
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")


def ragged(seed: int, *, spread: float, sequences: int = 8, length: int = 12) -> dict[str, Tensor]:
    """Sequences of 1 to `length` tokens, the last one empty, with advantages of both signs that differ by token.

    Args:
        seed: of the generator.
        spread: standard deviation of the tokens' log-ratios.
        sequences, length: the shape.
    """
    generator = torch.Generator().manual_seed(seed)
    old_log_prob = -6 * torch.rand(sequences, length, dtype=torch.float64, generator=generator)
    drift = spread * torch.randn(sequences, length, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, length + 1, (sequences, 1), generator=generator)
    lengths[-1] = 0
    return {
        "old_log_prob": old_log_prob,
        "log_prob": (old_log_prob + drift).clamp(max=-1e-3),
        "advantages": torch.randn(sequences, length, dtype=torch.float64, generator=generator),
        "response_mask": torch.arange(length) < lengths,
    }


def assert_same_as_verl(
    ours: tuple[str, ...], verls: tuple[str, ...], batch: dict[str, Tensor], mode: str, metrics: tuple[str, ...]
) -> None:
    """Loss, gradient and some metrics are those of verl's own loss.

    Args:
        ours: overrides that choose the method.
        verls: overrides that choose verl's loss.
        batch: old_log_prob, log_prob, advantages and response_mask.
        mode: of aggregation, for both.
        metrics: those that have the same meaning in both.
    """
    found = registered_loss(built_once(ours), batch, loss_agg_mode=mode)
    expected = registered_loss(built_once(verls), batch, loss_agg_mode=mode)
    assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
    assert_close(found[1], expected[1], rtol=1e-12, atol=1e-14)
    assert found[1].any()
    for name in metrics:
        # verl's masked mean divides by (tokens + 1e-8), and counts in float32.
        assert_close(found[2][name], expected[2][name], rtol=1e-6, atol=1e-12)


def assert_parts_add_up(overrides: tuple[str, ...], batch: dict[str, Tensor]) -> None:
    """Micro-batches of whole sequences give the whole's loss, gradient and bounds."""
    config = built_once(overrides)
    method = config.policy_loss.clipx
    whole, gradient, _ = registered_loss(config, batch, loss_agg_mode="token-sum")
    for part_of in ([0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 0, 1, 2, 0, 1]):
        total, parts, part_of = 0.0, torch.zeros_like(gradient), torch.tensor(part_of)
        for part in range(int(part_of.max()) + 1):
            rows = part_of == part
            micro_batch = {name: tensor[rows] for name, tensor in batch.items()}
            loss, parts[rows], _ = registered_loss(config, micro_batch, loss_agg_mode="token-sum")
            total = total + loss
            assert per_token(method, micro_batch).bounds == per_token(method, batch).bounds
        assert_close(total, whole, rtol=1e-12, atol=1e-14)
        # exp rounds differently in vectors of another length.
        assert_close(parts, gradient, rtol=1e-12, atol=0)
