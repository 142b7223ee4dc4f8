"""verl's agg_loss of a loss whose gradient is known: for verl's own modes a weight a sequence, without a matrix."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.loss.loss import per_token_loss, summed_loss


def aggregated(
    log_prob: Tensor, value: Tensor, weighted: Tensor, mask: Tensor, mode: str, **normalisers: Any
) -> Tensor:
    """What verl's agg_loss makes of `per_token_loss`.

    Args:
        log_prob, value, weighted: as for `per_token_loss`; value and weighted are 0 outside the mask.
        mask: the tokens that are averaged over, bool, (sequences, length).
        mode: loss_agg_mode; one that is not known here is left to verl.
        **normalisers: dp_size, batch_num_tokens, global_batch_size, loss_scale_factor, as for agg_loss.

    Returns:
        The loss, 0-d.
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
    """The factor that a token's loss has in agg_loss: of every token, or of each sequence's, (sequences, 1).

    Args:
        mask, mode: as for `aggregated`.
        dtype: of the loss.
        dp_size, batch_num_tokens, global_batch_size, loss_scale_factor: as for agg_loss.
        **others: what a later verl adds.

    Returns:
        None where agg_loss has to be asked: another mode or argument, or what it refuses.
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
    # verl's own small number, that no sequence divides by 0, in the dtype that it adds it in.
    return weight / (count + 1e-8).to(dtype) if mode == "seq-mean-token-mean" else weight
