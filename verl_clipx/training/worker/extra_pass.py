"""The extra pass, without gradient, that sees the whole mini-batch before its update.

It runs through verl's own engine on a copy of the mini-batch, in evaluation mode as for old_log_probs. Dynamic batch
sizes, sequence parallelism, packing and fused kernels are therefore those of the training pass.
"""

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.modifiers.entropy_selection import ENTROPY_BUCKETS, entropy_statistics
from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.keys import (
    ATTENTION,
    ATTENTION_DROPOUT,
    SEQUENCE_PARALLEL,
    WRONG_ATTENTION,
    has_sequence_parallel_attention,
)
from verl_clipx.training.worker.layout import pad_rows, response_part
from verl_clipx.training.worker.rejection import rejection_of
from verl_clipx.training.worker.step import OptimizerStep, inputs_of, micro_batch_of


def extra_pass(
    policy_loss: Any,
    engine: Any,
    data: Any,
    step: OptimizerStep,
    seen: list[Inputs],
    *,
    cut: dict[str, Any],
    device: str,
) -> dict[str, Tensor]:
    """Sum over this rank's mini-batch, under the current weights, what its optimizer step needs.

    Args:
        policy_loss: verl's policy-loss node with the clipx node and the run.
        engine: verl's, which makes the pass.
        data: this rank's mini-batch, which is not changed.
        step: the next optimizer step. Only the tokens of its pass count in the statistics behind the bounds.
        seen: gets the tokens of each micro-batch, if the method's statistics have a second stage.
        cut: how the engine divides a mini-batch into micro-batches, by the keys of verl's data: the values of the keys
            that the data lack.
        device: where the sums are made.

    Returns:
        This rank's sums by name, float64. Only the first one includes tokens that the loss will reject.
        "counted": the number of tokens that count, (1,).
        "statistics": (statistics_size,), if the bounds are decided from the mini-batch.
        "entropies": the histogram of the tokens' entropies, (ENTROPY_BUCKETS,), if selection is over the mini-batch.
        "selected": the number of tokens that are kept, (1,), if selection is within each sequence.
    """
    settings = policy_loss.clipx
    rejection = rejection_of(policy_loss)
    method = settings.method
    select = settings.select
    needs_entropy = settings.selects_over_mini_batch or "entropy" in method.asks_for
    sizes = {"counted": 1}
    if step.decided_from is DecidedFrom.MINI_BATCH:
        sizes["statistics"] = method.statistics_size
    if settings.selects_over_mini_batch:
        sizes["entropies"] = ENTROPY_BUCKETS
    elif select is not None:
        sizes["selected"] = 1
    sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    def loss_function(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Add a micro-batch to the sums; called by verl's engine in the place of a loss, it returns 0."""
        whole = pad_rows(data["response_mask"]).bool()
        log_prob = response_part(model_output["log_probs"], data, whole.shape[1])
        old_log_prob = pad_rows(data["old_log_probs"])
        advantages = pad_rows(data["advantages"])
        mask = rejection.remaining(whole, log_prob, old_log_prob)
        micro_batch = micro_batch_of(settings, step, data, model_output)
        counted = whole if micro_batch.counted is None else micro_batch.counted
        sums["counted"].add_(counted.sum(dtype=torch.float64))
        if "statistics" in sums:
            inputs = inputs_of(
                settings, micro_batch, log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, mask=mask
            )
            statistics = settings.functions(mask.device).statistics(inputs)
            sums["statistics"].add_(statistics[: method.statistics_size])
            if method.second_statistics_size:
                seen.append(inputs)
        if "entropies" in sums:
            sums["entropies"].add_(entropy_statistics(micro_batch.entropy, mask))
        if "selected" in sums:
            sums["selected"].add_(select.kept_counts(mask).sum(dtype=torch.float64))
        return torch.zeros((), device=mask.device), {}

    copy = data.copy()
    tu.assign_non_tensor(copy, **{key: value for key, value in cut.items() if key not in copy})
    tu.assign_non_tensor(copy, calculate_entropy=needs_entropy, distillation_use_topk=False)
    stays_loaded = tu.get(data, key="disable_auto_offload", default=False)
    with engine.eval_mode(disable_auto_offload=stays_loaded), torch.no_grad():
        engine.forward_backward_batch(copy, loss_function, forward_only=True)
    return sums


def refuse_attention_on_a_slice(engine: Any) -> None:
    """Raise RuntimeError if ranks share sequences and the model's attention does not support it.

    Args:
        engine: verl's.
    """
    ranks_per_sequence = getattr(engine, "ulysses_sequence_parallel_size", 1)
    strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
    # The engine fsdp_turbo divides sequences by its own patch of the model, under which the attention is called eager.
    if ranks_per_sequence <= 1 or strategy == "fsdp_turbo":
        return
    for model in as_list(engine.module):
        config = getattr(model, "config", None)
        # The attention of a model that also sees images is that of its text.
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        attention = getattr(config, "_attn_implementation", None)
        if not has_sequence_parallel_attention(attention):
            raise RuntimeError(
                f"{ranks_per_sequence} ranks share a sequence (ulysses_sequence_parallel_size) and the model's "
                f"attention is {attention}: {WRONG_ATTENTION}. Set {ATTENTION}=flash_attention_2, or "
                f"{SEQUENCE_PARALLEL[0]}=1."
            )


def refuse_dropout(modules: Any) -> None:
    """Raise ValueError if a model has dropout, with which the extra pass would see other ratios than the training.

    Args:
        modules: an engine's module or modules.
    """
    # By the name of a module, or of a key of a model's configuration.
    probabilities: dict[str, Any] = {}
    for model in as_list(modules):
        config = getattr(model, "config", None)
        settings = config.to_dict() if hasattr(config, "to_dict") else {}
        for key, value in settings.items():
            if "dropout" in key or key.endswith("pdrop"):
                probabilities[key] = value
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                probabilities[name] = module.p
    above_0 = [f"{name}={p:g}" for name, p in probabilities.items() if isinstance(p, int | float) and p > 0]
    if above_0:
        raise ValueError(
            f"the model has dropout: {', '.join(above_0[:5])}. The extra pass behind bounds over "
            "the mini-batch runs without it and would not match the training pass. Switch it off (for example "
            f"+{ATTENTION_DROPOUT}=0), or use clipx.scope=lagged or micro_batch."
        )


def as_list(modules: Any) -> list[Any]:
    """Return the modules of an engine, which is one module or a list of them, as a list."""
    return list(modules) if isinstance(modules, list | tuple) else [modules]
