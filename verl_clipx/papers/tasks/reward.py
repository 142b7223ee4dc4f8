"""One reward for all tasks. A row's `data_source` decides by which task's rule a response is scored.

For verl, set `reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.reward` and the name `compute_score`. A
run on one task can name that task's own reward instead, which returns more parts. `clipx papers eval` uses
`compute_score_for_evaluation`.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

from verl_clipx.papers.tasks.catalog import TASKS, definitions

Reward = Callable[..., dict[str, float]]

PARTS = ("score", "acc", "format")
"""The parts that the reward of every task returns.

verl assumes that all rows of a batch have the keys of the first one. In a batch of several tasks, some rows would lack
any other part.
"""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response by the rule of its row's task. A response never causes an error, whatever is in it.

    Args:
        data_source: the row's `data_source`: the name of a task or of a data set, or countdown_boxed.
        solution_str: the response.
        ground_truth, extra_info, kwargs: handed on to the task's reward.

    Returns:
        `score`: the reward, -3 to 3 in Knights and Knaves, and 0 to 1 in the other tasks.
        `acc`: 1.0 if the answer is right, else 0.0.
        `format`: 1.0 if the response has the form that the task asks for, else 0.0.

    Raises:
        ValueError: the data source is unknown.
    """
    parts = reward_of(data_source)(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return {part: parts[part] for part in PARTS}


def compute_score_for_evaluation(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score as `compute_score` does. In mathematics, however, an answer must be equal beyond reasonable doubt."""
    reward = reward_of(data_source, for_evaluation=True)
    parts = reward(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return {part: parts[part] for part in PARTS}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Check that the reward of a data source's task can use a ground truth.

    With one that it cannot use, every response to the question would silently count as wrong.

    Raises:
        ValueError: the task's reward cannot use the ground truth, or the data source is unknown.
    """
    _reward_module_of(data_source).check_ground_truth(data_source, ground_truth)


@lru_cache(maxsize=256)
def reward_of(data_source: str, for_evaluation: bool = False) -> Reward:
    """Return the reward function of a data source.

    Args:
        for_evaluation: whether to return the task's reward for evaluation, if it has one.

    Raises:
        ValueError: the data source is unknown; the message lists the known ones.
    """
    module = _reward_module_of(data_source)
    if for_evaluation and hasattr(module, "compute_score_for_evaluation"):
        return module.compute_score_for_evaluation
    return module.compute_score


def _reward_module_of(data_source: str) -> ModuleType:
    """Return the module with the rewards of a data source's task; see `reward_of`."""
    # A data source is the name of a data set or of a task.
    task_by_source = {name: definition.task for name, definition in definitions().items()}
    for task in TASKS:
        task_by_source[task] = task
    # This one is neither: Countdown's rows have it if their prompt asks for a box.
    task_by_source["countdown_boxed"] = "countdown"
    if data_source not in task_by_source:
        raise ValueError(
            f"data_source={data_source!r} has no reward; known are {', '.join(sorted(task_by_source))}. For your own "
            "rows, name your reward in reward.custom_reward_function"
        )
    return import_module(f"verl_clipx.papers.tasks.{task_by_source[data_source]}.reward")
