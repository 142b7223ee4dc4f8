"""The loss and its gradient are those of verl's agg_loss, in every mode, and what verl alone knows is left to it. Not
covered: the padded length as normaliser, which policy_loss refuses.
"""

import inspect
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

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


def make_micro_batch(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """log_prob, value, weighted, mask; the second sequence has no tokens."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([[7], [0], [1], [4], [6]])
    log_prob, value, weighted = torch.randn(3, 5, 7, generator=generator)
    return log_prob.to(dtype), value * mask, weighted * mask, mask


class Aggregated(NamedTuple):
    """A loss and its gradient on log_prob."""

    loss: torch.Tensor
    gradient: torch.Tensor


def aggregate_both(
    mode: str, normalisers: dict, tensors: Sequence[torch.Tensor], factor: float = 1.0
) -> tuple[Aggregated, Aggregated]:
    """What the plugin and what verl's agg_loss make of a micro-batch; factor: on the losses before their gradients."""
    log_prob, value, weighted, mask = tensors
    log_prob_of_plugin = log_prob.clone().requires_grad_(True)
    log_prob_of_verl = log_prob.clone().requires_grad_(True)
    loss = aggregate(log_prob_of_plugin, value, weighted, mask, mode, **normalisers)
    loss_of_verl = agg_loss(per_token_loss(log_prob_of_verl, value, weighted), mask, mode, **normalisers)
    (loss * factor + loss_of_verl * factor).backward()
    return Aggregated(loss.detach(), log_prob_of_plugin.grad), Aggregated(loss_of_verl.detach(), log_prob_of_verl.grad)


@pytest.mark.parametrize("normalisers", NORMALISERS, ids=["none", "one rank", "four ranks", "tensors"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_are_verls(mode, normalisers):
    assert sequence_weight(make_micro_batch()[-1], mode, torch.float32, **normalisers) is not None
    for dtype, factor in itertools.product((torch.float32, torch.bfloat16, torch.float16), (1.0, 0.3)):
        actual, expected = aggregate_both(mode, normalisers, make_micro_batch(dtype), factor)
        assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
        # To a rounding, in the gradient's own dtype.
        assert_close(actual.gradient, expected.gradient, rtol=2 * torch.finfo(dtype).eps, atol=0)
        assert actual.gradient.any() and not actual.gradient[1].any()
    # What is not finite reaches both.
    log_prob, value, weighted, mask = make_micro_batch()
    value[2, 0] = weighted[2, 0] = math.nan
    actual, _ = aggregate_both(mode, normalisers, (log_prob, value, weighted, mask))
    assert actual.loss.isnan() and actual.gradient[2, 0].isnan() and actual.gradient[0].isfinite().all()


@pytest.mark.parametrize("counts", [{}, {"batch_num_tokens": 0, "global_batch_size": 0}, {"batch_num_tokens": 30}])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_without_tokens_the_loss_is_verls_and_the_gradient_zero(counts, as_tensors):
    if as_tensors:
        counts = {key: torch.tensor(float(number)) for key, number in counts.items()}
    normalisers = {"dp_size": 1, **counts, "loss_scale_factor": 9}
    for mode in MODES:
        actual, expected = aggregate_both(mode, normalisers, [tensor * 0 for tensor in make_micro_batch()])
        assert_close(actual.loss, expected.loss, equal_nan=True)
        assert_close(actual.gradient, expected.gradient, equal_nan=True)
        assert not actual.gradient.any()


def test_every_mode_of_verls_is_known_and_what_verl_refuses_is_refused():
    for mode in ("token-mean", "seq-mean-token-mean"):
        with pytest.raises(ValueError, match="required when dp_size > 1"):
            aggregate(*make_micro_batch(), mode, dp_size=2)
    source = inspect.getsource(agg_loss)
    assert all(f'"{mode}"' in source for mode in MODES)
    assert source.count("loss_agg_mode ==") + source.count("loss_agg_mode in") == len(MODES)


def test_what_is_verls_alone_is_asked_of_it(monkeypatch):
    calls = []

    def agg_loss_of_verl(loss_mat, loss_mask, loss_agg_mode, **normalisers):
        calls.append((loss_agg_mode, normalisers))
        return loss_mat.sum()

    monkeypatch.setattr(core_algos, "agg_loss", agg_loss_of_verl)
    for mode, normalisers in (("token-median", {"dp_size": 1}), ("token-mean", {"dp_size": 1, "new": 3})):
        aggregate(*make_micro_batch(), mode, **normalisers)
        assert calls.pop() == (mode, normalisers)
