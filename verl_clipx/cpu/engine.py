"""verl's FSDP engines on host memory: the policy's and the critic's."""

import copy

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

DEVICE = "cpu"


class OnHostMemory(FSDPEngine):
    """FSDP2 over gloo. FSDP1 cannot broadcast its initial state between CPU parameters, so it is refused."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        if engine_config.strategy != "fsdp2":
            raise ValueError(
                f"strategy={engine_config.strategy} cannot run on a CPU: set actor_rollout_ref.actor.strategy=fsdp2 "
                "(the reference model follows the actor) and, with a critic, critic.strategy=fsdp2"
            )
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

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
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = engine_config


class CPUFSDPEngineWithLMHead(OnHostMemory, FSDPEngineWithLMHead):
    """The policy's."""


class CPUFSDPEngineWithValueHead(OnHostMemory, FSDPEngineWithValueHead):
    """The critic's."""


ENGINES = {"language_model": CPUFSDPEngineWithLMHead, "value_model": CPUFSDPEngineWithValueHead}


def register() -> None:
    """Add the engines to verl's registry for device ``cpu``, under both FSDP backends."""
    for model_type, engine in ENGINES.items():
        registered = EngineRegistry._engines.get(model_type, {})
        backends = [name for name in ("fsdp", "fsdp2") if DEVICE not in registered.get(name, {})]
        EngineRegistry.register(model_type=model_type, backend=backends, device=DEVICE)(engine)
