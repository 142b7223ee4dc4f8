"""The receipt in the trainer's process: if a run's first logged step has no receipt, another worker trained it."""

import logging
from typing import Any

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.run.groups import OBSERVE
from verl_clipx.run.support import untested
from verl_clipx.run.verl_keys import Values

logger = logging.getLogger(__name__)

# Every trainer of verl's logs this key for each training step, and no worker does.
STEP = "training/global_step"


def stops(receipt: str, options: Values) -> bool:
    """Whether a run stops if it trains something else than announced.

    It does with clipx.receipt=stop and, with clipx.receipt=auto, if tests have run all of the run's options.

    Args:
        receipt: the value of clipx.receipt.
        options: the keys of `verl_keys.READ` with their values.
    """
    return receipt == "stop" or (receipt == "auto" and not untested(options))


def expected(config: dict[str, Any]) -> str | None:
    """What a run does if its receipt is missing: "stop", "warn", or None if it has no receipt.

    Args:
        config: verl's resolved configuration.
    """
    actor = config.get("actor_rollout_ref", {}).get("actor") or {}
    policy_loss = actor.get("policy_loss") or {}
    node = policy_loss.get(NODE)
    if not node or node.get("method") == OBSERVE or node.get("receipt", "auto") == "off":
        return None
    return "stop" if stops(node.get("receipt", "auto"), policy_loss["run"]["options"]) else "warn"


class ReceiptCheck:
    """Looks for the receipt in the first logged step that trains the actor.

    Args:
        config: as for `expected`.
    """

    def __init__(self, config: dict[str, Any]):
        self._due = expected(config)
        # Before this step, verl trains only the critic.
        self._first = (config.get("trainer") or {}).get("critic_warmup") or 0

    def look(self, data: dict[str, Any], step: int) -> None:
        """Looks at a step's metrics.

        Raises:
            RuntimeError: the receipt is missing, and that stops the run.
        """
        if self._due is None or data.get(STEP, -1) < self._first:
            return
        due, self._due = self._due, None
        if any(str(key).endswith(RECEIPT.key) for key in data):
            return
        if due == "stop":
            raise RuntimeError(f"{MISSING} To continue without this check, set {NODE}.receipt=off.")
        logger.warning("clipx: %s", MISSING)


MISSING = (
    f"the first logged training step has no {RECEIPT.key}: it was not made by the plugin's training worker, so "
    "nothing shows which loss it trained."
)
