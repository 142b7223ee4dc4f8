"""Checks whether a run's reward can use the ground truths of its data, before a training starts."""

from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import read_table
from verl_clipx.run.keys import REWARD_FUNCTIONS, TRAINING_FILES, VALIDATION_FILES

# With this prefix, verl takes the path of a reward function for an installed module, not for a file.
PACKAGE_PREFIX = "pkg://"


def find_unusable_ground_truth(config: DictConfig) -> str | None:
    """Find the first ground truth that no answer could match, so that every response to it would count as wrong.

    Only data files that are on this machine are read. Nothing is found if the configured reward is not in an installed
    module, or if its module has no function `check_ground_truth`.

    Returns:
        A message with the file, the row, counted from 0, and the fault; None if nothing is found.
    """
    reward_path = str(OmegaConf.select(config, f"{REWARD_FUNCTIONS[0]}.path") or "")
    if not reward_path.startswith(PACKAGE_PREFIX):
        return None
    reward_module = import_module(reward_path.removeprefix(PACKAGE_PREFIX))
    check_ground_truth = getattr(reward_module, "check_ground_truth", None)
    if check_ground_truth is None:
        return None
    for path in _data_files(config):
        if not path.is_file():
            continue
        rows = read_table(path, ["data_source", "reward_model"]).to_pylist()
        for number, row in enumerate(rows):
            reward_model = row["reward_model"] or {}
            try:
                check_ground_truth(row["data_source"], reward_model.get("ground_truth"))
            except ValueError as error:
                return f"{path}, row {number}: {error}"
    return None


def _data_files(config: DictConfig) -> list[Path]:
    """Return the files of the training rows and of the validation rows, in this order."""
    paths: list[Path] = []
    for key in (TRAINING_FILES, VALIDATION_FILES):
        # One file, several, or none.
        configured = OmegaConf.select(config, key) or []
        if isinstance(configured, str):
            configured = [configured]
        paths += [Path(file) for file in configured]
    return paths
