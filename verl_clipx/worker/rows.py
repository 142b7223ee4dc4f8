"""Reads from verl's data which prompt each sequence answers, and how old the policy was that generated it."""

from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from verl_clipx.worker.layout import padded

# The field of verl's mini-batch in which the worker keeps the samples' ages, so that they are cut together with it.
AGE = "clipx_age"


def prompt_groups(data: Any) -> Tensor:
    """A number for each sequence's prompt, the same in every micro-batch and on every rank: int64, (sequences,).

    Args:
        data: verl's mini-batch or micro-batch, whose `uid` names the prompt of each sequence.
    """
    names = [str(getattr(name, "data", name)).encode() for name in data["uid"]]
    numbers = [int.from_bytes(blake2b(name, digest_size=8).digest(), "big") >> 1 for name in names]
    return torch.tensor(numbers, dtype=torch.int64, device=padded(data["response_mask"]).device)


def ages(data: Any, version: int) -> Tensor | None:
    """The age of each sequence in weight versions; None if the rollout does not say which version generated it.

    Args:
        data: verl's mini-batch.
        version: the weight version from which the training on the current rollout batch starts.

    Returns:
        int64, (sequences,), at least 0.
    """
    if "extra_fields" not in data:
        return None
    fields = [getattr(one, "data", one) for one in data["extra_fields"]]
    generated = [one.get("max_global_steps") if isinstance(one, dict) else None for one in fields]
    if None in generated:
        return None
    return torch.tensor([max(version - int(step), 0) for step in generated], dtype=torch.int64)
