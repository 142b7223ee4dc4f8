"""What the `_target_` of Hydra's nodes names: `build` for the clipx node, a class for verl's policy_loss node."""

from dataclasses import dataclass

from verl.workers.config.actor import PolicyLossConfig

from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.run.config import Observe, Settings, build
from verl_clipx.run.handover import Handover
from verl_clipx.run.keys import FACTS
from verl_clipx.run.resolve import refusal_without_method

__all__ = ["ClipxPolicyLossConfig", "build"]


@dataclass
class ClipxPolicyLossConfig(PolicyLossConfig):
    """verl's PolicyLossConfig with two more nodes, the plugin's. The driver and the workers build it.

    Args:
        clipx: the clipx node. After the construction it is complete: with what it gets from the run.
        run: what the driver has resolved of the run.

    Raises:
        Refusal: there is no method, or the user has put something else into the node `run`.
    """

    clipx: Settings | Observe | None = None
    run: Handover | None = None

    def __post_init__(self):
        if not isinstance(self.clipx, Settings | Observe):
            raise refusal_without_method(self.clipx)
        if not isinstance(self.run, Handover):
            raise Refusal(FACTS, self.run, "the plugin needs what it has resolved of the run there", "Remove it.")
        # verl freezes its configurations.
        object.__setattr__(self, "clipx", self.run.complete(self.clipx))
