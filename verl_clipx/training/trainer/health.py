"""A run's health: what the trainer's process logs of each step."""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.base.shared_metrics import ALIKE_PROMPTS, CUT_RESPONSES, NOT_FINITE, STANDARD_ERROR, UNDECIDED

# From a metric to the fields of verl's batch whose values must be finite: it counts those that are not. The rewards of
# a response must be finite in its padding too, since verl sums the whole row.
FIELDS = {
    "rewards": ("token_level_scores", "token_level_rewards"),
    "advantages": ("advantages",),
    "log_probs": ("old_log_probs", "rollout_log_probs"),
}


def step_metrics(batch: Any, longest: tuple[int | None, int | None]) -> dict[str, float]:
    """Return the metrics of a step's health, and the standard error of its reward.

    Args:
        batch: verl's DataProto. Without uids, responses to equal prompts count as those to one prompt.
        longest: the longest response, and the longest prompt and response together, in tokens, as
            `find_response_limits` returns them. If both are None, the metric of cut responses is left out.
    """
    data = batch.batch
    mask = data["response_mask"].bool()
    # An aborted response has no tokens.
    has_tokens = mask.any(-1)
    metrics = count_not_finite(data, mask, has_tokens)
    if longest != (None, None) and has_tokens.any():
        metrics[CUT_RESPONSES.key] = share_cut(data, has_tokens, longest)
    if "undecided" in batch.non_tensor_batch:
        # Over all responses of which the reward says it, aborted ones too, as in the v1 trainers.
        metrics |= undecided_metric(batch.non_tensor_batch["undecided"])
    scores = data["token_level_scores"].sum(-1)[has_tokens]
    prompts = prompt_numbers(batch)[has_tokens]
    alike = share_alike(scores, prompts)
    if alike is not None:
        metrics[ALIKE_PROMPTS.key] = alike
    error = standard_error(scores, prompts)
    if error is not None:
        metrics[STANDARD_ERROR.key] = error
    return metrics


def count_not_finite(data: Any, mask: Tensor, has_tokens: Tensor) -> dict[str, float]:
    """Count the responses with a value that is not finite, for each entry of FIELDS of which the batch has a field.

    Args:
        data: the tensors of verl's batch.
        mask: the tokens of the responses, bool, (responses, length).
        has_tokens: the responses that have any, bool, (responses,).
    """
    metrics = {}
    for name, keys in FIELDS.items():
        is_checked = has_tokens[:, None] if name == "rewards" else mask
        is_wrong_in_fields = [(~data[key].isfinite() & is_checked).any(-1) for key in keys if key in data]
        if is_wrong_in_fields:
            metrics[NOT_FINITE[name].key] = float(torch.stack(is_wrong_in_fields).any(0).sum())
    return metrics


def share_cut(data: Any, has_tokens: Tensor, longest: tuple[int | None, int | None]) -> float:
    """Return the share of the responses with tokens that are as long as they may be.

    Args:
        data: the tensors of verl's batch.
        has_tokens: the responses that have any, bool, (responses,).
        longest: as for `step_metrics`.
    """
    if "response_length" in data:
        prompt_lengths = data["prompt_length"]
        response_lengths = data["response_length"]
    else:
        prompt_width = data["prompts"].shape[1]
        prompt_lengths = data["attention_mask"][:, :prompt_width].sum(-1)
        response_lengths = data["attention_mask"][:, prompt_width:].sum(-1)
    longest_response, longest_together = longest
    is_cut = torch.zeros_like(has_tokens)
    if longest_response is not None:
        is_cut = is_cut | (response_lengths >= longest_response)
    if longest_together is not None:
        is_cut = is_cut | (prompt_lengths + response_lengths >= longest_together)
    return float(is_cut[has_tokens].float().mean())


def prompt_numbers(batch: Any) -> Tensor:
    """Number each response's prompt, int64, (responses,): by uid or, as in the v1 trainers, by its tokens."""
    if "uid" in batch.non_tensor_batch:
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(str(uid), len(numbers)) for uid in batch.non_tensor_batch["uid"]])
    _, numbers_of_responses = torch.unique(batch.batch["prompts"], dim=0, return_inverse=True)
    return numbers_of_responses


def standard_error(scores: Tensor, prompts: Tensor) -> float | None:
    """Return the standard error of the mean score, clustered by prompt.

    Responses to one prompt are not independent, so that the totals of the prompts, and not the single scores, show how
    far the mean may vary. With equally many responses to each prompt, it is the standard deviation of the prompts'
    means divided by the square root of the number of prompts.

    Source: the clustered standard error of a mean (Miller, arXiv 2411.00640), its square multiplied by n / (n - 1) for
    n prompts.

    Args:
        scores: the responses' scores, (responses,). Aborted responses are left out: they have no tokens, and verl's
            mean leaves them out too.
        prompts: the numbers of their prompts, int64, (responses,).

    Returns:
        In the unit of the scores; None with fewer than two prompts.
    """
    # Renumber the prompts without gaps. A prompt that had only aborted responses has left one.
    unique_prompts, prompts = torch.unique(prompts, return_inverse=True)
    scores = scores.to(torch.float64)
    prompt_count = len(unique_prompts)
    if prompt_count < 2:
        return None
    total_deviations = torch.zeros(prompt_count, dtype=torch.float64, device=scores.device)
    total_deviations.index_add_(0, prompts, scores - scores.mean())
    corrected_sum = total_deviations.square().sum() * prompt_count / (prompt_count - 1)
    return float(corrected_sum.sqrt()) / len(scores)


def share_alike(scores: Tensor, prompts: Tensor) -> float | None:
    """Return among the prompts with several responses the share of those whose responses all have the same score.

    Args:
        scores: the responses' scores, (responses,). NaN equals no score, not even NaN.
        prompts: the numbers of their prompts, int64, (responses,).

    Returns:
        None if no prompt has several responses.
    """
    _, numbers, counts = torch.unique(prompts, return_inverse=True, return_counts=True)
    scores = scores.to(torch.float64).cpu()
    zeros = torch.zeros(len(counts), dtype=torch.float64)
    lowest = zeros.scatter_reduce(0, numbers, scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, numbers, scores, "amax", include_self=False)
    has_several = counts > 1
    if not has_several.any():
        return None
    return float((lowest == highest)[has_several].double().mean())


def undecided_metric(values: Any) -> dict[str, float]:
    """Return the share of the responses without a verdict, by its metric's key.

    Args:
        values: what the reward returned as `undecided` for each response: 1 or True if it has no verdict, 0 or False if
            it has one, and None if the reward does not say. Responses with None are left out.

    Returns:
        Nothing if the reward says of no response whether it has a verdict.
    """
    is_undecided = [float(value) for value in values if value is not None]
    if not is_undecided:
        return {}
    return {UNDECIDED.key: sum(is_undecided) / len(is_undecided)}


def fetch_undecided_metric(fetch: Any, batch: Any) -> dict[str, float]:
    """Return what `undecided_metric` does, for a step of the v1 trainers.

    Args:
        fetch: TransferQueue's kv_batch_get, or a function like it.
        batch: the step's keys and tags. verl fills the batch up with copies of rows, which are left out.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = fetch(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    undecided = []
    for wrapped in fields["extra_fields"]:
        # TensorDict wraps values that are not tensors.
        fields_of_row = getattr(wrapped, "data", wrapped)
        if isinstance(fields_of_row, dict):
            undecided.append(fields_of_row.get("reward_extra_info", {}).get("undecided"))
    return undecided_metric(undecided)
