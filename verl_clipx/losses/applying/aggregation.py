"""Computes the factors by which verl's modes of aggregation multiply the loss of each token, without a full matrix."""

from typing import Any

import torch
from torch import Tensor


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
    """Return the factor by which verl's `agg_loss` multiplies the loss of each token.

    Args:
        mask: the tokens that the loss is averaged over, bool, (sequences, length).
        mode: verl's `loss_agg_mode`.
        dtype: the loss's dtype.
        dp_size, batch_num_tokens, global_batch_size, loss_scale_factor: the arguments of `agg_loss` of these names.
        others: any further arguments of `agg_loss`.

    Returns:
        One factor for all tokens, or one for each sequence, (sequences, 1). None if `agg_loss` itself must be called:
        this function does not know the mode or the further arguments, or `agg_loss` refuses them.
    """
    # The number of tokens or sequences in the whole mini-batch, by which a mean divides; None: the number in this
    # micro-batch.
    total = batch_num_tokens if mode == "token-mean" else global_batch_size
    if others or (total is None and dp_size > 1 and mode != "token-sum"):
        return None
    if not isinstance(total, Tensor) and total == 0:
        return None
    if mode == "token-sum":
        return float(dp_size)
    if mode == "token-mean":
        if total is None:
            total = mask.sum(dtype=dtype)
        return dp_size / total
    if mode not in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        return None
    token_counts = mask.sum(-1, keepdim=True)
    if total is None:
        total = (token_counts > 0).sum(dtype=dtype)
    factor = dp_size / total
    if mode == "seq-mean-token-sum-norm":
        length = mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
        return factor / length
    if mode == "seq-mean-token-mean":
        # verl adds the same small number, in the same dtype, so that an empty sequence does not divide by 0.
        return factor / (token_counts + 1e-8).to(dtype)
    return factor
