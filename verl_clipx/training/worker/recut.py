"""Measures the floor a second time: a pass without gradient over the same rows, divided into other micro-batches.

Where the first update divides its rows into the micro-batches in which old_log_probs were computed, both passes compute
equal numbers, which says nothing of how later updates round. This pass has the rows in reverse order, and at most half
as many tokens in a micro-batch.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_clipx.losses.applying.floor import floor_bins, floor_sums
from verl_clipx.losses.applying.loss import token_loss
from verl_clipx.losses.applying.metrics import name_sums, to_host, token_sums
from verl_clipx.losses.applying.observed import compute_bounded
from verl_clipx.losses.base.shared_metrics import FLOOR_RECUT
from verl_clipx.losses.base.tokens import LARGEST_LOG_RATIO, Inputs, prepare_tokens
from verl_clipx.run.config import Observe, clip_range
from verl_clipx.training.worker.layout import pad_rows, response_part
from verl_clipx.training.worker.observe import SEQUENCE_LEVEL
from verl_clipx.training.worker.policy_loss import decide
from verl_clipx.training.worker.rows import OLD_LOG_PROBS, hash_rows_with
from verl_clipx.training.worker.step import MeasuredFloor, OptimizerStep, inputs_of, micro_batch_of

# The keys of verl's data by which an engine divides a mini-batch into micro-batches.
IS_DYNAMIC = "use_dynamic_bsz"
TOKENS_A_GPU = "max_token_len_per_gpu"
ROWS_A_GPU = "micro_batch_size_per_gpu"


def measure_recut(
    actor: Any, engine: Any, data: Any, step: OptimizerStep, *, cut: dict[str, Any]
) -> MeasuredFloor | None:
    """Measure the floor by a pass over the mini-batch in smaller micro-batches.

    Args:
        actor: verl's ActorConfig.
        engine: verl's, which makes the pass.
        data: this rank's mini-batch, which is not changed.
        step: the planned step, whose bounds say what is clipped.
        cut: how the engine divides a mini-batch into micro-batches, by the keys of verl's data: the values of the keys
            that the data lack.

    Returns:
        This rank's sums. None where no other division fits into the memory of the first one; where the engine replays
        the routes of experts, which it keeps for each micro-batch; and on a rank of a pipeline that sees no loss.
    """
    if "routed_experts" in data:
        return None
    cut_of_data = {key: tu.get(data, key=key, default=value) for key, value in cut.items()}
    reversed_rows = reverse_in_smaller_micro_batches(data, cut_of_data)
    if reversed_rows is None:
        return None
    settings = actor.policy_loss.clipx
    needs_entropy = not isinstance(settings, Observe) and "entropy" in settings.method.asks_for
    sums: dict[str, Tensor] = {}
    bins: dict[str, Tensor] = {}
    log_probs: dict[int, Tensor] = {}

    def loss_function(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Add a micro-batch's sums and log-probabilities to the outer ones; return a loss of 0 and no metrics."""
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
                # A copy of the step without a list, so that this pass adds nothing to the statistics that it collects.
                _, decision = decide(settings, replace(step, collected=None), inputs)
                sums_of_loss = name_sums(token_loss(settings.method, settings.shaping, inputs, decision).sums)
                low = sums_of_loss["LN"]
                high = sums_of_loss["HP"]
            sums_of_floor = floor_sums(inputs, FLOOR_RECUT)
            sums_of_floor[FLOOR_RECUT.clip_fraction_low.key] = low
            sums_of_floor[FLOOR_RECUT.clip_fraction_high.key] = high
            _add(sums, sums_of_floor)
            _add(bins, floor_bins(inputs, FLOOR_RECUT))
        rows = zip(tensors["log_prob"].unbind(), mask.unbind(), strict=True)
        log_probs_of_rows = [log_prob[is_token] for log_prob, is_token in rows]
        log_probs.update(zip(hash_rows_with(data, OLD_LOG_PROBS, None), log_probs_of_rows, strict=True))
        return torch.zeros((), device=mask.device), {}

    tu.assign_non_tensor(reversed_rows, calculate_entropy=needs_entropy, distillation_use_topk=False)
    stays_loaded = tu.get(data, key="disable_auto_offload", default=False)
    with engine.eval_mode(disable_auto_offload=stays_loaded), torch.no_grad():
        engine.forward_backward_batch(reversed_rows, loss_function, forward_only=True)
    # A rank of a pipeline may see no loss.
    if not sums:
        return None
    return MeasuredFloor(*to_host(sums, bins), log_probs)


def reverse_in_smaller_micro_batches(data: Any, cut: dict[str, Any]) -> Any:
    """Copy a mini-batch in reverse order, with values of verl's keys that divide it into smaller micro-batches.

    Its micro-batches have at most half as many tokens as the largest of the training, but at least as many as the
    longest row, as verl asserts. Padded rows stay in micro-batches of equal numbers of rows, because by tokens they
    could take more memory than the training.

    Args:
        data: this rank's mini-batch, which is not changed.
        cut: how the engine divides it, by the keys of verl's data.

    Returns:
        The copy; None if a micro-batch of the training is one padded row, so that none can be smaller.
    """
    row_count = len(data)
    smaller_cut = dict(cut)
    if cut[IS_DYNAMIC] or cut["use_remove_padding"]:
        # Under Ulysses' sequence parallelism so many ranks share the tokens of each row.
        ranks_per_sequence = tu.get(data, key="sp_size", default=1)
        lengths = _lengths(data)
        if cut[IS_DYNAMIC]:
            largest_micro_batch = min(sum(lengths), cut[TOKENS_A_GPU] * ranks_per_sequence)
        else:
            rows = cut[ROWS_A_GPU]
            largest_micro_batch = max(sum(lengths[start : start + rows]) for start in range(0, row_count, rows))
        tokens = max(max(lengths), largest_micro_batch // 2)
        smaller_cut[IS_DYNAMIC] = True
        # Rounded up, so that all ranks together hold the longest row.
        smaller_cut[TOKENS_A_GPU] = math.ceil(tokens / ranks_per_sequence)
    else:
        rows = cut[ROWS_A_GPU]
        # A divisor of the training's number, so that all micro-batches have equal numbers of rows.
        smaller = [divisor for divisor in range(1, rows // 2 + 1) if rows % divisor == 0]
        if not smaller:
            return None
        smaller_cut[ROWS_A_GPU] = smaller[-1]
    reversed_rows = tu.index_select_tensor_dict(data, list(reversed(range(row_count))))
    tu.assign_non_tensor(reversed_rows, **smaller_cut)
    return reversed_rows


def _lengths(data: Any) -> list[int]:
    """Return the number of tokens of each row, prompt and response together, without padding."""
    prompts = data["prompts"]
    responses = data["responses"]
    if prompts.is_nested:
        return (prompts.offsets().diff() + responses.offsets().diff()).tolist()
    return data["attention_mask"].sum(1).tolist()


def _clipped_by_verl(inputs: Inputs, actor: Any) -> tuple[Tensor, Tensor]:
    """Return how many tokens verl's clip_ratio clips below and how many above, 0-d float64 tensors."""
    t = prepare_tokens(inputs, LARGEST_LOG_RATIO)
    bounded = compute_bounded(t, actor.policy_loss.loss_mode in SEQUENCE_LEVEL)
    sums = name_sums(token_sums(t, bounded, clip_range(actor), torch.zeros_like(t.ratio), None, None))
    return sums["LN"], sums["HP"]


def _add(totals: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add numbers to the totals of the same names, in place."""
    for name, number in more.items():
        if name in totals:
            totals[name] = totals[name] + number
        else:
            totals[name] = number
