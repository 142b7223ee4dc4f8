"""The loss and its gradient are those of verl's agg_loss, in every mode, and what verl alone knows is left to it. Not
covered: the padded length as normaliser, which policy_loss refuses.
"""

import inspect
import itertools
import math

import pytest
import torch
from torch.testing import assert_close
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss

from verl_clipx.losses.applying.aggregation import sequence_weight
from verl_clipx.losses.applying.loss import per_token_loss
from verl_clipx.training.worker.aggregation import aggregate

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
NORMALISERS = (
    {"dp_size": 1},
    {"dp_size": 1, "batch_num_tokens": 37, "global_batch_size": 11, "loss_scale_factor": 9},
    {"dp_size": 4, "batch_num_tokens": 37, "global_batch_size": 11, "loss_scale_factor": 9},
    {"dp_size": 2, "batch_num_tokens": torch.tensor(37.0), "global_batch_size": torch.tensor(11.0)},
)


def micro_batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """log_prob, value, weighted, mask; the second sequence has no tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([[7], [0], [1], [4], [6]])
    log_prob, value, weighted = torch.randn(3, 5, 7, generator=generator)
    return log_prob.to(dtype), value * mask, weighted * mask, mask


def both(mode: str, normalisers: dict, tensors: tuple[torch.Tensor, ...], factor: float = 1.0) -> list[torch.Tensor]:
    """Ours and verl's loss and gradient."""
    log_prob, *others, mask = tensors
    ours, verls = (log_prob.clone().requires_grad_(True) for _ in range(2))
    loss = aggregate(ours, *others, mask, mode, **normalisers)
    expected = agg_loss(per_token_loss(verls, *others), mask, mode, **normalisers)
    (loss * factor + expected * factor).backward()
    return [loss.detach(), ours.grad, expected.detach(), verls.grad]


@pytest.mark.parametrize("normalisers", NORMALISERS, ids=["none", "one rank", "four ranks", "tensors"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_are_verls(mode, normalisers):
    assert sequence_weight(micro_batch()[-1], mode, torch.float32, **normalisers) is not None
    for dtype, factor in itertools.product((torch.float32, torch.bfloat16, torch.float16), (1.0, 0.3)):
        loss, gradient, expected, expected_gradient = both(mode, normalisers, micro_batch(dtype), factor)
        assert_close(loss, expected, rtol=1e-6, atol=0)
        # To a rounding, in the gradient's own dtype.
        assert_close(gradient, expected_gradient, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert gradient.any() and not gradient[1].any()
    # What is not finite reaches both.
    log_prob, value, weighted, mask = micro_batch()
    value[2, 0] = weighted[2, 0] = math.nan
    loss, gradient, *_ = both(mode, normalisers, (log_prob, value, weighted, mask))
    assert loss.isnan() and gradient[2, 0].isnan() and gradient[0].isfinite().all()


@pytest.mark.parametrize("tokens", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}, {"batch_num_tokens": 30}])
@pytest.mark.parametrize("of", [lambda number: number, lambda number: torch.tensor(float(number))])
def test_without_tokens_the_loss_is_verls_and_the_gradient_zero(tokens, of):
    normalisers = {"dp_size": 1, **{key: of(number) for key, number in tokens.items()}, "loss_scale_factor": 9}
    for mode in MODES:
        loss, gradient, *expected = both(mode, normalisers, [part * 0 for part in micro_batch()])
        assert_close([loss, gradient], expected, equal_nan=True)
        assert not gradient.any()


def test_every_mode_of_verls_is_known_and_what_verl_refuses_is_refused():
    for mode in ("token-mean", "seq-mean-token-mean"):
        with pytest.raises(ValueError, match="required when dp_size > 1"):
            aggregate(*micro_batch(), mode, dp_size=2)
    source = inspect.getsource(agg_loss)
    assert all(f'"{mode}"' in source for mode in MODES)
    assert source.count("loss_agg_mode ==") + source.count("loss_agg_mode in") == len(MODES)


def test_what_is_verls_alone_is_asked_of_it(monkeypatch):
    asked = []

    def of_verl(loss_mat, loss_mask, loss_agg_mode, **normalisers):
        asked.append((loss_agg_mode, normalisers))
        return loss_mat.sum()

    monkeypatch.setattr(core_algos, "agg_loss", of_verl)
    log_prob, value, weighted, mask = micro_batch()
    for mode, normalisers in (("token-median", {"dp_size": 1}), ("token-mean", {"dp_size": 1, "new": 3})):
        aggregate(log_prob, value, weighted, mask, mode, **normalisers)
        assert asked.pop() == (mode, normalisers)
