"""Modifiers, which you add to a method: they change which tokens count, by how much, and within which bounds."""

from typing import get_args

from verl_clipx.losses.modifiers.advantage_reweighting import AdvantageReweighting
from verl_clipx.losses.modifiers.entropy_selection import EntropySelection
from verl_clipx.losses.modifiers.future_influence import FutureInfluence
from verl_clipx.losses.modifiers.hold import Hold
from verl_clipx.losses.modifiers.lopti import Lopti
from verl_clipx.losses.modifiers.masks import Mask
from verl_clipx.losses.modifiers.pull import Pull

# What changes the advantages.
Shaping = AdvantageReweighting | FutureInfluence

# From a key under the clipx node to the classes that its node may have. If there are several, the node's key `rule`
# chooses one of them; without it, the first is meant.
MODIFIERS = {
    "shaping": get_args(Shaping),
    "select": (EntropySelection,),
    "update": (Lopti,),
    "mask": get_args(Mask),
    "hold": (Hold,),
    "pull": (Pull,),
}
