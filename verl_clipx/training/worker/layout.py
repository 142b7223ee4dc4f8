"""Reads verl's mini-batches: padded responses and the model's output, each one's prompt and age, Lopti's passes.

The model's output for a response token stands one position to the token's left. verl's `no_padding_2_padding` cuts it
out in a loop that waits for the accelerator once per sequence. Nothing here waits for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.modifiers.lopti import low_probability
from verl_clipx.training.worker.fingerprints import NEWEST, OLDEST

# The field of verl's mini-batch in which the worker keeps the samples' ages, as from `ages`, so that they are cut
# together with it.
AGE = "clipx_age"


def pad_rows(values: Tensor) -> Tensor:
    """Returns a response field as (sequences, response length), 0 where there is no token."""
    return values.to_padded_tensor(0) if values.is_nested else values


def places(data: Any, width: int, total: int) -> tuple[Tensor, Tensor]:
    """Returns where the model's output for each response token stands, and which there are, (sequences, width) each.

    Prompts and responses are jagged, or padded with an attention mask; `width` is the length of the longest response,
    `total` that of all prompts and responses together.
    """
    prompts = data["prompts"]
    responses = data["responses"]
    if prompts.is_nested:
        prompt = prompts.offsets().diff()
        response = responses.offsets().diff()
    else:
        attention = data["attention_mask"]
        prompt = attention[:, : prompts.shape[1]].sum(1)
        response = attention[:, prompts.shape[1] :].sum(1)
    column = torch.arange(width, device=response.device)
    first = (prompt + response).cumsum(0) - response - 1
    return (first[:, None] + column).clamp(max=total - 1), column < response[:, None]


def response_part(output: Tensor, data: Any, width: int) -> Tensor:
    """Returns the model's output for the response tokens, padded with 0 and detached, (sequences, width)."""
    values = flat(output).detach()
    place, present = places(data, width, values.shape[0])
    return torch.where(present, values[place], 0)


def in_model_output(values: Tensor, data: Any, total: int) -> Tensor:
    """Puts values of response tokens where the model's output for them stands, and 0 elsewhere, (total,)."""
    place, present = places(data, values.shape[1], total)
    inside = torch.where(present, values, 0)
    return inside.new_zeros(total).scatter_add(0, place.flatten(), inside.flatten())


def where_kept(kept: Tensor, output: Tensor, other: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the model's output, replaced by `other` of it where it is not kept; `kept` is bool, (total,)."""
    values = torch.where(kept, flat(output), other(flat(output)))
    return as_output(values, output)


def as_output(values: Tensor, output: Tensor) -> Tensor:
    """Returns values, (total, ...), in the layout of the model's output, jagged or flat."""
    if not output.is_nested:
        return values
    return torch.nested.nested_tensor_from_jagged(values, offsets=output.offsets())


def flat(output: Tensor) -> Tensor:
    """Returns the model's output as (total, ...)."""
    return output.values() if output.is_nested else output


def with_leaf(model_output: Any) -> tuple[dict[str, Any], Tensor]:
    """Returns the model's output without its graph, and its log-probabilities as a new leaf, (tokens,)."""
    output, leaves = with_leaves(model_output, ["log_probs"])
    return output, leaves["log_probs"]


def with_leaves(model_output: Any, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the model's output without its graph, and some of its values by name as new leaves, (tokens, ...)."""
    output = dict(model_output.items())
    for key, value in output.items():
        if isinstance(value, Tensor):
            output[key] = value.detach()
    leaves = {}
    for name in names:
        leaves[name] = flat(output[name]).clone().requires_grad_()
        output[name] = as_output(leaves[name], output[name])
    return output, leaves


def prompt_groups(data: Any) -> Tensor:
    """Numbers each sequence's prompt, alike in every micro-batch and on every rank: int64, (sequences,)."""
    names = [str(getattr(name, "data", name)).encode() for name in data["uid"]]
    numbers = [int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1 for name in names]
    return torch.tensor(numbers, dtype=torch.int64, device=pad_rows(data["response_mask"]).device)


def ages(data: Any, version: int) -> Tensor | None:
    """Returns the age of each sequence's first and last token in weight versions, int64, (sequences, 2).

    They differ where a generation was interrupted and resumed with newer weights. A rollout that names only the weights
    of the last token is taken not to resume any.

    Args:
        version: the one from which the training on the current rollout batch starts.

    Returns:
        None if the rollout does not say what generated a sequence.
    """
    if "extra_fields" not in data:
        return None
    versions = []
    for row in data["extra_fields"]:
        fields = getattr(row, "data", row)
        if not isinstance(fields, dict) or fields.get(NEWEST) is None:
            return None
        newest = fields[NEWEST]
        oldest = newest if fields.get(OLDEST) is None else fields[OLDEST]
        versions.append([int(oldest), int(newest)])
    return (version - torch.tensor(versions).reshape(-1, 2)).clamp(min=0)


@dataclass(frozen=True)
class TokenPass:
    """One pass over the rollout batch.

    Args:
        name: the group of tokens that is updated, "low" or "high".
        eta, equal: the threshold on the old policy's probability, and whether one equal to it counts as low.
    """

    name: str
    eta: float
    equal: bool

    def tokens(self, data: Any) -> Tensor:
        """Returns the tokens of this pass in a mini-batch or micro-batch: bool, (sequences, response length)."""
        low = low_probability(pad_rows(data["old_log_probs"]), eta=self.eta, equal=self.equal)
        group = low if self.name == "low" else ~low
        return group & pad_rows(data["response_mask"]).bool()


def restrict(model_output: Any, data: Any, tokens: Tensor) -> tuple[dict[str, Any], Any]:
    """Makes a micro-batch in which only some tokens have an advantage, gradient, entropy and reference distance.

    The response mask stays, so that every aggregation keeps its normaliser. The given ones are not changed.
    """
    output = dict(model_output.items())
    log_probs = output["log_probs"]
    kept = in_model_output(tokens.to(torch.uint8), data, flat(log_probs).shape[0]).bool()
    output["log_probs"] = where_kept(kept, log_probs, Tensor.detach)
    if output.get("entropy") is not None:
        output["entropy"] = where_kept(kept, output["entropy"], torch.zeros_like)
    data = data.copy()
    advantages = pad_rows(data["advantages"])
    data["advantages"] = torch.where(tokens, advantages, torch.zeros_like(advantages))
    if "ref_log_prob" in data:
        current = response_part(log_probs, data, tokens.shape[1])
        data["ref_log_prob"] = torch.where(tokens, pad_rows(data["ref_log_prob"]).to(current.dtype), current)
    return output, data
