"""verl's FSDP engines for policy and critic, in host memory."""

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
SHARDS_TO_CPU = fsdp_utils.fsdp2_sharded_save_to_cpu


class OnHostMemory(FSDPEngine):
    """FSDP2 or FSDP1 over gloo."""

    def _build_fsdp_module(self, module):
        # verl gives a forward-only (reference) model CPUOffloadPolicy(pin_memory=True): there is no device to offload
        # from, and pinning needs an accelerator. While the module is wrapped, it is built like the actor's.
        engine_config = self.engine_config
        resident = copy.copy(engine_config)
        # verl's configuration dataclasses refuse plain assignment.
        object.__setattr__(resident, "forward_only", False)
        object.__setattr__(resident, "offload_policy", False)
        self.engine_config = resident
        try:
            with states_may_be_on_cpu():
                return super()._build_fsdp_module(module)
        finally:
            self.engine_config = engine_config


def states_may_be_on_cpu() -> AbstractContextManager[Any]:
    """Returns a context in which FSDP1 broadcasts its initial state between parameters in host memory.

    verl demands the broadcast, gloo can do it, and torch refuses it because NCCL could not.
    """
    return patch.object(_init_utils, "_check_module_states_for_sync_module_states", lambda states: None)


class CPUFSDPEngineWithLMHead(OnHostMemory, FSDPEngineWithLMHead):
    """The policy's engine."""


class CPUFSDPEngineWithValueHead(OnHostMemory, FSDPEngineWithValueHead):
    """The critic's engine."""


ENGINES = {"language_model": CPUFSDPEngineWithLMHead, "value_model": CPUFSDPEngineWithValueHead}


def load_critic(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedModel:
    """Load the critic with the configured attention; verl's own loader always demands flash attention."""
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def copied_shards(model: torch.nn.Module) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any]:
    """Replace verl's fsdp2_sharded_save_to_cpu, which does not copy weights that are already on the CPU.

    Trainers that generate separately use it to save the weights with which old_log_probs are recomputed. Without a copy
    these would be the weights being updated, and every ratio would be 1.
    """
    shards, layout = SHARDS_TO_CPU(model)
    return {name: (shard.clone(), own) for name, (shard, own) in shards.items()}, layout


def load_nothing(model: torch.nn.Module) -> None:
    """Replace verl's load_fsdp_model_to_gpu: the weights are where they are needed.

    verl's own names the device of FSDP1's weights by an index, which a CPU does not have.
    """


def register() -> None:
    """Register the engines for device ``cpu`` under both FSDP backends, and patch what they need in verl."""
    verl_models.load_valuehead_model = load_critic
    transformer_impl.load_fsdp_model_to_gpu = load_nothing
    fsdp_utils.fsdp2_sharded_save_to_cpu = copied_shards
    for model_type, engine in ENGINES.items():
        registered = EngineRegistry._engines.get(model_type, {})
        backends = [name for name in ("fsdp", "fsdp2") if DEVICE not in registered.get(name, {})]
        EngineRegistry.register(model_type=model_type, backend=backends, device=DEVICE)(engine)
