"""Tells whether a run is a run of a preset, by the values that define it."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.run.kept_values import is_hash

NOTHING = "nothing"
"""In a message, for a key that is not there."""

OPEN = "???"
"""Hydra's marker for a mandatory value that is not yet set."""


def as_written(config: DictConfig, key: str) -> str:
    """Return a value of a configuration as written, with its interpolations.

    Resolved, a path would be that of one particular machine.
    """
    parent, _, name = key.rpartition(".")
    return str(OmegaConf.select(config, parent)._get_node(name))


def filled_in(preset: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's values for the keys that the preset leaves open (`???`), such as measured clip bounds."""
    return {key: run[key] for key, value in preset.items() if value == OPEN and run.get(key, OPEN) != OPEN}


def differences(preset: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Describe the differences between a preset and a run.

    Args:
        preset, run: the kept values by key, from `kept_configuration`. A value that the preset leaves open counts as a
            difference, so add the run's values for it first; see `filled_in`.

    Returns:
        A line for each key whose values differ, in the order of the keys; empty if the run is one of the preset.
    """
    lines: list[str] = []
    for key in sorted(preset.keys() | run.keys()):
        preset_value = preset.get(key, NOTHING)
        run_value = run.get(key, NOTHING)
        if preset_value == run_value:
            continue
        # A hash is shown to nobody: it stands for a text that may hold a secret.
        if is_hash(preset_value) or is_hash(run_value):
            lines.append(f"{key}: the run's text is not the preset's")
        else:
            lines.append(f"{key}: preset {preset_value!r}, run {run_value!r}")
    return lines
