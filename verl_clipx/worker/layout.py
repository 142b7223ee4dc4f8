"""Converts between verl's two layouts, padded responses and the model's output, and restricts both to Lopti's passes.

The model's output for a response token stands one position to the token's left. verl's `no_padding_2_padding` cuts it
out in a loop that waits for the accelerator once per sequence. Nothing here waits for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_clipx.modifiers.lopti import low_probability


def padded(values: Tensor) -> Tensor:
    """A response field as (sequences, response length), 0 where there is no token."""
    return values.to_padded_tensor(0) if values.is_nested else values


def lengths(data: Any) -> tuple[Tensor, Tensor]:
    """The numbers of prompt tokens and of response tokens of each sequence, int64, (sequences,) each.

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
    """The positions of chosen response tokens in the model's output.

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
    """The model's output for the response tokens, padded with 0 and detached.

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


def in_model_output(values: Tensor, data: Any, total: int) -> Tensor:
    """Values of response tokens where the model's output for them stands, and 0 elsewhere, (total,).

    Args:
        values: (sequences, response length).
        data: verl's micro-batch.
        total: number of tokens of all prompts and responses.
    """
    prompt, response = lengths(data)
    column = torch.arange(values.shape[1], device=values.device)
    first = (prompt + response).cumsum(0) - response - 1
    position = (first[:, None] + column).clamp(max=total - 1)
    inside = torch.where(column < response[:, None], values, 0)
    return inside.new_zeros(total).scatter_add(0, position.flatten(), inside.flatten())


def where_kept(kept: Tensor, output: Tensor, other: Callable[[Tensor], Tensor]) -> Tensor:
    """The model's output, replaced by `other` of it at the positions that are not kept; `kept` is bool, (total,)."""
    values = torch.where(kept, flat(output), other(flat(output)))
    return torch.nested.nested_tensor_from_jagged(values, offsets=output.offsets()) if output.is_nested else values


def flat(output: Tensor) -> Tensor:
    """The model's output as (total, ...)."""
    return output.values() if output.is_nested else output


def with_leaf(model_output: Any) -> tuple[dict[str, Any], Tensor]:
    """The model's output without its graph, and its log-probabilities as a new leaf, (tokens,)."""
    output = {key: value.detach() if isinstance(value, Tensor) else value for key, value in model_output.items()}
    log_probs = output["log_probs"]
    leaf = flat(log_probs).clone().requires_grad_()
    nested = log_probs.is_nested
    output["log_probs"] = torch.nested.nested_tensor_from_jagged(leaf, offsets=log_probs.offsets()) if nested else leaf
    return output, leaf


@dataclass(frozen=True)
class TokenPass:
    """One pass over the rollout batch.

    Args:
        name: the group of tokens that is updated, "low" or "high".
        eta: the threshold on the old policy's probability.
        equal: whether a probability equal to eta counts as low.
    """

    name: str
    eta: float | Tensor
    equal: bool

    def tokens(self, data: Any) -> Tensor:
        """The tokens of this pass: bool, (sequences, response length).

        Args:
            data: verl's mini-batch or micro-batch.
        """
        low = low_probability(padded(data["old_log_probs"]), eta=self.eta, equal=self.equal)
        group = low if self.name == "low" else ~low
        return group & padded(data["response_mask"]).bool()


def restricted(model_output: Any, data: Any, tokens: Tensor) -> tuple[dict[str, Any], Any]:
    """A micro-batch in which only some tokens have an advantage, gradient, entropy and distance to the reference.

    The response mask stays, so that every aggregation keeps its normaliser.

    Args:
        model_output: verl's model output: log_probs and possibly entropy, over prompts and responses.
        data: verl's micro-batch.
        tokens: the tokens that keep all of these, bool, (sequences, response length).

    Returns:
        New model output and micro-batch; the given ones are not changed.
    """
    output = dict(model_output.items())
    log_probs = output["log_probs"]
    kept = in_model_layout(tokens, data, flat(log_probs).shape[0])
    output["log_probs"] = where_kept(kept, log_probs, Tensor.detach)
    if output.get("entropy") is not None:
        output["entropy"] = where_kept(kept, output["entropy"], torch.zeros_like)
    data = data.copy()
    advantages = padded(data["advantages"])
    data["advantages"] = torch.where(tokens, advantages, torch.zeros_like(advantages))
    if "ref_log_prob" in data:
        current = response_part(log_probs, data, tokens.shape[1])
        data["ref_log_prob"] = torch.where(tokens, padded(data["ref_log_prob"]).to(current.dtype), current)
    return output, data
