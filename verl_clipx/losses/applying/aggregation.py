"""The weights by which verl's modes of aggregation average a loss: one per sequence, and no matrix."""

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
