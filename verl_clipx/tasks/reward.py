"""One reward for all tasks: `data_source` chooses the rule.

For verl: `reward.custom_reward_function.path=pkg://verl_clipx.tasks.reward`, name `compute_score`. A run on one task
can name that task's own reward instead; it returns more parts. `clipx eval` uses `compute_score_for_evaluation`.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from verl_clipx.tasks.catalog import TASKS, definitions

Reward = Callable[..., dict[str, float]]

PARTS = ("score", "acc", "format")
"""What every task's reward returns. verl takes the keys of a batch's first row for all its rows, so in a batch of
several tasks other parts would be missing from some."""

_VARIANTS = {"countdown_boxed": "verl_clipx.tasks.countdown.boxed_reward"}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response by the rule of its row's task.

    Args:
        data_source: the row's `data_source`: the name of a task or of a data set.

    Returns:
        `score`, the reward; `acc`, 1.0 if the answer is right, else 0.0; `format`, 1.0 if it can be read, else 0.0.

    Raises:
        ValueError: if the data source is unknown, which no text of a policy can cause.
    """
    parts = reward_of(data_source)(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return {part: parts[part] for part in PARTS}


def compute_score_for_evaluation(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response as `compute_score` does, but by the task's rule for evaluation where it has one of its own.

    Mathematics has: there an answer counts only if it is equal beyond reasonable doubt.
    """
    reward = reward_of(data_source, for_evaluation=True)
    parts = reward(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return {part: parts[part] for part in PARTS}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Refuse a ground truth that no answer can meet, which would score a whole data set 0 without a word.

    Raises:
        ValueError: the task's reward cannot use it, or the data source is unknown.
    """
    import_module(reward_of(data_source).__module__).check_ground_truth(data_source, ground_truth)


@lru_cache(maxsize=256)
def reward_of(data_source: str, for_evaluation: bool = False) -> Reward:
    """Return the reward function of a data source: the one for training, or the one for evaluation if it has one.

    Raises:
        ValueError: if it is unknown; the message lists the known ones.
    """
    modules = reward_modules()
    if data_source not in modules:
        raise ValueError(
            f"data_source={data_source!r} has no reward; known are {', '.join(sorted(modules))}. For your own rows, "
            "name your reward in reward.custom_reward_function"
        )
    module = import_module(modules[data_source])
    return getattr(module, "compute_score_for_evaluation" if for_evaluation else "compute_score", module.compute_score)


def reward_modules() -> dict[str, str]:
    """Return the module of each data source's reward."""
    of_tasks = {task: f"verl_clipx.tasks.{task}.reward" for task in TASKS}
    of_datasets = {name: of_tasks[definition.task] for name, definition in definitions().items()}
    return of_tasks | of_datasets | _VARIANTS
