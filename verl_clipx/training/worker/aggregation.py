"""verl's agg_loss for a loss with a known gradient."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.aggregation import sequence_weight
from verl_clipx.losses.applying.loss import per_token_loss, summed_loss


def aggregate(log_prob: Tensor, value: Tensor, weighted: Tensor, mask: Tensor, mode: str, **normalisers: Any) -> Tensor:
    """Return the scalar that verl's agg_loss makes of `per_token_loss`.

    Args:
        log_prob, value, weighted: as for `per_token_loss`; value and weighted are 0 outside the mask.
        mask: the tokens that are averaged over, bool, (sequences, length).
        mode: verl's loss_agg_mode.
        **normalisers: dp_size, batch_num_tokens, global_batch_size, loss_scale_factor, as for agg_loss.
    """
    weight = sequence_weight(mask, mode, value.dtype, **normalisers)
    if weight is not None:
        return summed_loss(log_prob, value, weighted, weight)
    # A mode that `sequence_weight` does not know.
    from verl.trainer.ppo.core_algos import agg_loss

    matrix = per_token_loss(log_prob, value, weighted)
    return agg_loss(loss_mat=matrix, loss_mask=mask, loss_agg_mode=mode, **normalisers)


def shares_of(mask: Tensor, mode: str, dtype: torch.dtype = torch.float32, **normalisers: Any) -> Tensor:
    """Return the factor of each token's loss in the scalar loss, by verl's own agg_loss, (sequences, length).

    Args:
        mask: the tokens that are averaged over, bool, (sequences, length).
        mode: verl's loss_agg_mode.
        dtype: of the factors.
        **normalisers: as for `aggregate`.
    """
    from verl.trainer.ppo.core_algos import agg_loss

    with torch.enable_grad():
        # The scalar is linear in the losses, so that its gradient is the same at any of them.
        losses = torch.zeros(mask.shape, dtype=dtype, device=mask.device, requires_grad=True)
        loss = agg_loss(losses, mask, mode, **normalisers)
    return torch.autograd.grad(loss, losses)[0]
