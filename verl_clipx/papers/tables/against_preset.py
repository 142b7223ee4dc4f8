"""Whether a run is one of a preset, by the values that make up its setting."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.run.kept_values import is_hash

NOTHING = "nothing"
"""In a message, for a key that is not there."""

OPEN = "???"
"""Hydra's marker for a mandatory value that is not yet set."""


def as_written(config: DictConfig, key: str) -> str:
    """Return a value as written; resolved, it would be a path on one particular machine."""
    parent, _, name = key.rpartition(".")
    return str(OmegaConf.select(config, parent)._get_node(name))


def filled_in(preset: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's values for the keys that the preset leaves open (`???`), such as measured clip bounds."""
    return {key: run[key] for key, value in preset.items() if value == OPEN and run.get(key, OPEN) != OPEN}


def differences(preset: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Describe the differences between a preset and a run.

    Args:
        preset, run: what is kept of `analysis.runs.sameness.significant_values`; apply `filled_in` first.
    """
    reasons: list[str] = []
    for key in sorted(preset.keys() | run.keys()):
        wanted = preset.get(key, NOTHING)
        given = run.get(key, NOTHING)
        if wanted == given:
            continue
        if is_hash(wanted) or is_hash(given):
            reasons.append(f"{key}: the run's text is not the preset's")
        else:
            reasons.append(f"{key}: preset {wanted!r}, run {given!r}")
    return reasons
