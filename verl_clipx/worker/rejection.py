"""What the loss of a run rejects by the current policy's ratio.

In decoupled mode verl's trainer removes the tokens from response_mask before the worker gets it. In bypass mode only
verl's own bypass loss would reject, so the plugin's does it itself.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl_clipx.modifiers.rejection import Rejection, parse_criteria
from verl_clipx.run.keys import BYPASS, ROLLOUT_RS, WITH_ROLLOUT_RS
from verl_clipx.worker.layout import pad_rows

NOTHING_REJECTED = Rejection()


def rejection_of(policy_loss: Any) -> Rejection:
    """What the loss of a run has to reject: nothing outside bypass mode, where verl's trainer has done it already."""
    options = getattr(getattr(policy_loss, "run", None), "options", {})
    if not options.get(BYPASS) or options.get(ROLLOUT_RS) is None:
        return NOTHING_REJECTED
    return parse_criteria(str(options[ROLLOUT_RS]), str(options.get(WITH_ROLLOUT_RS[0])))


def left_by_verl(options: Mapping[str, Any], mask: Tensor, log_ratio: Tensor) -> Tensor:
    """The tokens that verl's own code keeps: bool, (sequences, response length). It waits for the accelerator.

    `options` are the run's keys of `keys.READ`, `log_ratio` is relative to the rollout policy.
    """
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    if not mask.any():
        return mask
    names, threshold = options[ROLLOUT_RS], options.get(WITH_ROLLOUT_RS[0])
    return compute_rollout_rejection_mask(log_ratio, mask, names, threshold)[0].bool()


def left_by_trainer(options: Mapping[str, Any], data: Any) -> Tensor:
    """The tokens that verl's trainer leaves in decoupled mode, or should have left as far as the data tell, bool."""
    mask = pad_rows(data["response_mask"]).bool()
    if not {"rollout_log_probs", "loss_mask"} <= set(data.keys()):
        return mask
    whole = pad_rows(data["loss_mask"]).bool()
    # If the trainer rejects in both masks, a sequence's divergence can be computed only from the tokens that are left.
    if whole.shape != mask.shape or ("," in str(options[ROLLOUT_RS]) and torch.equal(whole, mask)):
        return mask
    # A jagged tensor that does not know its longest row is padded to the length of all rows together.
    old, rollout = (pad_rows(data[key])[:, : mask.shape[1]] for key in ("old_log_probs", "rollout_log_probs"))
    return mask & left_by_verl(options, whole, old - rollout)
