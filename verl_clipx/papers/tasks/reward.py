"""One reward for all tasks: `data_source` decides by which task's rule a response is scored.

For verl, set `reward.custom_reward_function.path=pkg://verl_clipx.papers.tasks.reward` and the name `compute_score`. A
run on one task can name that task's own reward instead, which returns more parts. `clipx papers eval` uses
`compute_score_for_evaluation`.
"""

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from verl_clipx.papers.tasks.catalog import TASKS, definitions

Reward = Callable[..., dict[str, float]]

PARTS = ("score", "acc", "format")
"""Parts that the reward of every task returns. verl assumes that all rows of a batch have the keys of the first one, so
in a batch of several tasks any other part would be missing from some rows."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response by the rule of its row's task. No response can cause an error.

    Args:
        data_source: the row's `data_source`, which is the name of a task or of a data set.

    Returns:
        `score`, the reward; `acc`, 1.0 if the answer is right, else 0.0; `format`, 1.0 if it can be read, else 0.0.

    Raises:
        ValueError: the data source is unknown.
    """
    parts = reward_of(data_source)(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return {part: parts[part] for part in PARTS}


def compute_score_for_evaluation(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Score as `compute_score` does, but in mathematics count only answers that are equal beyond reasonable doubt."""
    reward = reward_of(data_source, for_evaluation=True)
    parts = reward(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return {part: parts[part] for part in PARTS}


def check_ground_truth(data_source: str, ground_truth: Any) -> None:
    """Refuse a ground truth that no answer can match, with which every response of a data set would silently score 0.

    Raises:
        ValueError: the task's reward cannot use the ground truth, or the data source is unknown.
    """
    import_module(reward_of(data_source).__module__).check_ground_truth(data_source, ground_truth)


@lru_cache(maxsize=256)
def reward_of(data_source: str, for_evaluation: bool = False) -> Reward:
    """Return the reward function of a data source, for evaluation the task's own one if it has one.

    Raises:
        ValueError: the data source is unknown; the message lists the known ones.
    """
    tasks = {name: definition.task for name, definition in definitions().items()}
    tasks |= {task: task for task in TASKS} | {"countdown_boxed": "countdown"}
    if data_source not in tasks:
        raise ValueError(
            f"data_source={data_source!r} has no reward; known are {', '.join(sorted(tasks))}. For your own rows, "
            "name your reward in reward.custom_reward_function"
        )
    module = import_module(f"verl_clipx.papers.tasks.{tasks[data_source]}.reward")
    return getattr(module, "compute_score_for_evaluation" if for_evaluation else "compute_score", module.compute_score)
