"""Between verl's two layouts: padded responses, and the model's output over prompt and response.

The model's output for a response token stands one position to the token's left. verl's `no_padding_2_padding` cuts it
out in a loop over sequences that waits for the accelerator in each; nothing here waits.
"""

from typing import Any

import torch
from torch import Tensor


def padded(values: Tensor) -> Tensor:
    """A response field as (sequences, response length), 0 where there is no token."""
    return values.to_padded_tensor(0) if values.is_nested else values


def lengths(data: Any) -> tuple[Tensor, Tensor]:
    """Numbers of prompt and of response tokens of each sequence, int64 (sequences,).

    Args:
        data: verl's micro-batch: prompts and responses jagged, or padded with an attention mask.
    """
    prompts, responses = data["prompts"], data["responses"]
    if prompts.is_nested:
        return prompts.offsets().diff(), responses.offsets().diff()
    attention = data["attention_mask"]
    width = prompts.shape[1]
    return attention[:, :width].sum(1), attention[:, width:].sum(1)


def in_model_layout(chosen: Tensor, data: Any, total: int) -> Tensor:
    """Where chosen response tokens stand in the model's output.

    Args:
        chosen: bool, (sequences, response length).
        data: verl's micro-batch.
        total: number of tokens of all prompts and responses.

    Returns:
        bool, (total,).
    """
    prompt, response = lengths(data)
    ends = (prompt + response).cumsum(0)
    position = torch.arange(total, device=chosen.device)
    row = torch.searchsorted(ends, position, right=True).clamp(max=chosen.shape[0] - 1)
    column = position - (ends[row] - response[row] - 1)
    inside = (column >= 0) & (column < response[row])
    return inside & chosen[row, column.clamp(0, chosen.shape[1] - 1)]


def response_part(output: Tensor, data: Any, width: int) -> Tensor:
    """The response tokens' values in the model's output, padded with 0; no gradient flows through.

    Args:
        output: the model's output for every token of prompts and responses: jagged, or (total,).
        data: verl's micro-batch.
        width: length of the longest response.

    Returns:
        (sequences, width).
    """
    values = flat(output).detach()
    prompt, response = lengths(data)
    column = torch.arange(width, device=values.device)
    first = (prompt + response).cumsum(0) - response - 1
    position = (first[:, None] + column).clamp(max=values.shape[0] - 1)
    return torch.where(column < response[:, None], values[position], 0)


def replaced(output: Tensor, values: Tensor) -> Tensor:
    """The model's output with other values in the same layout."""
    if not output.is_nested:
        return values
    return torch.nested.nested_tensor_from_jagged(values, offsets=output.offsets())


def flat(output: Tensor) -> Tensor:
    """The model's output as (total, ...)."""
    return output.values() if output.is_nested else output
