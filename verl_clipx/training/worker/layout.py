"""Reads verl's mini-batches: padded responses and the model's output, their prompts and ages, Lopti's passes.

The model's output for a response token stands one position to the token's left. verl's `no_padding_2_padding` cuts it
out in a loop that waits for the accelerator once per sequence. Nothing here waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.modifiers.lopti import low_probability
from verl_clipx.training.worker.fingerprints import NEWEST, OLDEST

# The field of verl's mini-batch in which the worker keeps the samples' ages, as `ages` returns them. verl divides it
# into micro-batches together with the other fields.
AGE = "clipx_age"


def pad_rows(values: Tensor) -> Tensor:
    """Return a response field as (sequences, response length).

    A jagged field is padded with 0. A padded field is returned unchanged, whatever stands in its padding.
    """
    return values.to_padded_tensor(0) if values.is_nested else values


def sequence_lengths(data: Any) -> tuple[Tensor, Tensor]:
    """Return the numbers of tokens of each sequence's prompt and of its response: int64, (sequences,) each.

    Args:
        data: verl's mini-batch or micro-batch. Prompts and responses are jagged, or padded with an attention mask.
    """
    prompts = data["prompts"]
    responses = data["responses"]
    if prompts.is_nested:
        prompt_lengths = prompts.offsets().diff()
        response_lengths = responses.offsets().diff()
    else:
        attention = data["attention_mask"]
        prompt_width = prompts.shape[1]
        prompt_lengths = attention[:, :prompt_width].sum(1)
        response_lengths = attention[:, prompt_width:].sum(1)
    return prompt_lengths, response_lengths


def locate_response_outputs(data: Any, width: int, total: int) -> tuple[Tensor, Tensor]:
    """Return where the output for each response token stands in the model's flat output.

    The flat output has the sequences' prompts and responses one after another, without padding.

    Args:
        data: verl's mini-batch or micro-batch, as for `sequence_lengths`. Every prompt has a token.
        width: the number of columns of the result: the response length to which other fields are padded.
        total: the number of tokens of all prompts and responses together.

    Returns:
        indices: the index of each response token's output, int64, (sequences, width). Where a response has no token,
            some index below `total`.
        present: whether the response has a token in a column, bool, (sequences, width).
    """
    prompt_lengths, response_lengths = sequence_lengths(data)
    ends = (prompt_lengths + response_lengths).cumsum(0)
    # The output for a token stands one position to its left.
    first_indices = ends - response_lengths - 1
    column = torch.arange(width, device=response_lengths.device)
    indices = (first_indices[:, None] + column).clamp(max=total - 1)
    present = column < response_lengths[:, None]
    return indices, present


def has_token(data: Any, width: int) -> Tensor:
    """Return whether a response has a token in a column, bool, (sequences, width).

    Args:
        data: verl's mini-batch or micro-batch, as for `sequence_lengths`.
        width: the number of columns.
    """
    _, response_lengths = sequence_lengths(data)
    column = torch.arange(width, device=response_lengths.device)
    return column < response_lengths[:, None]


def response_part(output: Tensor, data: Any, width: int) -> Tensor:
    """Return the model's output for the response tokens, padded with 0 and detached, (sequences, width).

    Args:
        output: the model's output, jagged or flat.
        data: verl's mini-batch or micro-batch.
        width: the number of columns of the result: the response length to which other fields are padded.
    """
    values = flat(output).detach()
    indices, present = locate_response_outputs(data, width, values.shape[0])
    return torch.where(present, values[indices], 0)


def in_model_output(values: Tensor, data: Any, total: int) -> Tensor:
    """Put values of response tokens where the model's output for them stands, and 0 elsewhere.

    Args:
        values: (sequences, response length).
        data: verl's mini-batch or micro-batch.
        total: the number of tokens of all prompts and responses together.

    Returns:
        Of the dtype of the values, (total,).
    """
    indices, present = locate_response_outputs(data, values.shape[1], total)
    inside = torch.where(present, values, 0)
    return inside.new_zeros(total).scatter_add(0, indices.flatten(), inside.flatten())


def where_kept(kept: Tensor, output: Tensor, elsewhere: Tensor) -> Tensor:
    """Return the model's output, in its own layout, with the values of `elsewhere` for the tokens not in `kept`.

    Args:
        kept: bool, (total,).
        output: the model's output, jagged or flat.
        elsewhere: a value for each token of the output, (total,).
    """
    values = torch.where(kept, flat(output), elsewhere)
    return as_output(values, output)


def as_output(values: Tensor, output: Tensor) -> Tensor:
    """Return values, (total, ...), in the layout of the model's output, jagged or flat."""
    if not output.is_nested:
        return values
    return torch.nested.nested_tensor_from_jagged(values, offsets=output.offsets())


def flat(output: Tensor) -> Tensor:
    """Return the model's output, jagged or flat, as (total, ...)."""
    return output.values() if output.is_nested else output


def with_leaf(model_output: Any) -> tuple[dict[str, Any], Tensor]:
    """Return the model's output without its graph, and its log-probabilities as a new leaf, (tokens,).

    The returned output is computed from the leaf, so that the gradient of what is computed from the output arrives
    at the leaf.
    """
    output, leaves = with_leaves(model_output, ["log_probs"])
    return output, leaves["log_probs"]


def with_leaves(model_output: Any, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the model's output without its graph, and some of its values by name as new leaves, (tokens, ...).

    The returned output is computed from the leaves, as in `with_leaf`.
    """
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
    """Number each sequence's prompt by a hash of its uid, which is the same on every rank: int64, (sequences,)."""
    # TensorDict wraps values that are not tensors.
    names = [str(getattr(name, "data", name)).encode() for name in data["uid"]]
    # Shifted, because int64 holds 63 bits of a number that is not negative.
    numbers = [int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1 for name in names]
    return torch.tensor(numbers, dtype=torch.int64, device=pad_rows(data["response_mask"]).device)


def ages(data: Any, version: int) -> Tensor | None:
    """Return the age of each sequence's first and last token in weight versions.

    The two differ where a generation was interrupted and resumed with newer weights. If a rollout names only the
    weights of the last token, the first one's are taken to be the same.

    Args:
        data: verl's rollout batch.
        version: the version of the weights from which the training on the current rollout batch starts.

    Returns:
        int64, (sequences, 2); None if the rollout does not say which weights generated a sequence.
    """
    if "extra_fields" not in data:
        return None
    versions = []
    for wrapped in data["extra_fields"]:
        fields = getattr(wrapped, "data", wrapped)
        if not isinstance(fields, dict) or fields.get(NEWEST) is None:
            return None
        newest = fields[NEWEST]
        oldest = newest if fields.get(OLDEST) is None else fields[OLDEST]
        versions.append([int(oldest), int(newest)])
    return (version - torch.tensor(versions).reshape(-1, 2)).clamp(min=0)


@dataclass(frozen=True)
class TokenPass:
    """One of Lopti's passes over a rollout batch, which trains one group of its tokens.

    Args:
        name: the group of tokens that is updated, "low" or "high".
        eta: the threshold on a token's probability under the old policy.
        equal: whether a probability equal to the threshold counts as low.
    """

    name: str
    eta: float
    equal: bool

    def tokens(self, data: Any) -> Tensor:
        """Return the tokens of this pass in a mini-batch or micro-batch: bool, (sequences, response length)."""
        low = low_probability(pad_rows(data["old_log_probs"]), eta=self.eta, equal=self.equal)
        group = low if self.name == "low" else ~low
        return group & pad_rows(data["response_mask"]).bool()


def restrict(model_output: Any, data: Any, tokens: Tensor) -> tuple[dict[str, Any], Any]:
    """Restrict a loss call to some tokens: all others have no advantage, gradient, entropy or reference distance.

    The response mask stays, so that every aggregation keeps its normaliser. `model_output` and `data` are not changed.

    Args:
        model_output: as verl's engine gives it.
        data: verl's data of the micro-batch.
        tokens: bool, (sequences, response length).

    Returns:
        The output, in the layout that it had; and a copy of the data, in which advantages and ref_log_prob are padded
        and all other fields as they were.
    """
    output = dict(model_output.items())
    log_probs = output["log_probs"]
    # As numbers, because scatter_add takes no booleans.
    kept = in_model_output(tokens.to(torch.uint8), data, flat(log_probs).shape[0]).bool()
    output["log_probs"] = where_kept(kept, log_probs, elsewhere=flat(log_probs).detach())
    entropy = output.get("entropy")
    if entropy is not None:
        output["entropy"] = where_kept(kept, entropy, elsewhere=torch.zeros_like(flat(entropy)))
    data = data.copy()
    advantages = pad_rows(data["advantages"])
    data["advantages"] = torch.where(tokens, advantages, torch.zeros_like(advantages))
    if "ref_log_prob" in data:
        # With the current log-probability as the reference's, the distance is 0.
        current = response_part(log_probs, data, tokens.shape[1])
        data["ref_log_prob"] = torch.where(tokens, pad_rows(data["ref_log_prob"]).to(current.dtype), current)
    return output, data
