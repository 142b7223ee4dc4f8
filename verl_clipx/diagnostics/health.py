"""A run's health: what the trainer's process logs about each step, and what happens beyond clipx.health_limits."""

import inspect
import logging
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from wrapt import wrap_function_wrapper

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import ALIKE_PROMPTS, CUT_RESPONSES, NOT_FINITE, UNDECIDED
from verl_clipx.diagnostics.keys import REWARD_ERROR
from verl_clipx.diagnostics.reward_error import prompt_numbers, standard_error
from verl_clipx.driver.health import HealthLimits, exceeded

logger = logging.getLogger(__name__)

# The fields of verl's batch by what they are. Rewards are looked at in every token, since verl sums all of them.
FIELDS = {
    "rewards": ("token_level_scores", "token_level_rewards"),
    "advantages": ("advantages",),
    "log_probs": ("old_log_probs", "rollout_log_probs"),
}

# data.max_response_length of the run that this process trains; verl does not pass it on to its metrics.
_longest: list[int] = []


def install(metric_utils: ModuleType) -> None:
    """Wraps `compute_data_metrics` of verl.trainer.ppo.metric_utils, which every trainer imports by name and calls.

    It must be wrapped when its module is imported, which is before a trainer imports the name.
    """
    wrap_function_wrapper(metric_utils, "compute_data_metrics", _with_health)


def install_limits(tracking: ModuleType) -> None:
    """Wraps verl.utils.tracking's `Tracking`, to which the trainer gives the metrics of each step."""
    wrap_function_wrapper(tracking, "Tracking.__init__", _with_limits)
    wrap_function_wrapper(tracking, "Tracking.log", _within_limits)


def install_verdicts(trainers: ModuleType) -> None:
    """Wraps how the v1 trainers make a step's metrics, to add what a reward returns besides its score."""
    if hasattr(trainers, "tq") and hasattr(getattr(trainers, "PPOTrainer", None), "_compute_metrics"):
        wrap_function_wrapper(trainers, "PPOTrainer._compute_metrics", partial(_with_verdicts, trainers))


def _with_health(wrapped: Any, _: Any, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    batch = positional[0] if positional else named["batch"]
    metrics = {**wrapped(*positional, **named), **health_of(batch, _longest[0] if _longest else None)}
    scores, counted = batch.batch["token_level_scores"].sum(-1), batch.batch["response_mask"].bool().any(-1)
    error = standard_error(scores, prompt_numbers(batch), counted)
    return metrics if error is None else {**metrics, REWARD_ERROR: error}


def health_of(batch: Any, longest: int | None) -> dict[str, float]:
    """The metrics of a step's health.

    Args:
        batch: verl's DataProto of the step; without uids, responses to equal prompts count as one prompt's.
        longest: data.max_response_length; None: unknown, so that nothing is said about cut responses.
    """
    data, mask = batch.batch, batch.batch["response_mask"].bool()
    # An aborted response has no tokens.
    counted = mask.any(-1)
    found: dict[str, float] = {}
    for name, keys in FIELDS.items():
        wrong = [
            ~data[key].isfinite() & (counted[:, None] if name == "rewards" else mask) for key in keys if key in data
        ]
        if wrong:
            found[NOT_FINITE[name].key] = float(torch.stack([of.any(-1) for of in wrong]).any(0).sum())
    alike = share_alike(data["token_level_scores"].sum(-1)[counted], prompt_numbers(batch)[counted])
    if alike is not None:
        found[ALIKE_PROMPTS.key] = alike
    if longest is not None and counted.any():
        if "response_length" in data:
            lengths = data["response_length"]
        else:
            lengths = data["attention_mask"][:, data["prompts"].shape[1] :].sum(-1)
        found[CUT_RESPONSES.key] = float((lengths[counted] >= longest).float().mean())
    if "undecided" in batch.non_tensor_batch:
        found |= undecided_share(batch.non_tensor_batch["undecided"])
    return found


def share_alike(scores: Tensor, prompts: Tensor) -> float | None:
    """The share of the prompts with several samples whose samples all have one score; None without such prompts.

    Args:
        scores: (responses,); a score that is not finite is like no other.
        prompts: int64, (responses,): equal numbers for the responses to one prompt.
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
    """The metric of what a reward returned as `undecided`, a value for each response; nothing without any."""
    known = [float(value) for value in values if value is not None]
    return {UNDECIDED.key: sum(known) / len(known)} if known else {}


def _with_verdicts(trainers: ModuleType, wrapped: Any, trainer: Any, positional: tuple, named: dict[str, Any]) -> None:
    wrapped(*positional, **named)
    if getattr(trainer, "clipx_without_verdicts", False):
        return
    call = inspect.signature(wrapped).bind(*positional, **named).arguments
    batch = call["batch"]
    # verl fills a batch up with copies.
    rows = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    fields = trainers.tq.kv_batch_get(keys=rows, partition_id=batch.partition_id, select_fields=["extra_fields"])
    # A field without tensors: tensordict returns a list, or an object that can be turned into one.
    extras = fields["extra_fields"]
    extras = extras if isinstance(extras, list) else extras.tolist()
    infos = [extra.get("reward_extra_info", {}) if isinstance(extra, dict) else {} for extra in extras]
    found = undecided_share([info.get("undecided") for info in infos])
    # A reward returns it always or never.
    trainer.clipx_without_verdicts = not found
    call["metrics"].update(found)


def _with_limits(wrapped: Any, tracking: Any, positional: tuple, named: dict[str, Any]) -> None:
    wrapped(*positional, **named)
    config = named.get("config") or (positional[3] if len(positional) > 3 else None) or {}
    _longest[:] = [found] if (found := config.get("data", {}).get("max_response_length")) else []
    node = config.get(NODE) or {}
    tracking.clipx_health = Watch(HealthLimits(**(node.get("health_limits") or {})), stops=node.get("health") == "stop")


def _within_limits(wrapped: Any, tracking: Any, positional: tuple, named: dict[str, Any]) -> None:
    # First, so that the step that ends a run is in its logs.
    wrapped(*positional, **named)
    call = inspect.signature(wrapped).bind(*positional, **named).arguments
    if (watch := getattr(tracking, "clipx_health", None)) is not None:
        watch.look(call["data"], call["step"])


class Watch:
    """Warns of a step beyond a limit, once for each limit, or stops the run.

    Args:
        limits: the run's limits.
        stops: whether a step beyond a limit stops the run.
    """

    def __init__(self, limits: HealthLimits, *, stops: bool):
        self._limits, self._stops = limits, stops
        self._said: set[str] = set()

    def look(self, data: Mapping[str, Any], step: int) -> None:
        """Looks at a step's metrics.

        Raises:
            RuntimeError: one is beyond its limit, and that stops the run.
        """
        beyond = list(exceeded(self._limits, data))
        if beyond and self._stops:
            told = "; ".join(text for _, text in beyond)
            raise RuntimeError(f"clipx.health=stop: in step {step} {told}. The step is in the log.")
        for name, text in beyond:
            if name not in self._said:
                logger.warning("clipx.health: in step %s %s. Said once for this limit.", step, text)
        self._said |= {name for name, _ in beyond}
