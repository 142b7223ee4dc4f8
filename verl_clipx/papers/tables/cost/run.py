"""A run on a given GPU model, with the values that an estimate reads from its configuration."""

from dataclasses import dataclass
from functools import cached_property

from omegaconf import DictConfig, OmegaConf

from verl_clipx.papers.tables.cost.assumptions import GPU, Assumptions
from verl_clipx.papers.tables.divisibility import Layout, layout_of
from verl_clipx.papers.tables.models import ModelShape, shape_of


def model_bytes(dtype: str) -> int:
    """Return the bytes per parameter in the dtype in which verl's engine stores it."""
    from verl.utils.torch_dtypes import PrecisionType

    return PrecisionType.to_dtype(dtype).itemsize


@dataclass(frozen=True)
class Run:
    """A run on a given GPU model."""

    config: DictConfig
    gpu: GPU
    assumptions: Assumptions

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return shape_of(self.config.actor_rollout_ref.model.path)

    @cached_property
    def layout(self) -> Layout:
        """How the run is divided over its GPUs."""
        return layout_of(self.config, self.shape)

    @property
    def actor(self) -> DictConfig:
        """The actor's settings."""
        return self.config.actor_rollout_ref.actor

    @property
    def engine(self) -> DictConfig:
        """The settings of the actor's FSDP engine."""
        return self.actor.fsdp_config

    @property
    def rollout(self) -> DictConfig:
        """The rollout's settings."""
        return self.config.actor_rollout_ref.rollout

    @property
    def parameter_bytes(self) -> float:
        """Bytes of parameters that one GPU stores; 0 if FSDP2 keeps them all on the host."""
        if self.engine.offload_policy and self.actor.strategy == "fsdp2":
            return 0
        return self.shape.parameters * model_bytes(self.engine.model_dtype) / self.layout.shards

    @property
    def computes_entropy_in_training(self) -> bool:
        """Whether the update computes each token's entropy, decided as in verl's trainers."""
        selects = OmegaConf.select(self.config, "clipx.select")
        return bool(self.actor.calculate_entropy or self.actor.entropy_coeff or selects)

    @property
    def bypasses_old_log_prob(self) -> bool:
        """Whether the rollout's log-probabilities serve as the old policy's."""
        return bool((self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))

    @property
    def mean_prompt(self) -> int:
        """Mean prompt length in tokens."""
        return max(round(self.config.data.max_prompt_length * self.assumptions.mean_prompt_share), 1)

    @property
    def mean_response(self) -> int:
        """Mean response length in tokens."""
        return max(round(self.config.data.max_response_length * self.assumptions.mean_response_share), 1)
