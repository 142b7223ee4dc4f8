"""The receipt in the trainer's process: if a run's first logged step has no receipt, another worker trained it."""

import logging
from typing import Any

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.run.groups import OBSERVE
from verl_clipx.runs import keys

logger = logging.getLogger(__name__)


class ReceiptCheck:
    """Looks for the receipt in the first logged step that trains the actor."""

    def __init__(self, config: dict[str, Any]):
        policy_loss = (config.get("actor_rollout_ref", {}).get("actor") or {}).get("policy_loss") or {}
        node = policy_loss.get(NODE) or {"receipt": "off"}
        asked = "off" if node.get("method") == OBSERVE else node.get("receipt", "auto")
        self._due = asked != "off"
        self._stops = asked == "stop" or (asked == "auto" and not policy_loss["run"]["untested"])
        # Before this step, verl trains only the critic.
        self._first = (config.get("trainer") or {}).get("critic_warmup") or 0

    def look(self, data: dict[str, Any], step: int) -> None:
        """Looks at a step's metrics; raises RuntimeError if the receipt is missing and that stops the run."""
        if not self._due or data.get(keys.STEP, -1) < self._first:
            return
        self._due = False
        if any(str(key).endswith(RECEIPT.key) for key in data):
            return
        if self._stops:
            raise RuntimeError(f"{MISSING} To continue without this check, set {NODE}.receipt=off.")
        logger.warning("clipx: %s", MISSING)


MISSING = (
    f"the first logged training step has no {RECEIPT.key}: it was not made by the plugin's training worker, so "
    "nothing shows which loss it trained."
)
