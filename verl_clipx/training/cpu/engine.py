"""verl's FSDP engines for policy and critic, on a CPU."""

import copy
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import _init_utils
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from verl.utils import fsdp_utils
from verl.utils import model as verl_models
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

DEVICE = "cpu"

# verl's own, which `copied_shards` takes the place of.
SHARDS_TO_CPU = fsdp_utils.fsdp2_sharded_save_to_cpu


class OnHostMemory(FSDPEngine):
    """Mixin for verl's engines: FSDP2 or FSDP1 over gloo, with the weights in host memory."""

    def _build_fsdp_module(self, module):
        """Wrap a model by FSDP as verl does, but without offloading, which only an accelerator can do.

        verl offloads a forward-only model, such as the reference's, by CPUOffloadPolicy(pin_memory=True). On a CPU
        there is nothing to offload from, and pinning memory needs an accelerator. Therefore verl reads a copy of the
        configuration meanwhile, in which every model trains, as the actor does, and nothing is offloaded.
        """
        engine_config = self.engine_config
        without_offload = copy.copy(engine_config)
        # verl's configuration dataclasses refuse plain assignment.
        object.__setattr__(without_offload, "forward_only", False)
        object.__setattr__(without_offload, "offload_policy", False)
        self.engine_config = without_offload
        try:
            with allow_broadcast_in_host_memory():
                return super()._build_fsdp_module(module)
        finally:
            self.engine_config = engine_config


def allow_broadcast_in_host_memory() -> AbstractContextManager[Any]:
    """Return a context in which torch lets FSDP1 broadcast a model's initial weights although they are on the CPU.

    verl asks FSDP1 for that broadcast (sync_module_states). torch raises an error unless the weights are on an
    accelerator, because NCCL, the usual backend, could not send them. gloo can.
    """
    return patch.object(_init_utils, "_check_module_states_for_sync_module_states", accept_any_states)


def accept_any_states(states: list[torch.Tensor]) -> None:
    """Stand in the place of torch's check of where the parameters and buffers are."""


class CPUFSDPEngineWithLMHead(OnHostMemory, FSDPEngineWithLMHead):
    """The policy's engine."""


class CPUFSDPEngineWithValueHead(OnHostMemory, FSDPEngineWithValueHead):
    """The critic's engine."""


ENGINES = {"language_model": CPUFSDPEngineWithLMHead, "value_model": CPUFSDPEngineWithValueHead}


def load_critic(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """Load the critic, in the place of verl's load_valuehead_model, which always demands flash attention.

    Args:
        local_path: the model's folder.
        torch_dtype: of its weights.
        model_config: the model's, which names the attention.
        trust_remote_code: whether code of the model's folder may be run.
    """
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def copied_shards(model: torch.nn.Module) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any]:
    """Copy a model's shards, in the place of verl's fsdp2_sharded_save_to_cpu.

    verl's own does not copy weights that are already on the CPU. Trainers that generate separately use it to save the
    weights with which old_log_probs are recomputed. Without a copy these would be the weights being updated, and every
    ratio would be 1.

    Returns:
        What verl's own returns: by name, each shard and how it is sharded; and how the first one is.
    """
    shards, first_sharding = SHARDS_TO_CPU(model)
    copies = {name: (shard.clone(), sharding) for name, (shard, sharding) in shards.items()}
    return copies, first_sharding


def load_nothing(model: torch.nn.Module) -> None:
    """Leave the weights where they are, in the place of verl's load_fsdp_model_to_gpu.

    verl's own names the device of FSDP1's weights by an index, which a CPU does not have.
    """


def register() -> None:
    """Register the engines for device ``cpu`` under both FSDP backends, and patch what they need in verl."""
    verl_models.load_valuehead_model = load_critic
    transformer_impl.load_fsdp_model_to_gpu = load_nothing
    fsdp_utils.fsdp2_sharded_save_to_cpu = copied_shards
    for model_type, engine in ENGINES.items():
        registered = EngineRegistry._engines.get(model_type, {})
        # verl refuses to register an engine twice, and may have one for a CPU of its own.
        backends = [name for name in ("fsdp", "fsdp2") if DEVICE not in registered.get(name, {})]
        EngineRegistry.register(model_type=model_type, backend=backends, device=DEVICE)(engine)
