"""Estimates what a run takes by textbook formulas: memory of weights, gradients and optimizer, operations, GPU-hours.

These are formulas, not measurements. Whatever neither the configuration nor the model's size determines is a field
of `Assumptions`, which is printed with every estimate.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf

from verl_clipx.common.files import parquet_file
from verl_clipx.methods import METHODS
from verl_clipx.papers.tables.presets import lopti_passes, updates_per_rollout
from verl_clipx.run.config import AROUND

PEAK = {"a100": 312e12, "h100": 989e12}
"""Dense bfloat16 operations a second by the data sheet, by the first part of the name of a hardware group."""

TRAINING_ROWS = {
    "countdown_3to4": 327_680,
    "dapo_17k": 17_000,
    "dsr_uniform": 10_000,
    "hitab": 7_417,
    "knights_and_knaves": 4_500,
    "orz_57k": 57_000,
}
"""Training rows of the presets' data sets, by folder; dapo_17k and orz_57k have about as many as their names say."""

BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}


def _assumption(default: float, meaning: str) -> float:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Assumptions:
    """Every number that neither the configuration nor the model determines."""

    mean_prompt_share: float = _assumption(0.5, "mean prompt, as a share of data.max_prompt_length")
    mean_response_share: float = _assumption(0.5, "mean response, as a share of data.max_response_length")
    training_utilisation: float = _assumption(
        0.35, "share of the GPU's peak in training and in scoring log-probabilities"
    )
    generation_utilisation: float = _assumption(0.1, "share of the GPU's peak in generation, which memory limits")
    other_share: float = _assumption(
        0.15, "share added for rewards, transfers and the driver; validation is not counted"
    )


@dataclass(frozen=True)
class Forecast:
    """What a run takes.

    Args:
        parameters: of the model.
        gpus: on all nodes together.
        memory: bytes on a GPU, by what they hold.
        tokens: prompt and response tokens of a rollout batch.
        updates: optimizer steps of a rollout batch.
        observations: those of them with an extra forward pass for the statistics.
        hours: GPU-hours of a rollout batch, by phase.
        steps: rollout batches of the run; None if the number of training rows is unknown.
    """

    parameters: float
    gpus: int
    memory: dict[str, float]
    tokens: float
    updates: int
    observations: int
    hours: dict[str, float]
    steps: int | None


def estimate(config: DictConfig, peak: float, assumed: Assumptions) -> Forecast:
    """Estimate a run from its composed configuration.

    A token takes 2 operations a parameter in a forward pass and 4 in a backward pass; gradient checkpointing adds a
    forward pass. Attention's own operations are left out.

    Args:
        peak: operations a second of a GPU.

    Raises:
        ValueError: the model's size is unknown.
    """
    model, actor, rollout = (config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    parameters = parameters_of(model.path)
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    size = actor.fsdp_config.fsdp_size
    share = parameters * BYTES.get(actor.fsdp_config.model_dtype, 4) / (size if 0 < size < gpus else gpus)
    tokens = (
        config.data.train_batch_size
        * rollout.n
        * (
            config.data.max_prompt_length * assumed.mean_prompt_share
            + config.data.max_response_length * assumed.mean_response_share
        )
    )
    bypass = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
    updates = updates_per_rollout(config)
    observations = observed_updates(config, updates, bypass)
    passes = (actor.get("ppo_epochs") or 1) * lopti_passes(config)
    scored = (0 if bypass else 1) + bool(actor.use_kl_loss or config.algorithm.use_kl_in_reward)
    forward = 2 * parameters * tokens / peak / 3600
    training = forward / assumed.training_utilisation
    hours = {
        "generation": forward / assumed.generation_utilisation,
        "log-probabilities": scored * training,
        "statistics": passes * observations / updates * training,
        "update": passes * (4 if model.enable_gradient_checkpointing else 3) * training,
    }
    hours["other"] = assumed.other_share * sum(hours.values())
    memory = {
        "weights": share,
        "gradients": share,
        "Adam's states": 2 * share,
        "the rollout's weights": 2 * parameters / rollout.tensor_model_parallel_size,
    }
    return Forecast(parameters, gpus, memory, tokens, updates, observations, hours, steps_of(config))


def observed_updates(config: DictConfig, updates: int, bypass: bool) -> int:
    """Return how many of a rollout batch's updates make an extra forward pass for the statistics.

    Args:
        updates: of a rollout batch.
        bypass: whether the ratio is to the rollout's own log-probabilities.
    """
    method = METHODS.get(OmegaConf.select(config, "clipx.method"))
    scope = OmegaConf.select(config, "clipx.scope", default=AROUND["scope"].default)
    adapts = method is not None and method().statistics_size and scope == "mini_batch"
    # Of one update the ratio is 1, so that clipping cannot act.
    adapts = adapts and (updates > 1 or bypass)
    return updates if adapts or OmegaConf.select(config, "clipx.select.over") == "mini_batch" else 0


def parameters_of(model: str) -> float:
    """Return a model's number of parameters. Nothing is downloaded.

    Args:
        model: a folder, whose config.json is read, or a name with the size in it. Names round: Qwen2.5-7B has 7.6B.

    Raises:
        ValueError: neither says the size.
    """
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return float(sum(parameter.numel() for parameter in built.parameters()))
    size = re.search(r"(\d+(?:\.\d+)?)b(?![a-z])", model.rstrip("/").rpartition("/")[2].lower())
    if size is None:
        raise ValueError(
            f"actor_rollout_ref.model.path={model}: its size is unknown. Name a folder with a config.json."
        )
    return float(size[1]) * 1e9


def steps_of(config: DictConfig, known: Mapping[str, int] = TRAINING_ROWS) -> int | None:
    """Return a run's steps: trainer.total_training_steps, or whole batches of the training rows times the epochs.

    Args:
        known: rows of files that are not on this machine, by folder.

    Returns:
        The number of steps, or None if the number of rows is unknown.
    """
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    named: str | ListConfig | list[str] = config.data.train_files
    counts = [_rows_in(Path(name).expanduser(), known) for name in ([named] if isinstance(named, str) else named)]
    if None in counts:
        return None
    rows, most = sum(counts), config.data.get("train_max_samples", -1)
    rows = min(rows, most) if most > 0 else rows
    return rows // config.data.train_batch_size * config.trainer.total_epochs


def _rows_in(path: Path, known: Mapping[str, int]) -> int | None:
    if not path.is_file():
        return known.get(path.parent.name)
    with parquet_file(path) as file:
        return file.metadata.num_rows
