"""Estimates tokens, optimizer steps and time of one trainer step, and the number of steps of a run."""

import math
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_clipx.common.files import parquet_file
from verl_clipx.methods import METHODS
from verl_clipx.papers.tables.cost.memory import Rollout
from verl_clipx.papers.tables.cost.run import Run
from verl_clipx.papers.tables.divisibility import needs_reference
from verl_clipx.papers.tables.presets import lopti_passes
from verl_clipx.run.config import AROUND


@dataclass(frozen=True)
class Work:
    """The work of one trainer step (one rollout batch).

    Args:
        prompt_tokens: prompt tokens of the rollout batch, counted once per response.
        response_tokens: response tokens of the rollout batch.
        observations: optimizer steps that are preceded by an extra forward pass for the statistics.
        scoring_seconds: time of the passes for old and reference log-probabilities.
        seconds: total time, including what the assumptions add.
    """

    prompt_tokens: float
    response_tokens: float
    updates: int
    observations: int
    generation_seconds: float
    scoring_seconds: float
    observation_seconds: float
    training_seconds: float
    seconds: float


def work_of(run: Run, rollout: Rollout) -> Work:
    """Estimate tokens, optimizer steps and time of one trainer step.

    A forward pass takes 2 operations per parameter and token plus those of attention, a backward pass twice as many,
    and gradient checkpointing adds one forward pass.
    """
    layout, model = run.layout, run.config.actor_rollout_ref.model
    passes = run.actor.ppo_epochs * lopti_passes(run.config)
    updates = layout.updates_per_epoch * passes
    observations = observed_updates(run, updates)

    forward = layout.rows * run.shape.forward_flops(run.mean_prompt + run.mean_response)
    speed = layout.gpus * run.gpu.flops * run.assumptions.compute_utilisation
    scoring = (0 if run.bypasses_old_log_prob else 1) + needs_reference(run.config)
    scoring_seconds = scoring * forward / speed
    observation_seconds = forward * passes * observations / updates / speed
    training_seconds = forward * passes * (4 if model.enable_gradient_checkpointing else 3) / speed
    generation_seconds = generation_seconds_of(run, rollout)
    known = generation_seconds + scoring_seconds + observation_seconds + training_seconds
    return Work(
        prompt_tokens=layout.rows * run.mean_prompt,
        response_tokens=layout.rows * run.mean_response,
        updates=updates,
        observations=observations,
        generation_seconds=generation_seconds,
        scoring_seconds=scoring_seconds,
        observation_seconds=observation_seconds,
        training_seconds=training_seconds,
        seconds=known * (1 + run.assumptions.other_share),
    )


def observed_updates(run: Run, updates: int) -> int:
    """Return how many of a rollout batch's optimizer steps are preceded by an extra forward pass for the statistics."""
    if OmegaConf.select(run.config, "clipx.select.over") == "mini_batch":
        return updates
    method = METHODS.get(OmegaConf.select(run.config, "clipx.method"))
    scope = OmegaConf.select(run.config, "clipx.scope", default=AROUND["scope"].default)
    if method is None or not method().statistics_size or scope != "mini_batch":
        return 0
    # The first update needs no extra pass if its ratio is 1 by definition.
    return updates if run.bypasses_old_log_prob else updates - 1


def generation_seconds_of(run: Run, rollout: Rollout) -> float:
    """Return the seconds to generate a rollout batch.

    A decoding step reads the weights and the cached tokens of every response in it. Responses follow one another in the
    slots of a replica, and the longest one continues alone when the others are done.
    """
    gpu, shape, layout, assumptions = run.gpu, run.shape, run.layout, run.assumptions
    split = run.rollout.tensor_model_parallel_size
    prompt, response = run.mean_prompt, run.mean_response
    cached = shape.key_value_bytes / min(split, shape.num_key_value_heads) * (prompt + response / 2)

    def step(concurrent: int) -> float:
        reading = (rollout.weights + concurrent * cached) / (gpu.bandwidth * assumptions.bandwidth_utilisation)
        computing = 2 * shape.matmul_parameters * concurrent / split / (gpu.flops * assumptions.compute_utilisation)
        return max(reading, computing) + assumptions.decode_step_seconds

    steps = math.ceil(layout.rows / layout.replicas / rollout.concurrent) * response
    tail = max(run.config.data.max_response_length - steps, 0)
    # Each prompt is computed once; its other responses find it in the cache.
    speed = layout.gpus * gpu.flops * assumptions.compute_utilisation
    prefill = run.config.data.train_batch_size * shape.forward_flops(prompt) / speed
    return prefill + steps * step(rollout.concurrent) + tail * step(1)


def steps_of(config: DictConfig, train_prompts: int | None = None) -> int | None:
    """Return the run's steps: trainer.total_training_steps, or whole batches of the training set times the epochs.

    Args:
        train_prompts: prompts in the training set; None counts them in data.train_files.

    Returns:
        The number of steps, or None if the files do not exist on this machine.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    if train_prompts is None:
        train_prompts = rows_of(config.data.train_files)
        if train_prompts is None:
            return None
        if config.data.get("train_max_samples", -1) > 0:
            train_prompts = min(train_prompts, config.data.train_max_samples)
    return train_prompts // config.data.train_batch_size * config.trainer.total_epochs


def rows_of(files: str | ListConfig | list[str]) -> int | None:
    """Return the number of rows in Parquet files, or None if a file is missing."""
    paths = [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files)]
    if not all(path.is_file() for path in paths):
        return None
    return sum(map(_rows_in, paths))


def _rows_in(path: Path) -> int:
    with parquet_file(path) as file:
        return file.metadata.num_rows
