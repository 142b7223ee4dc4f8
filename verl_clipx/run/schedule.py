"""What the updates on a rollout batch of a run consist of: passes, updates, where bounds come from, extra passes.

A run's schedule is made once, when its configuration is resolved, and kept in the run's record. The worker's planner,
the line, `clipx explain`, the receipt, replay, the page and the papers' presets read it. Importing this is cheap.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass

Values = Mapping[str, Any]

# The name of the only pass over a rollout batch without Lopti.
WHOLE = ""
# From Lopti's order to the names of its passes.
PASSES = {"low_first": ("low", "high"), "high_first": ("high", "low"), "low_only": ("low",)}
