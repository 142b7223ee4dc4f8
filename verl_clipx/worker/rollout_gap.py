"""How far the actor's log-probabilities are from the rollout's on tokens of the same weights."""

import logging
from typing import Any

from verl_clipx.worker.layout import padded, response_part
from verl_clipx.worker.rows import AGE

logger = logging.getLogger(__name__)

# A mean gap between the actor's and the rollout's log-probabilities above this, in nats, is named in a warning.
# Measured on a random model of 2 layers, 24 November 2026: Ulysses under sdpa, on 2 ranks and without its refusal, was
# 0.18 apart from 1 rank (16 sequences of up to 18 tokens, half of which are right all the same), bfloat16 0.014 from
# float32 (16 of 100).
GAP = 0.1


def gap_to_rollout(model_output: Any, data: Any) -> tuple[float, int] | None:
    """How far the model is from the rollout on tokens that the weights before the first update have sampled.

    Args:
        model_output, data: verl's loss function's arguments in a run's first update; the model's own log-probabilities
            count, since bypass mode has the rollout's in the place of the old policy's.

    Returns:
        The mean distance in nats and the number of such tokens, all where no sequence's age is known; None if the
        rollout returned no log-probabilities.
    """
    if "rollout_log_probs" not in data:
        return None
    fresh, age = padded(data["response_mask"]).bool(), data.get(AGE, None)
    if age is not None:
        fresh = fresh & (age.to(fresh.device) == 0)[:, None]
    width = fresh.shape[1]
    gap = response_part(model_output["log_probs"], data, width) - padded(data["rollout_log_probs"])[:, :width]
    return float(gap.abs()[fresh].double().sum() / fresh.sum().clamp(min=1)), int(fresh.sum())


def compared_with_rollout(found: tuple[float, int] | None) -> str:
    """What the line says of the rollout's log-probabilities; warns where they are far from the actor's.

    Args:
        found: from `gap_to_rollout`.
    """
    if found is None:
        return "the rollout returns no log-probabilities that the actor's could be compared with"
    gap, tokens = found
    if tokens == 0:
        return "no token was sampled with the actor's current weights, so its log-probabilities cannot be compared"
    if gap > GAP:
        logger.warning(WIDE_GAP, gap, tokens)
    return f"actor and rollout differ by {gap:.2g} nats a token on {tokens} tokens of the same weights"


WIDE_GAP = (
    "clipx: actor and rollout give the same tokens log-probabilities that differ by %.2g nats on average of %d, though "
    "of the same weights: their precision, temperature or attention is not the same."
)
