"""Modifiers, which you add to a method: they change which tokens count, and by how much."""

from verl_clipx.modifiers.advantage_reweighting import AdvantageReweighting
from verl_clipx.modifiers.entropy_selection import EntropySelection
from verl_clipx.modifiers.lopti import Lopti

# Key under the clipx node to the parameters that it takes.
MODIFIERS = {"shaping": AdvantageReweighting, "select": EntropySelection, "update": Lopti}
