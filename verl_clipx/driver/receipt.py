"""The receipt in the trainer's process: a run whose first logged update has none was trained by another worker."""

import logging
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.driver.config import OBSERVE

logger = logging.getLogger(__name__)

# Engines on which a test compares the gradients; on others a difference only warns, unless the run asks for more.
TESTED = ("fsdp", "fsdp2")

# What verl logs only of a step that updated the actor.
OF_AN_UPDATE = ("actor/pg_loss", "actor/grad_norm")


def stops(receipt: str, strategy: Any) -> bool:
    """Whether a run that trains something else than announced stops.

    Args:
        receipt: clipx.receipt.
        strategy: verl's name of the actor's engine.
    """
    return receipt == "stop" or (receipt == "auto" and strategy in TESTED)


def install(tracking: ModuleType) -> None:
    """Wraps verl.utils.tracking's `Tracking`, to which the trainer gives the metrics of each step."""
    wrap_function_wrapper(tracking, "Tracking.__init__", _with_expectation)
    wrap_function_wrapper(tracking, "Tracking.log", _with_receipt)


def _with_expectation(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    wrapped(*positional, **named)
    config = named.get("config") or (positional[3] if len(positional) > 3 else None) or {}
    tracking.clipx_receipt = expected(config)


def expected(config: dict[str, Any]) -> str | None:
    """What a missing receipt means to a run: "stop", "warn", or None where none is due.

    Args:
        config: as verl resolved it.
    """
    actor = config.get("actor_rollout_ref", {}).get("actor") or {}
    node = (actor.get("policy_loss") or {}).get(NODE)
    if not node or node.get("method") == OBSERVE or node.get("receipt", "auto") == "off":
        return None
    return "stop" if stops(node.get("receipt", "auto"), actor.get("strategy")) else "warn"


def _with_receipt(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    wrapped(*positional, **named)
    data = named.get("data", positional[0] if positional else {})
    due = getattr(tracking, "clipx_receipt", None)
    if due is None or not any(key in data for key in OF_AN_UPDATE):
        return
    tracking.clipx_receipt = None
    if any(str(key).endswith(RECEIPT.key) for key in data):
        return
    if due == "stop":
        raise RuntimeError(f"{MISSING} To train on: {NODE}.receipt=off.")
    logger.warning("clipx: %s", MISSING)


MISSING = (
    f"the first logged update has no {RECEIPT.key}: it was not made by the plugin's training worker, so that nothing "
    "says which loss it trained."
)
