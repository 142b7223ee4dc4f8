"""What the loss of a run rejects by the current policy's ratio, and what verl's trainer has to have corrected.

In decoupled mode verl's trainer removes the tokens from response_mask before the worker gets it. In bypass mode only
verl's own bypass loss would reject, so the plugin's does it itself.
"""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.modifiers.rejection import Rejection, parse_criteria
from verl_clipx.run.sampling import Correction
from verl_clipx.training.worker.layout import pad_rows, places

# What the order of a sum over a sequence may do to a log-ratio, in nats a token.
ROUNDED = 1e-6


def rejection_of(policy_loss: Any) -> Rejection:
    """Returns what a run's loss has to reject: nothing outside bypass mode, where verl's trainer has done it."""
    handover = getattr(policy_loss, "run", None)
    if handover is None or not handover.record.correction.rejects_in_loss:
        return Rejection()
    correction = handover.record.correction
    return parse_criteria(str(correction.rejection), str(correction.rejection_threshold))


def left_by_verl(correction: Correction, mask: Tensor, log_ratio: Tensor) -> Tensor:
    """Returns the tokens that verl's own code keeps: bool, (sequences, response length). It waits for the accelerator.

    `log_ratio` is relative to the rollout policy.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not mask.any():
        return mask
    names = correction.rejection
    threshold = correction.rejection_threshold
    return compute_rollout_rejection_mask(log_ratio, mask, names, threshold)[0].bool()


def left_by_trainer(correction: Correction, data: Any) -> Tensor:
    """Returns the tokens that verl's trainer leaves, or should have left as far as the data tell, bool."""
    mask, whole = masks_in(data)
    names = correction.rejection
    if "loss_mask" not in data or names is None or correction.bypass:
        return whole & present_in(data)
    if "rollout_log_probs" not in data:
        return mask
    # One criterion says the same of the tokens that it has left.
    told = whole_rows(correction, data) | ("," not in str(names))
    return left_by_verl(correction, whole, log_ratio_in(data)).where(told, mask)


def weights_by_verl(correction: Correction, data: Any) -> Tensor | None:
    """Returns verl's own weights of its correction before it normalises them, (3, sequences, length), or None.

    The second and third are those of log-ratios that differ by what rounding does, because at a threshold a weight
    jumps. None if the data lack the rollout's log-probabilities; NaN for a sequence's weight where the trainer may have
    rejected tokens in both masks.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    _, whole = masks_in(data)
    level = correction.weights
    if "rollout_log_probs" not in data or not whole.any():
        return None
    threshold = correction.weights_threshold
    log_ratio = log_ratio_in(data)
    made = [log_ratio + by for by in (0.0, ROUNDED, -ROUNDED)]
    weights = torch.stack([compute_rollout_correction_weights(one, whole, level, threshold)[0] for one in made])
    return weights.where(whole_rows(correction, data) | (level == "token"), torch.nan)


def whole_rows(correction: Correction, data: Any) -> Tensor:
    """Returns whether the data have a sequence's mask of before the trainer's rejection, bool, (sequences, 1)."""
    mask, whole = masks_in(data)
    # The trainer may have rejected in both masks.
    unknown = correction.rejection is not None and torch.equal(whole, mask)
    return (mask == present_in(data)).all(1, keepdim=True) | (not unknown)


def present_in(data: Any) -> Tensor:
    """Returns where a response has a token, bool, (sequences, response length)."""
    return places(data, pad_rows(data["response_mask"]).shape[1], 1)[1]


def masks_in(data: Any) -> tuple[Tensor, Tensor]:
    """Returns the mask of the tokens that are trained, and that of before any rejection as far as it is known, bool."""
    mask = fields_in(data, "response_mask")[0].bool()
    whole = pad_rows(data.get("loss_mask", mask)).bool()
    return mask, whole if whole.shape == mask.shape else mask


def log_ratio_in(data: Any) -> Tensor:
    """Returns the log-ratio of the old policy to the rollout policy, (sequences, response length)."""
    old, rollout = fields_in(data, "old_log_probs", "rollout_log_probs")
    return old - rollout


def fields_in(data: Any, *names: str) -> tuple[Tensor, ...]:
    """Returns response fields as (sequences, response length)."""
    # A jagged tensor that does not know its longest row is padded to the length of all rows together.
    width = pad_rows(data["response_mask"]).shape[1]
    return tuple(pad_rows(data[name])[:, :width] for name in names)
