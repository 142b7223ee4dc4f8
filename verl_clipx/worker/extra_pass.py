"""The extra pass, without gradient, that sees the whole mini-batch before its update.

It runs through verl's own engine on a copy of the mini-batch, in evaluation mode as for old_log_probs. Dynamic batch
sizes, sequence parallelism, packing and fused kernels are therefore those of the training pass.
"""

import math
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_clipx.base.method import NODE
from verl_clipx.base.tokens import Inputs
from verl_clipx.driver.config import Settings
from verl_clipx.driver.support import ATTENTION, WRONG_ATTENTION, has_sequence_parallel_attention
from verl_clipx.loss.compiled import TokenFunctions
from verl_clipx.modifiers.entropy_selection import ENTROPY_BUCKETS, entropy_statistics
from verl_clipx.worker.layout import padded, response_part
from verl_clipx.worker.planner import MiniBatchStatistics
from verl_clipx.worker.policy_loss import inputs_of
from verl_clipx.worker.rejection import NOTHING_REJECTED, Rejection
from verl_clipx.worker.sampling import GROUP, GROUPS, Sample, by_group
from verl_clipx.worker.step import OptimizerStep, micro_batch_of

# The key of verl's engine for its number of pipeline stages.
PIPELINE = "pipeline_model_parallel_size"


def extra_pass(
    settings: Settings,
    engine: Any,
    data: Any,
    step: OptimizerStep,
    *,
    cut: dict[str, Any],
    device: str,
    rejection: Rejection = NOTHING_REJECTED,
) -> MiniBatchStatistics:
    """Computes the statistics of this rank's mini-batch under the current weights; changes neither data nor engine.

    Args:
        engine: verl's engine.
        data: this rank's mini-batch.
        step: the next optimizer step. Only the tokens of its pass count in the statistics behind the bounds. If it has
            a sample, only the sample's sequences are passed, and their statistics are summed by group.
        cut: how the engine cuts a mini-batch into micro-batches, for the keys that the data lack.
        device: where the statistics are summed.
        rejection: what the loss will reject; rejected tokens do not count.

    Raises:
        ValueError: the method needs a field that the mini-batch lacks.
    """
    method = settings.method
    over_mini_batch = settings.select is not None and settings.select.over == "mini_batch"
    needs_entropy = over_mini_batch or "entropy" in method.asks_for
    size = (method.statistics_size,) if step.sample is None else (GROUPS, method.statistics_size)
    statistics = torch.zeros(size, dtype=torch.float64, device=device)
    entropies = torch.zeros(ENTROPY_BUCKETS if over_mini_batch else 0, dtype=torch.float64, device=device)
    selected = torch.zeros(1, dtype=torch.float64, device=device)

    def loss_function(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        whole = padded(data["response_mask"]).bool()
        log_prob = response_part(model_output["log_probs"], data, whole.shape[1])
        old_log_prob = padded(data["old_log_probs"])
        mask = rejection.remaining(whole, log_prob, old_log_prob)
        known = micro_batch_of(settings, data, step)
        if needs_entropy:
            known.entropy = response_part(model_output["entropy"], data, mask.shape[1])
        if method.statistics_size:
            inputs = inputs_of(
                settings,
                known,
                log_prob=log_prob,
                old_log_prob=old_log_prob,
                advantages=padded(data["advantages"]),
                mask=mask,
            )
            functions = settings.functions(mask.device)
            if step.sample is None:
                statistics.add_(functions.statistics(inputs))
            else:
                statistics.add_(by_group(of_each_sequence(functions, inputs), data[GROUP].to(mask.device)))
        if over_mini_batch:
            entropies.add_(entropy_statistics(known.entropy, mask))
        elif settings.select is not None:
            selected.add_(settings.select.counts(mask).sum(dtype=torch.float64))
        return torch.zeros((), device=mask.device), {}

    copy = data.copy()
    tu.assign_non_tensor(copy, **{key: value for key, value in cut.items() if key not in copy})
    if step.sample is not None:
        copy = sampled(copy, step.sample)
    tu.assign_non_tensor(copy, calculate_entropy=needs_entropy, distillation_use_topk=False)
    offload = tu.get(data, key="disable_auto_offload", default=False)
    with engine.eval_mode(disable_auto_offload=offload), torch.no_grad():
        engine.forward_backward_batch(copy, loss_function, forward_only=True)
    return MiniBatchStatistics(statistics, entropies, selected)


def of_each_sequence(functions: TokenFunctions, inputs: Inputs) -> Tensor:
    """The statistics of each sequence of a micro-batch, (sequences, statistics_size)."""
    rows = range(len(inputs.mask))
    alone = [Inputs(*(None if one is None else one[row : row + 1] for one in inputs)) for row in rows]
    return torch.stack([functions.statistics(sequence) for sequence in alone])


def sampled(data: Any, sample: Sample) -> Any:
    """The sample's part of a mini-batch, with each sequence's group, in a size that the engine can cut.

    Args:
        data: verl's mini-batch, which says how it is cut. It is changed: it may get another micro-batch size and, if
            the sample takes all sequences, the groups.
        sample: from `sampling.drawn`.
    """
    rows, group = sample.rows, sample.group
    if not tu.get(data, key="use_dynamic_bsz", default=True):
        # verl needs micro-batches of equal size. Their number stays the smallest possible; sequences that fill the last
        # one up are repeated and belong to no group, so that they do not count.
        count = math.ceil(len(rows) / tu.get(data, key="micro_batch_size_per_gpu"))
        size = math.ceil(len(rows) / count)
        missing = count * size - len(rows)
        rows, group = torch.cat([rows, rows[:1].expand(missing)]), torch.cat([group, group.new_full((missing,), -1)])
        tu.assign_non_tensor(data, micro_batch_size_per_gpu=size)
    if len(rows) < sample.sequences:
        data = tu.index_select_tensor_dict(data, rows)
    data[GROUP] = group
    return data


def refuse_sample_of_stages(settings: Settings, engine_config: Any) -> None:
    """Raises if pipeline stages would have to agree on a sample that only the last stage can choose.

    Args:
        engine_config: verl's configuration of the actor's engine.

    Raises:
        ValueError: names the keys and what to do.
    """
    stages = getattr(engine_config, PIPELINE, 1)
    if settings.precision and stages > 1:
        raise ValueError(
            f"{NODE}.precision={settings.precision:g} with {PIPELINE}={stages}: only the last stage knows how many "
            f"sequences suffice, but all stages must pass the same ones. Set {NODE}.precision=0, or {PIPELINE}=1."
        )


def refuse_attention_on_a_slice(engine: Any) -> None:
    """Raises if ranks share sequences and the model's attention does not support it.

    Args:
        engine: verl's engine, with its model.

    Raises:
        RuntimeError: names the attention and what to do.
    """
    size = getattr(engine, "ulysses_sequence_parallel_size", 1)
    if getattr(getattr(engine, "engine_config", None), "strategy", None) == "fsdp_turbo":
        # This engine cuts sequences by its own patch of the model, under which the attention is called eager.
        return
    for model in engine.module if isinstance(engine.module, list | tuple) else [engine.module]:
        config = getattr(model, "config", None)
        text = getattr(config, "get_text_config", lambda config=config: config)()
        name = getattr(text, "_attn_implementation", None)
        if size > 1 and not has_sequence_parallel_attention(name):
            raise RuntimeError(
                f"{size} ranks share a sequence (ulysses_sequence_parallel_size) and the model's attention is {name}: "
                f"{WRONG_ATTENTION}. Set {ATTENTION}=flash_attention_2, or "
                "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1."
            )


def refuse_dropout(modules: Any) -> None:
    """Raises if a model has dropout, with which the extra pass would see other ratios than the training pass.

    Args:
        modules: the engine's model, or a list of its parts.

    Raises:
        ValueError: names the modules and what to do.
    """
    found = []
    for model in modules if isinstance(modules, list | tuple) else [modules]:
        found += [
            f"{name} (p={module.p:g})"
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
        ]
        settings = getattr(getattr(model, "config", None), "to_dict", dict)()
        found += [
            f"{key}={value:g}"
            for key, value in settings.items()
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, int | float) and value > 0
        ]
    if found:
        raise ValueError(
            f"the model has dropout: {', '.join(found[:5])}. The extra pass behind bounds over "
            "the mini-batch runs without it and would not match the training pass. Switch it off (for example "
            "+actor_rollout_ref.model.override_config.attention_dropout=0), or use clipx.scope=lagged or micro_batch."
        )
