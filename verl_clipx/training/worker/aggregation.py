"""verl's agg_loss for a loss with a known gradient. verl's own modes need only a weight per sequence, and no matrix."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.loss import per_token_loss, summed_loss


def aggregate(log_prob: Tensor, value: Tensor, weighted: Tensor, mask: Tensor, mode: str, **normalisers: Any) -> Tensor:
    """Applies verl's agg_loss to `per_token_loss` and returns a scalar; modes that are not known here are left to verl.

    Args:
        log_prob, value, weighted: as for `per_token_loss`; value and weighted are 0 outside the mask.
        mask: the tokens that are averaged over, bool, (sequences, length).
        **normalisers: dp_size, batch_num_tokens, global_batch_size, loss_scale_factor, as for agg_loss.
    """
    weight = sequence_weight(mask, mode, value.dtype, **normalisers)
    if weight is not None:
        return summed_loss(log_prob, value, weighted, weight)
    from verl.trainer.ppo.core_algos import agg_loss

    matrix = per_token_loss(log_prob, value, weighted)
    return agg_loss(loss_mat=matrix, loss_mask=mask, loss_agg_mode=mode, **normalisers)


def sequence_weight(
    mask: Tensor,
    mode: str,
    dtype: torch.dtype,
    dp_size: int = 1,
    batch_num_tokens: Tensor | int | None = None,
    global_batch_size: Tensor | int | None = None,
    loss_scale_factor: int | None = None,
    **others: Any,
) -> Tensor | float | None:
    """Returns the factor of a token's loss in agg_loss: one for all tokens, or one for each sequence, (sequences, 1).

    None if agg_loss itself must be called, because of another mode or argument (`others`), or one that it refuses.
    """
    number = batch_num_tokens if mode == "token-mean" else global_batch_size
    if others or (number is None and dp_size > 1 and mode != "token-sum"):
        return None
    if not isinstance(number, Tensor) and number == 0:
        return None
    if mode == "token-sum":
        return float(dp_size)
    if mode == "token-mean":
        return dp_size / (mask.sum(dtype=dtype) if number is None else number)
    if mode not in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return None
    count = mask.sum(-1, keepdim=True)
    weight = dp_size / ((count > 0).sum(dtype=dtype) if number is None else number)
    if mode == "seq-mean-token-sum-norm":
        weight = weight / (mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    # verl adds the same small number, in the same dtype, so that an empty sequence does not divide by 0.
    return weight / (count + 1e-8).to(dtype) if mode == "seq-mean-token-mean" else weight


def shares_of(mask: Tensor, mode: str, dtype: torch.dtype = torch.float32, **normalisers: Any) -> Tensor:
    """Returns the factor of each token's loss in the scalar loss, by verl's own agg_loss, (sequences, length)."""
    from verl.trainer.ppo.core_algos import agg_loss

    with torch.enable_grad():
        losses = torch.zeros(mask.shape, dtype=dtype, device=mask.device, requires_grad=True)
        loss = agg_loss(losses, mask, mode, **normalisers)
    return torch.autograd.grad(loss, losses)[0]
