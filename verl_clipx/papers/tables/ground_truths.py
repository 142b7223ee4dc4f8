"""Checks whether a run's reward can use the ground truths of its data, before a training starts."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import read_table
from verl_clipx.run.keys import REWARD_FUNCTIONS, TRAINING_FILES, VALIDATION_FILES

# A reward function's path with this prefix names an installed module instead of a file.
PACKAGE_PREFIX = "pkg://"


def find_unusable_ground_truth(config: DictConfig) -> str | None:
    """Find the first ground truth that no response can match. All responses to its question would count as wrong.

    Only data files that are on this machine are read. See `explain_unchecked` for a run of which nothing is checked.

    Returns:
        A message with the file, the row, counted from 0, and the fault; None if no fault is found.

    Raises:
        OSError, ValueError: a data file cannot be read.
    """
    check_ground_truth = _load_check(config)
    if check_ground_truth is None:
        return None
    for path in _data_files_here(config):
        rows = read_table(path, ["data_source", "reward_model"]).to_pylist()
        for row_number, row in enumerate(rows):
            reward_model = row["reward_model"] or {}
            try:
                check_ground_truth(row["data_source"], reward_model.get("ground_truth"))
            except ValueError as error:
                return f"{path}, row {row_number}: {error}"
    return None


def explain_unchecked(config: DictConfig) -> str | None:
    """Return why `find_unusable_ground_truth` checks nothing of a run; None if it checks a file."""
    if _load_check(config) is None:
        return "the reward is not in an installed module with a function check_ground_truth"
    if not _data_files_here(config):
        return "none of the data files is on this machine"
    return None


def _load_check(config: DictConfig) -> Callable[[Any, Any], None] | None:
    """Return the function `check_ground_truth` of the module that has a run's reward.

    The function raises ValueError for a data source and a ground truth that the reward cannot use.

    Returns:
        None if the configured reward is not in an installed module, or if the module has no such function.
    """
    # verl reads the first key; older versions read the others.
    reward_path = str(OmegaConf.select(config, f"{REWARD_FUNCTIONS[0]}.path") or "")
    if not reward_path.startswith(PACKAGE_PREFIX):
        return None
    reward_module = import_module(reward_path.removeprefix(PACKAGE_PREFIX))
    return getattr(reward_module, "check_ground_truth", None)


def _data_files_here(config: DictConfig) -> list[Path]:
    """Return the files of the training rows and of the validation rows, in this order, that are on this machine."""
    paths: list[Path] = []
    for key in (TRAINING_FILES, VALIDATION_FILES):
        # The value is a path, a list of paths, or empty.
        configured = OmegaConf.select(config, key) or []
        if isinstance(configured, str):
            configured = [configured]
        paths += [Path(file).expanduser() for file in configured]
    return [path for path in paths if path.is_file()]
