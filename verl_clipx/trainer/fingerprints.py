"""Fingerprints of a rollout batch, in the process of its trainer, where the whole batch is known.

They depend neither on the order of the rows nor on the number of ranks, and equal fingerprints mean equal tokens but
for one chance in 2^64.
"""

from typing import Any

import torch
from torch import Tensor

# An odd multiplier, and those of splitmix64's last step, as two's complement: torch has no unsigned arithmetic.
ODD, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685


def fingerprints_of(batch: Any) -> dict[str, Any]:
    """Returns what identifies a rollout batch of verl's trainer.

    Args:
        batch: verl's DataProto, as its trainers give it to `compute_data_metrics`: padded, on the host.

    Returns:
        `prompts`, `responses` (each with its prompt) and `rows` (each with its advantages too), fingerprints in
        hexadecimal; `groups`, `sequences`, `tokens`, `distinct`: how many prompts, responses with tokens, tokens of
        theirs, and different pairs of a prompt and a response.
    """
    data, mask = batch.batch, batch.batch["response_mask"].bool()
    prompts, responses = data["prompts"], data["responses"]
    if "response_length" in data:
        of_prompt, present = (
            torch.arange(ids.shape[1]) < data[length].cpu()[:, None]
            for ids, length in ((prompts, "prompt_length"), (responses, "response_length"))
        )
    else:
        of_prompt, present = data["attention_mask"].bool().cpu().tensor_split([prompts.shape[1]], 1)
    counted = mask.any(-1).cpu()
    prompt = hashes_of(prompts, of_prompt)[counted]
    pair = mixed(prompt * ODD + hashes_of(responses, present)[counted])
    advantages = data["advantages"].to(torch.float32).contiguous().view(torch.int32)
    row = mixed(pair * ODD + hashes_of(advantages, mask.cpu())[counted])
    return {
        "prompts": hexadecimal(prompt.unique().sum()),
        "responses": hexadecimal(pair.sum()),
        "rows": hexadecimal(row.sum()),
        "groups": len(prompt.unique()),
        "sequences": len(prompt),
        "tokens": int(mask.sum()),
        "distinct": len(pair.unique()),
    }


def hashes_of(ids: Tensor, present: Tensor) -> Tensor:
    """Returns a hash of each row's present entries in their order, wherever the padding is: int64, (rows,)."""
    place = present.long().cumsum(-1).clamp(min=1) - 1
    powers = torch.full((ids.shape[1],), ODD, dtype=torch.int64).cumprod(0)
    return mixed((mixed(ids.cpu().long() + 1) * powers[place] * present).sum(-1))


def mixed(values: Tensor) -> Tensor:
    """Returns int64 values with their bits mixed, by the last step of splitmix64; equal ones stay equal."""
    for bits, factor in ((30, FIRST), (27, SECOND)):
        values = (values ^ shifted(values, bits)) * factor
    return values ^ shifted(values, 31)


def shifted(values: Tensor, bits: int) -> Tensor:
    """Returns values shifted to the right as if they had no sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def hexadecimal(value: Tensor) -> str:
    return f"{int(value) % 2**64:016x}"
