"""The receipt in the trainer's process: if a run's first logged step has no receipt, another worker trained it."""

import logging
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from verl_clipx.base.method import NODE
from verl_clipx.base.shared_metrics import RECEIPT
from verl_clipx.driver.listing import OBSERVE
from verl_clipx.driver.support import Options, untested

logger = logging.getLogger(__name__)

# Every trainer of verl's logs this key for each training step, and no worker does.
STEP = "training/global_step"


def stops(receipt: str, options: Options) -> bool:
    """Whether a run stops if it trains something else than announced.

    It does with clipx.receipt=stop and, with clipx.receipt=auto, if tests have run all of the run's options.

    Args:
        receipt: the value of clipx.receipt.
        options: the keys of `support.READ` with their values.
    """
    return receipt == "stop" or (receipt == "auto" and not untested(options))


def install(tracking: ModuleType) -> None:
    """Wraps `Tracking` in verl.utils.tracking, to which the trainer passes the metrics of each step.

    The wrapped `Tracking.log` raises RuntimeError if the receipt is missing and the run has to stop.
    """
    wrap_function_wrapper(tracking, "Tracking.__init__", _with_expectation)
    wrap_function_wrapper(tracking, "Tracking.log", _with_receipt)


def _with_expectation(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    wrapped(*positional, **named)
    config = named.get("config") or (positional[3] if len(positional) > 3 else None) or {}
    tracking.clipx_receipt = expected(config)
    tracking.clipx_critic_warmup = (config.get("trainer") or {}).get("critic_warmup") or 0


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


def _with_receipt(wrapped, tracking, positional: tuple, named: dict[str, Any]) -> None:
    wrapped(*positional, **named)
    data = named.get("data", positional[0] if positional else {})
    due = getattr(tracking, "clipx_receipt", None)
    # Before this step, verl trains only the critic.
    if due is None or data.get(STEP, -1) < tracking.clipx_critic_warmup:
        return
    tracking.clipx_receipt = None
    if any(str(key).endswith(RECEIPT.key) for key in data):
        return
    if due == "stop":
        raise RuntimeError(f"{MISSING} To continue without this check, set {NODE}.receipt=off.")
    logger.warning("clipx: %s", MISSING)


MISSING = (
    f"the first logged training step has no {RECEIPT.key}: it was not made by the plugin's training worker, so "
    "nothing shows which loss it trained."
)
