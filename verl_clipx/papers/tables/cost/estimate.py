"""The complete estimate of a run, or the reason why it does not fit."""

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_clipx.papers.tables.cost.assumptions import GIB, GPU, Assumptions
from verl_clipx.papers.tables.cost.memory import Phase, Rollout, host_bytes, memory_phases, rollout_of
from verl_clipx.papers.tables.cost.run import Run
from verl_clipx.papers.tables.cost.work import Work, steps_of, work_of
from verl_clipx.papers.tables.divisibility import ROLLOUT, ConfigurationError


@dataclass(frozen=True)
class Estimate:
    """A run's estimate.

    Args:
        limit: bytes that a phase may use.
        host_bytes: host memory per node for offloaded tensors, and for a whole copy of the model while loading.
        steps: training steps of the run, or None if the number of prompts is unknown.
    """

    run: Run
    phases: tuple[Phase, ...]
    limit: float
    host_bytes: float
    rollout: Rollout
    work: Work
    steps: int | None

    @property
    def gpu_hours_per_step(self) -> float:
        """GPU-hours of one step."""
        return self.run.layout.gpus * self.work.seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of the run, or None if its number of steps is unknown."""
        return None if self.steps is None else self.steps * self.gpu_hours_per_step


def estimate(
    config: DictConfig, gpu: GPU, assumptions: Assumptions | None = None, train_prompts: int | None = None
) -> Estimate:
    """Estimates a run, or refuses it.

    Args:
        train_prompts: prompts in the training set; None counts them in data.train_files if those exist.

    Raises:
        ConfigurationError: batches do not divide, or a phase does not fit; the message names the key and a fix.
        ValueError: the model's shape is unknown.
    """
    run = Run(config, gpu, assumptions or Assumptions())
    limit = gpu.memory * (1 - run.assumptions.allocator_share)
    rollout = rollout_of(run)
    phases = memory_phases(run, rollout)
    for phase in phases:
        if phase.total > limit:
            raise ConfigurationError(
                phase.key, OmegaConf.select(config, phase.key), too_much(phase, limit, gpu), phase.fix
            )
    if rollout.full_length_sequences < 1:
        raise ConfigurationError(
            f"{ROLLOUT}.gpu_memory_utilization",
            run.rollout.gpu_memory_utilization,
            f"leaves {rollout.cache / GIB:.1f} GiB a GPU for the KV cache, which holds {max(rollout.cached_tokens, 0)} "
            f"tokens; the longest sequence has {run.layout.longest}",
            f"Raise it, or {ROLLOUT}.tensor_model_parallel_size.",
        )
    work, steps = work_of(run, rollout), steps_of(config, train_prompts)
    return Estimate(run, phases, limit, host_bytes(run), rollout, work, steps)


def too_much(phase: Phase, limit: float, gpu: GPU) -> str:
    """Explain why a phase does not fit, with its largest parts.

    Args:
        limit: bytes that the phase may use.
    """
    largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return (
        f"{phase.name} needs {phase.total / GIB:.1f} GiB a GPU of the {limit / GIB:.1f} that a {gpu.name} offers "
        f"({parts})"
    )
