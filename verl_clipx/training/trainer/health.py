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
    """Returns the metrics of a step's health, and the standard error of its reward.

    Args:
        batch: verl's DataProto. Without uids, responses to equal prompts count as those to one prompt.
        longest: the longest response, and the longest prompt and response together, in tokens, as `lengths_of` returns
            them; without any of the two, nothing is said about cut responses.
    """
    data = batch.batch
    mask = batch.batch["response_mask"].bool()
    # An aborted response has no tokens.
    counted = mask.any(-1)
    metrics: dict[str, float] = {}
    for name, keys in FIELDS.items():
        looked_at = counted[:, None] if name == "rewards" else mask
        # The responses with a value that is not finite, by each of the fields that there are.
        wrong = [(~data[key].isfinite() & looked_at).any(-1) for key in keys if key in data]
        if wrong:
            metrics[NOT_FINITE[name].key] = float(torch.stack(wrong).any(0).sum())
    scores = data["token_level_scores"].sum(-1)[counted]
    prompts_of_responses = prompt_numbers(batch)[counted]
    if longest != (None, None) and counted.any():
        if "response_length" in data:
            prompts = data["prompt_length"]
            responses = data["response_length"]
        else:
            width = data["prompts"].shape[1]
            prompts = data["attention_mask"][:, :width].sum(-1)
            responses = data["attention_mask"][:, width:].sum(-1)
        longest_response, longest_together = longest
        cut = torch.zeros_like(counted)
        if longest_response is not None:
            cut = cut | (responses >= longest_response)
        if longest_together is not None:
            cut = cut | (prompts + responses >= longest_together)
        metrics[CUT_RESPONSES.key] = float(cut[counted].float().mean())
    if "undecided" in batch.non_tensor_batch:
        metrics |= undecided_share(batch.non_tensor_batch["undecided"])
    of_scores = {
        ALIKE_PROMPTS.key: share_alike(scores, prompts_of_responses),
        STANDARD_ERROR.key: standard_error(scores, prompts_of_responses),
    }
    return metrics | {key: value for key, value in of_scores.items() if value is not None}


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
    prompts = torch.unique(prompts, return_inverse=True)[1]
    scores = scores.to(torch.float64)
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
    of_prompts = torch.zeros(len(counts), dtype=torch.float64)
    lowest = of_prompts.scatter_reduce(0, numbers, scores.cpu(), "amin", include_self=False)
    highest = of_prompts.scatter_reduce(0, numbers, scores.cpu(), "amax", include_self=False)
    has_several = counts > 1
    if not has_several.any():
        return None
    return float((lowest == highest)[has_several].double().mean())


def undecided_share(values: Any) -> dict[str, float]:
    """Returns the metric of what a reward gave as `undecided`, a value for each response; nothing without any."""
    given = [float(value) for value in values if value is not None]
    if not given:
        return {}
    return {UNDECIDED.key: sum(given) / len(given)}


def verdicts(fetch: Any, batch: Any) -> dict[str, float]:
    """Returns the metric of answers without a verdict in a step of the v1 trainers; empty if the reward has none.

    `fetch` is TransferQueue's kv_batch_get, `batch` the step's keys and tags, which verl fills up with copies.
    """
    rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = fetch(keys=rows, partition_id=batch.partition_id, select_fields=["extra_fields"])
    undecided = []
    for extra in fields["extra_fields"]:
        of_row = getattr(extra, "data", extra)
        if isinstance(of_row, dict):
            undecided.append(of_row.get("reward_extra_info", {}).get("undecided"))
    return undecided_share(undecided)
