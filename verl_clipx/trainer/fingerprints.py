"""Fingerprints of a rollout batch, in the process of its trainer, where the whole batch is known.

They depend neither on the order of the rows nor on the number of ranks, and equal fingerprints mean equal tokens but
for one chance in 2^64.
"""

from collections.abc import Iterable
from hashlib import blake2b
from itertools import repeat
from typing import Any

import torch
from torch import Tensor


def fingerprints_of(batch: Any) -> dict[str, Any]:
    """Returns what identifies a rollout batch of verl's trainer.

    Args:
        batch: verl's DataProto, as its trainers give it to `compute_data_metrics`: padded, on the host.

    Returns:
        `prompts`, `responses` (each with its prompt) and `rows` (each with its advantages too), fingerprints in
        hexadecimal; `groups`, `sequences`, `tokens`, `distinct`: how many prompts, responses with tokens, tokens of
        theirs, and different pairs of a prompt and a response.
    """
    data, mask = batch.batch, batch.batch["response_mask"].bool().cpu()
    prompts, responses = data["prompts"], data["responses"]
    if "response_length" in data:
        of_prompt, present = (
            torch.arange(ids.shape[1]) < data[length].cpu()[:, None]
            for ids, length in ((prompts, "prompt_length"), (responses, "response_length"))
        )
    else:
        of_prompt, present = data["attention_mask"].bool().cpu().tensor_split([prompts.shape[1]], 1)
    counted = mask.any(-1)
    prompt = hashes_of(prompts.long(), of_prompt, counted)
    pair = hashes_of(responses.long(), present, counted, prompt)
    return {
        "prompts": hexadecimal({*prompt}),
        "responses": hexadecimal(pair),
        "rows": hexadecimal(hashes_of(data["advantages"].float(), mask, counted, pair)),
        "groups": len({*prompt}),
        "sequences": len(prompt),
        "tokens": int(mask.sum()),
        "distinct": len({*pair}),
    }


def hashes_of(values: Tensor, present: Tensor, rows: Tensor, before: Iterable[bytes] = repeat(b"")) -> list[bytes]:
    """Returns a hash of each row's present entries in their order, wherever the padding is, and of what was before."""
    entries = zip(before, values.cpu()[rows].numpy(), present[rows].numpy(), strict=False)
    return [blake2b(first + row[there].tobytes(), digest_size=8).digest() for first, row, there in entries]


def hexadecimal(hashes: Iterable[bytes]) -> str:
    """Returns the sum of hashes, which does not depend on their order, in 64 bits."""
    return f"{sum(int.from_bytes(one, 'big') for one in hashes) % 2**64:016x}"
