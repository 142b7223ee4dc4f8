"""What the loss of a run rejects by the current policy's ratio, and what verl's trainer has to have corrected.

In decoupled mode verl's trainer removes the tokens from response_mask before the worker gets it. In bypass mode only
verl's own bypass loss would reject, so the plugin's does it itself.

Here `data` is verl's data of a micro-batch, and `correction` the rollout correction that the run's record names.
"""

from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.modifiers.rejection import Rejection, parse_criteria
from verl_clipx.run.sampling import Correction
from verl_clipx.training.worker.layout import has_token, pad_rows

# What the order of a sum over a sequence may do to a log-ratio, in nats a token.
ROUNDED = 1e-6


def rejection_of(policy_loss: Any) -> Rejection:
    """Return what a run's loss has to reject: nothing outside bypass mode, where verl's trainer has done it.

    Args:
        policy_loss: verl's policy-loss node. Without the run in it, nothing is rejected.
    """
    handover = getattr(policy_loss, "run", None)
    if handover is None or not handover.record.correction.rejects_in_loss:
        return Rejection()
    correction = handover.record.correction
    return parse_criteria(str(correction.rejection), str(correction.rejection_threshold))


def kept_by_verl(correction: Correction, mask: Tensor, log_ratio: Tensor) -> Tensor:
    """Return the tokens that verl's own code does not reject: bool, (sequences, response length).

    It waits for the accelerator.

    Args:
        correction: has the criteria and their thresholds.
        mask: the tokens before the rejection, bool, (sequences, response length).
        log_ratio: of the current or old policy to the rollout policy, (sequences, response length).
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not mask.any():
        return mask
    names = correction.rejection
    threshold = correction.rejection_threshold
    return compute_rollout_rejection_mask(log_ratio, mask, names, threshold)[0].bool()


def kept_by_trainer(correction: Correction, data: Any) -> Tensor:
    """Return the tokens that verl's trainer should train, as far as the data tell.

    Returns:
        bool, (sequences, response length). Where the data do not tell, it is the mask that came.
    """
    mask, mask_before = masks_in(data)
    names = correction.rejection
    if "loss_mask" not in data or names is None or correction.bypass:
        return mask_before & present_in(data)
    if "rollout_log_probs" not in data:
        return mask
    # A single criterion rejects none of the tokens that it has kept. Several may, because a sequence's mean changes as
    # soon as another criterion has rejected some of its tokens.
    has_one_criterion = "," not in str(names)
    is_told = has_mask_before_rejection(correction, data) | has_one_criterion
    return kept_by_verl(correction, mask_before, log_ratio_in(data)).where(is_told, mask)


def weights_by_verl(correction: Correction, data: Any) -> Tensor | None:
    """Return verl's own weights of its correction before it normalises them.

    Returns:
        (3, sequences, response length): the weights; and those of log-ratios that are larger and smaller by what
        rounding does, because at a threshold a weight jumps. A sequence's weight is NaN where the trainer may have
        rejected tokens in both masks. None if the data lack the rollout's log-probabilities.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    _, mask_before = masks_in(data)
    level = correction.weights
    threshold = correction.weights_threshold
    if "rollout_log_probs" not in data or not mask_before.any():
        return None
    log_ratio = log_ratio_in(data)
    weights_of_moved = []
    for moved in (0.0, ROUNDED, -ROUNDED):
        weights, _ = compute_rollout_correction_weights(log_ratio + moved, mask_before, level, threshold)
        weights_of_moved.append(weights)
    # A token's weight does not depend on the mask of its sequence.
    is_known = has_mask_before_rejection(correction, data) | (level == "token")
    return torch.stack(weights_of_moved).where(is_known, torch.nan)


def has_mask_before_rejection(correction: Correction, data: Any) -> Tensor:
    """Return for each sequence whether the data have its mask before the trainer's rejection, bool, (sequences, 1)."""
    mask, mask_before = masks_in(data)
    may_be_rejected_in_both = correction.rejection is not None and torch.equal(mask_before, mask)
    lost_nothing = (mask == present_in(data)).all(1, keepdim=True)
    return lost_nothing | (not may_be_rejected_in_both)


def present_in(data: Any) -> Tensor:
    """Return where a response has a token, bool, (sequences, response length)."""
    width = pad_rows(data["response_mask"]).shape[1]
    return has_token(data, width)


def masks_in(data: Any) -> tuple[Tensor, Tensor]:
    """Return the tokens that are trained, and those before any rejection as far as the data tell.

    Returns:
        response_mask, and loss_mask if the data have one of that shape, otherwise response_mask again; bool,
        (sequences, response length).
    """
    (response_mask,) = fields_in(data, "response_mask")
    mask = response_mask.bool()
    mask_before = pad_rows(data.get("loss_mask", mask)).bool()
    if mask_before.shape != mask.shape:
        mask_before = mask
    return mask, mask_before


def log_ratio_in(data: Any) -> Tensor:
    """Return the log-ratio of the old policy to the rollout policy, (sequences, response length)."""
    old, rollout = fields_in(data, "old_log_probs", "rollout_log_probs")
    return old - rollout


def fields_in(data: Any, *names: str) -> tuple[Tensor, ...]:
    """Return response fields by name, (sequences, response length) each."""
    # A jagged tensor that does not know its longest row is padded to the length of all rows together.
    width = pad_rows(data["response_mask"]).shape[1]
    return tuple(pad_rows(data[name])[:, :width] for name in names)
