"""Measures the floor a second time: a pass without gradient over the same rows, cut into other micro-batches.

A first update that cuts its rows exactly as old_log_probs did has equal numbers, and says nothing of how later updates
round. This pass has the rows in reverse order, and at most half of the tokens in a micro-batch.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_clipx.losses.applying.floor import floor_bins, floor_sums
from verl_clipx.losses.applying.loss import token_loss
from verl_clipx.losses.applying.metrics import named_sums, to_host, token_sums
from verl_clipx.losses.applying.observed import bounded_of
from verl_clipx.losses.base.shared_metrics import FLOOR_RECUT
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Inputs, tokens_of
from verl_clipx.run.config import Observe, clip_range
from verl_clipx.training.worker.layout import pad_rows, response_part
from verl_clipx.training.worker.observe import SEQUENCE_LEVEL
from verl_clipx.training.worker.policy_loss import decide
from verl_clipx.training.worker.rows import OLD_LOG_PROBS, hash_rows_with
from verl_clipx.training.worker.step import MeasuredFloor, OptimizerStep, inputs_of, micro_batch_of


def measure_recut(
    actor: Any, engine: Any, data: Any, step: OptimizerStep, *, cut: dict[str, Any]
) -> MeasuredFloor | None:
    """Returns this rank's sums of the second measurement.

    It is None where no other cut fits into the memory of the first, and where the engine replays the routes of experts,
    which it keeps micro-batch by micro-batch.

    Args:
        actor: verl's ActorConfig.
        data: this rank's mini-batch, which stays as it is.
        step: the planned step, whose bounds hold.
        cut: how the engine cuts a mini-batch into micro-batches, for the keys that the data lack.
    """
    if "routed_experts" in data:
        return None
    other = cut_otherwise(data, {key: tu.get(data, key=key, default=value) for key, value in cut.items()})
    if other is None:
        return None
    settings = actor.policy_loss.clipx
    needs_entropy = not isinstance(settings, Observe) and "entropy" in settings.method.asks_for
    sums: dict[str, Tensor] = {}
    bins: dict[str, Tensor] = {}
    log_probs: dict[int, Tensor] = {}

    def loss_function(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        mask = pad_rows(data["response_mask"]).bool()
        tensors = {
            "log_prob": response_part(model_output["log_probs"], data, mask.shape[1]),
            "old_log_prob": pad_rows(data["old_log_probs"]),
            "advantages": pad_rows(data["advantages"]),
            "mask": mask,
        }
        with torch.autocast(mask.device.type, enabled=False):
            if isinstance(settings, Observe):
                inputs = Inputs(**tensors)
                low, high = _clipped_by_verl(inputs, actor)
            else:
                inputs = inputs_of(settings, micro_batch_of(settings, step, data, model_output), **tensors)
                # What this pass finds is no part of what the step collects.
                _, decision = decide(settings, replace(step, collected=None), inputs)
                of_tokens = named_sums(token_loss(settings.method, settings.shaping, inputs, decision).sums)
                low = of_tokens["LN"]
                high = of_tokens["HP"]
            found = floor_sums(inputs, FLOOR_RECUT)
            found |= {FLOOR_RECUT.clip_fraction_low.key: low, FLOOR_RECUT.clip_fraction_high.key: high}
            _add(sums, found)
            _add(bins, floor_bins(inputs, FLOOR_RECUT))
        rows = zip(tensors["log_prob"].unbind(), mask.unbind(), strict=True)
        of_responses = [log_prob[tokens] for log_prob, tokens in rows]
        log_probs.update(zip(hash_rows_with(data, OLD_LOG_PROBS, None), of_responses, strict=True))
        return torch.zeros((), device=mask.device), {}

    tu.assign_non_tensor(other, calculate_entropy=needs_entropy, distillation_use_topk=False)
    offload = tu.get(data, key="disable_auto_offload", default=False)
    with engine.eval_mode(disable_auto_offload=offload), torch.no_grad():
        engine.forward_backward_batch(other, loss_function, forward_only=True)
    # A rank of a pipeline may see no loss.
    if not sums:
        return None
    return MeasuredFloor(*to_host(sums, bins), log_probs)


def cut_otherwise(data: Any, cut: dict[str, Any]) -> Any:
    """Returns a mini-batch in reverse order, to be cut into micro-batches of at most half the tokens.

    A micro-batch holds at least the longest row, as verl asserts. Padded rows stay in micro-batches of equal numbers of
    rows, because others could take more memory than the training.

    Returns:
        The copy; None if its micro-batches would have to be those of the training, which have one padded row each.
    """
    rows = len(data)
    other = tu.index_select_tensor_dict(data, list(reversed(range(rows))))
    if cut["use_dynamic_bsz"] or cut["use_remove_padding"]:
        ranks_of_a_row = tu.get(data, key="sp_size", default=1)
        lengths = _lengths(data)
        if cut["use_dynamic_bsz"]:
            largest = min(sum(lengths), cut["max_token_len_per_gpu"] * ranks_of_a_row)
        else:
            size = cut["micro_batch_size_per_gpu"]
            largest = max(sum(lengths[start : start + size]) for start in range(0, rows, size))
        tokens = max(max(lengths), largest // 2)
        cut = {**cut, "use_dynamic_bsz": True, "max_token_len_per_gpu": -(-tokens // ranks_of_a_row)}
    else:
        size = cut["micro_batch_size_per_gpu"]
        smaller = [part for part in range(1, size // 2 + 1) if size % part == 0]
        if not smaller:
            return None
        cut = {**cut, "micro_batch_size_per_gpu": smaller[-1]}
    tu.assign_non_tensor(other, **cut)
    return other


def _lengths(data: Any) -> list[int]:
    """Returns the number of tokens of each row, prompt and response."""
    prompts = data["prompts"]
    responses = data["responses"]
    if prompts.is_nested:
        return (prompts.offsets().diff() + responses.offsets().diff()).tolist()
    return data["attention_mask"].sum(1).tolist()


def _clipped_by_verl(inputs: Inputs, actor: Any) -> tuple[Tensor, Tensor]:
    """Returns how many tokens verl's clip_ratio clips below and above, 0-d float64 tensors."""
    t = tokens_of(inputs, LARGEST_LOG_RATIO)
    bounded = bounded_of(t, actor.policy_loss.loss_mode in SEQUENCE_LEVEL)
    sums = named_sums(token_sums(t, bounded, clip_range(actor), torch.zeros_like(t.ratio), None, None))
    return sums["LN"], sums["HP"]


def _add(totals: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Adds numbers to totals of the same names, in place."""
    for name, number in more.items():
        totals[name] = totals[name] + number if name in totals else number
