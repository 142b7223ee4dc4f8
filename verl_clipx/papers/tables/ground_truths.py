"""Checks whether a run's reward can use the ground truths of its data, before a training starts."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import read_table

PACKAGE = "pkg://"


def unusable_ground_truth(config: DictConfig) -> str | None:
    """Find data with a ground truth that no answer could match, so that every response would count as wrong.

    This looks at the data files that exist on this machine, if the configured reward's module has `check_ground_truth`.

    Returns:
        The file, the row and the fault; None if there is none.
    """
    module = str(OmegaConf.select(config, "reward.custom_reward_function.path") or "")
    if not module.startswith(PACKAGE):
        return None
    check = getattr(import_module(module.removeprefix(PACKAGE)), "check_ground_truth", None)
    for path in _files(config) if check else ():
        table = read_table(path, ["data_source", "reward_model"])
        for number, row in enumerate(table.to_pylist()):
            try:
                check(row["data_source"], (row["reward_model"] or {}).get("ground_truth"))
            except ValueError as error:
                return f"{path}, row {number}: {error}"
    return None


def _files(config: DictConfig) -> Iterator[Path]:
    for key in ("data.train_files", "data.val_files"):
        named = OmegaConf.select(config, key)
        for path in [named] if isinstance(named, str) else named or []:
            if Path(path).is_file():
                yield Path(path)
