"""A run's health: what the trainer's process logs about each step."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.base.shared_metrics import ALIKE_PROMPTS, CUT_RESPONSES, NOT_FINITE, STANDARD_ERROR, UNDECIDED

# The fields of verl's batch by what they are. Rewards are looked at in every token, since verl sums all of them.
FIELDS = {
    "rewards": ("token_level_scores", "token_level_rewards"),
    "advantages": ("advantages",),
    "log_probs": ("old_log_probs", "rollout_log_probs"),
}


def step_metrics(batch: Any, longest: tuple[int | None, int | None]) -> dict[str, float]:
    """Returns the metrics of a step's health, and the standard error of its reward, of verl's DataProto.

    Without uids, responses to equal prompts count as one prompt's; without a length in `longest`, which is of
    `lengths_of`, nothing is said about cut responses.
    """
    data, mask = batch.batch, batch.batch["response_mask"].bool()
    # An aborted response has no tokens.
    counted = mask.any(-1)
    metrics: dict[str, float] = {}
    for name, keys in FIELDS.items():
        wrong = [
            ~data[key].isfinite() & (counted[:, None] if name == "rewards" else mask) for key in keys if key in data
        ]
        if wrong:
            metrics[NOT_FINITE[name].key] = float(torch.stack([of.any(-1) for of in wrong]).any(0).sum())
    scores, numbers = data["token_level_scores"].sum(-1)[counted], prompt_numbers(batch)[counted]
    if longest != (None, None) and counted.any():
        if "response_length" in data:
            prompts, responses = data["prompt_length"], data["response_length"]
        else:
            width = data["prompts"].shape[1]
            prompts, responses = (part.sum(-1) for part in data["attention_mask"].tensor_split([width], 1))
        cut = torch.zeros_like(counted)
        for lengths, limit in zip((responses, prompts + responses), longest, strict=True):
            cut = cut if limit is None else cut | (lengths >= limit)
        metrics[CUT_RESPONSES.key] = float(cut[counted].float().mean())
    if "undecided" in batch.non_tensor_batch:
        metrics |= undecided_share(batch.non_tensor_batch["undecided"])
    known = {ALIKE_PROMPTS.key: share_alike(scores, numbers), STANDARD_ERROR.key: standard_error(scores, numbers)}
    return metrics | {key: value for key, value in known.items() if value is not None}


def prompt_numbers(batch: Any) -> Tensor:
    """Numbers each response's prompt, int64, (responses,): by uid or, as in the v1 trainers, by its tokens."""
    if "uid" in batch.non_tensor_batch:
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(str(uid), len(numbers)) for uid in batch.non_tensor_batch["uid"]])
    return torch.unique(batch.batch["prompts"], dim=0, return_inverse=True)[1]


def standard_error(scores: Tensor, prompts: Tensor) -> float | None:
    """Returns the standard error of the mean score, by the prompts' totals: responses to one are not independent.

    With equally many responses to each prompt, it is the standard deviation of the prompts' means over the root of
    their number; None with fewer than two prompts. Both arguments are (responses,), without aborted responses, which
    have no tokens and are not in verl's mean.

    Source: the clustered standard error of a mean (Miller, arXiv 2411.00640), times n / (n - 1) for n prompts.
    """
    prompts, scores = torch.unique(prompts, return_inverse=True)[1], scores.to(torch.float64)
    number = int(prompts.max()) + 1 if len(prompts) else 0
    if number < 2:
        return None
    of_prompts = torch.zeros(number, dtype=torch.float64, device=scores.device)
    of_prompts.index_add_(0, prompts, scores - scores.mean())
    return float((of_prompts.square().sum() * number / (number - 1)).sqrt()) / len(scores)


def share_alike(scores: Tensor, prompts: Tensor) -> float | None:
    """Returns the share of the prompts with several samples whose scores are all equal; None without such prompts.

    Both are (responses,); a score that is not finite is like no other.
    """
    _, numbers, counts = torch.unique(prompts, return_inverse=True, return_counts=True)
    scores = scores.to(torch.float64)
    low, high = (
        torch.zeros(len(counts), dtype=torch.float64).scatter_reduce(0, numbers, scores.cpu(), way, include_self=False)
        for way in ("amin", "amax")
    )
    several = counts > 1
    return float((low == high)[several].double().mean()) if several.any() else None


def undecided_share(values: Any) -> dict[str, float]:
    """Returns the metric of what a reward gave as `undecided`, a value for each response; nothing without any."""
    known = [float(value) for value in values if value is not None]
    return {UNDECIDED.key: sum(known) / len(known)} if known else {}


def verdicts(fetch: Any, batch: Any) -> dict[str, float]:
    """Returns the metric of answers without a verdict in a step of the v1 trainers; empty if the reward has none.

    `fetch` is TransferQueue's kv_batch_get, `batch` the step's keys and tags, which verl fills up with copies.
    """
    rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = fetch(keys=rows, partition_id=batch.partition_id, select_fields=["extra_fields"])
    extras = [getattr(extra, "data", extra) for extra in fields["extra_fields"]]
    infos = [extra.get("reward_extra_info", {}) if isinstance(extra, dict) else {} for extra in extras]
    return undecided_share([info.get("undecided") for info in infos])
