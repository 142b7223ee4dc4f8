"""Presets on verl's configuration with a machine, each composed once in a session."""

import functools

from omegaconf import DictConfig

from tests.composition import composition

# Folders of configs/recipe with the papers' presets.
PAPERS = ("acpo", "ar_lopti", "dgpo", "bapo")


@functools.cache
def compose_on_machine(name: str) -> DictConfig:
    """Return a preset on verl's configuration with a machine, and with bounds where it leaves them open."""
    paper, _, _ = name.partition("/")
    hardware = "+hardware=a100x8" if paper in PAPERS else "+hardware=cpu"
    return composition(hardware, f"+recipe={name}", *list_open_bounds(name))


def list_open_bounds(name: str) -> list[str]:
    """Return overrides for the bounds that a run of ACPO's ablations with fixed bounds has to measure first."""
    if "countdown_3b_clip_high_" in name:
        return ["clipx.clip_high=3.5"]
    if "countdown_3b_clip_average_" in name:
        return ["clipx.clip_low=0.9", "clipx.clip_high=1.1"]
    return []
