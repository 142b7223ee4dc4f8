"""How far the actor's log-probabilities are from the rollout's on tokens that were sampled with the same weights."""

import logging
from typing import Any

from verl_clipx.worker.layout import AGE, padded, response_part

logger = logging.getLogger(__name__)

# A mean gap between the actor's and the rollout's log-probabilities above this, in nats, causes a warning. Measured on
# a random model of 2 layers on 24 November 2026: Ulysses with sdpa on 2 ranks, with its refusal switched off, differed
# by 0.18 from 1 rank (16 sequences of up to 18 tokens; half of the tokens were still right), and bfloat16 differed by
# 0.014 from float32 (16 sequences of 100 tokens).
GAP = 0.1


def gap_to_rollout(model_output: Any, data: Any) -> tuple[float, int] | None:
    """How far the model is from the rollout on tokens that the weights before the first update sampled.

    Args:
        model_output, data: the arguments of verl's loss function in a run's first update. The model's own
            log-probabilities are compared, because in bypass mode the old policy's are the rollout's.

    Returns:
        The mean absolute difference in nats and the number of such tokens; all tokens if the sequences' ages are
        unknown. None if the rollout returned no log-probabilities.
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
    """What the receipt says about the rollout's log-probabilities. Warns if they are far from the actor's.

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
    "clipx: with the same weights, actor and rollout give log-probabilities that differ by %.2g nats on average over "
    "%d tokens: their precision, temperature or attention is not the same."
)
