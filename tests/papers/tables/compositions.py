"""Presets on verl's configuration with a machine, each composed once in a session."""

import functools

from omegaconf import DictConfig

from tests.composition import composition

# Folders of configs/recipe with the papers' presets.
PAPERS = ("acpo", "ar_lopti", "dgpo", "bapo")
# What a run of the ablations with fixed bounds has to measure first.
MEASURED = {"clip_high": ("clipx.clip_high=3.5",), "clip_average": ("clipx.clip_low=0.9", "clipx.clip_high=1.1")}


@functools.cache
def on_a_machine(name: str) -> DictConfig:
    """A preset on verl's configuration with a machine, and with bounds where it leaves them open."""
    hardware = "+hardware=a100x8" if name.split("/")[0] in PAPERS else "+hardware=cpu"
    bounds = [word for part, words in MEASURED.items() if f"countdown_3b_{part}_" in name for word in words]
    return composition(hardware, f"+recipe={name}", *bounds)
