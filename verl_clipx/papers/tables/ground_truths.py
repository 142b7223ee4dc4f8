"""Checks whether a run's reward can use the ground truths of its data, before a training starts."""

from importlib import import_module
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.files import read_table
from verl_clipx.run.keys import TRAINING_FILES, VALIDATION_FILES

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
    if check is None:
        return None
    files: list[Path] = []
    for key in (TRAINING_FILES, VALIDATION_FILES):
        named = OmegaConf.select(config, key)
        if isinstance(named, str):
            named = [named]
        files += [Path(file) for file in named or []]
    for path in filter(Path.is_file, files):
        for number, row in enumerate(read_table(path, ["data_source", "reward_model"]).to_pylist()):
            try:
                check(row["data_source"], (row["reward_model"] or {}).get("ground_truth"))
            except ValueError as error:
                return f"{path}, row {number}: {error}"
    return None
