"""The standard error of a step's mean score over its prompts, logged by health.py."""

from typing import Any

import torch
from torch import Tensor


def prompt_numbers(batch: Any) -> Tensor:
    """A number for each response's prompt, int64, (responses,): by uid or, as in the v1 trainers, by its tokens."""
    if "uid" in batch.non_tensor_batch:
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(str(uid), len(numbers)) for uid in batch.non_tensor_batch["uid"]])
    return torch.unique(batch.batch["prompts"], dim=0, return_inverse=True)[1]


def standard_error(scores: Tensor, prompts: Tensor, counted: Tensor) -> float | None:
    """The standard error of the mean score, by the prompts' totals: responses to one prompt are not independent.

    Args:
        scores, prompts: (responses,); the prompts' numbers are at least 0.
        counted: bool, (responses,): aborted responses, which have no tokens, are not in verl's mean.

    Returns:
        With equally many responses to each prompt, the standard deviation of the prompts' means over the root of their
        number; None with fewer than two prompts.

    Source: the clustered standard error of a mean (Miller, arXiv 2411.00640), times n / (n - 1) for n prompts.
    """
    prompts = torch.unique(prompts[counted], return_inverse=True)[1]
    scores = scores[counted].to(torch.float64)
    number = int(prompts.max()) + 1 if len(prompts) else 0
    if number < 2:
        return None
    of_prompts = torch.zeros(number, dtype=torch.float64, device=scores.device)
    of_prompts.index_add_(0, prompts, scores - scores.mean())
    return float((of_prompts.square().sum() * number / (number - 1)).sqrt()) / len(scores)
