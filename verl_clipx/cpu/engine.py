"""verl's FSDP engine on host memory."""

import copy

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

DEVICE = "cpu"
MODEL_TYPE = "language_model"


class CPUFSDPEngineWithLMHead(FSDPEngineWithLMHead):
    """FSDP2 over gloo. FSDP1 cannot broadcast its initial state between CPU parameters, so it is refused."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        if engine_config.strategy != "fsdp2":
            raise ValueError(
                f"actor_rollout_ref.actor.strategy={engine_config.strategy} cannot run on a CPU: "
                "set actor_rollout_ref.actor.strategy=fsdp2 (the reference model follows the actor)"
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


def register() -> None:
    """Add the engine to verl's registry for device ``cpu``, under both FSDP backends."""
    registered = EngineRegistry._engines.get(MODEL_TYPE, {})
    backends = [name for name in ("fsdp", "fsdp2") if DEVICE not in registered.get(name, {})]
    EngineRegistry.register(model_type=MODEL_TYPE, backend=backends, device=DEVICE)(CPUFSDPEngineWithLMHead)
