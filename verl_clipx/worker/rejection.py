"""What the loss of a run rejects by the current policy's ratio.

In decoupled mode verl's trainer removes the tokens from response_mask before the worker gets it. In bypass mode only
verl's own bypass loss would reject, so the plugin's does it itself.
"""

from typing import Any

from verl_clipx.modifiers.rejection import Rejection, parse_criteria
from verl_clipx.run.support import BYPASS, ROLLOUT_RS, WITH_ROLLOUT_RS

NOTHING_REJECTED = Rejection()


def rejection_of(policy_loss: Any) -> Rejection:
    """What the loss of a run has to reject: nothing outside bypass mode, where verl's trainer has done it already.

    Args:
        policy_loss: verl's policy-loss node.
    """
    options = getattr(getattr(policy_loss, "run", None), "options", {})
    if not options.get(BYPASS) or options.get(ROLLOUT_RS) is None:
        return NOTHING_REJECTED
    return parse_criteria(str(options[ROLLOUT_RS]), str(options.get(WITH_ROLLOUT_RS[0])))


def rejects_before(policy_loss: Any) -> bool:
    """Whether verl's trainer removes tokens from response_mask that verl's own token count still includes.

    Args:
        policy_loss: verl's policy-loss node.
    """
    options = policy_loss.run.options
    return options.get(ROLLOUT_RS) is not None and not options.get(BYPASS)
