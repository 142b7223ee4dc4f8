"""What a run takes: memory per GPU in each phase, tokens, optimizer steps, and roughly how long.

The memory of a phase is a sum of named parts, each of which follows from the model's shape and the configuration; what
does not is an assumption, a named number that is printed with every result. verl is FSDP with a colocated vLLM here.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl_clipx.reproduction.divisibility import ACTOR, ROLLOUT, ConfigurationError, Layout, layout_of, needs_reference
from verl_clipx.reproduction.models import ModelShape, shape_of

GIB = 2**30
# Bytes of a bfloat16 number: logits, activations, the rollout's weights and its KV cache.
HALF = 2
# Bytes of a float32 number.
FULL = 4


@dataclass(frozen=True)
class GPU:
    """A kind of GPU, by its data sheet.

    Args:
        name: as on the data sheet.
        memory: bytes that a process can use.
        flops: dense bfloat16 operations a second.
        bandwidth: bytes a second from its memory.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float


A100 = GPU("A100-SXM4-80GB", 79.1 * GIB, 312e12, 2.04e12)
H100 = GPU("H100-SXM5-80GB", 79.1 * GIB, 989e12, 3.35e12)
# By the first part of a Hydra group's name, +hardware=a100x8.
GPUS = {"a100": A100, "h100": H100}


def _assumption(default: float, meaning: str) -> float:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Assumptions:
    """Every number that neither the configuration nor the model fixes. None of them was measured on a GPU here."""

    process_gib: float = _assumption(1.5, "GiB a GPU of the training process: CUDA context, NCCL, library workspaces")
    server_gib: float = _assumption(
        2.5, "GiB a GPU of the rollout server outside its share, awake or asleep: CUDA context, NCCL, CUDA graphs"
    )
    allocator_share: float = _assumption(0.05, "share of the GPU's memory that fragmentation makes unusable")
    gathered_layers: int = _assumption(3, "layers whose parameters FSDP holds whole at a time: in use, next, arriving")
    compute_utilisation: float = _assumption(0.35, "share of the data sheet's operations a second in training, prefill")
    bandwidth_utilisation: float = _assumption(0.5, "share of the data sheet's memory bandwidth while decoding")
    decode_step_seconds: float = _assumption(0.006, "seconds that a decoding step takes besides reading memory")
    mean_prompt_share: float = _assumption(0.5, "mean prompt, as a share of data.max_prompt_length")
    mean_response_share: float = _assumption(
        0.5, "mean response, as a share of data.max_response_length; one response of a batch reaches the limit"
    )
    other_share: float = _assumption(
        0.15, "share added to a step's time: rewards, weight transfer, offload, the driver; validation is not counted"
    )


@dataclass(frozen=True)
class Phase:
    """Memory of one GPU at a phase's peak.

    Args:
        name: the phase.
        parts: bytes by what takes them.
        key: the configuration key that shrinks it best.
        fix: what to do if it does not fit.
    """

    name: str
    parts: dict[str, float]
    key: str
    fix: str

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Rollout:
    """What a GPU's share of a rollout server holds.

    Args:
        weights: bytes of its slice of the model.
        workspace: bytes of activations and logits while it runs.
        cache: bytes left for the KV cache.
        cached_tokens: tokens that the KV cache of one replica holds.
        full_length_sequences: sequences of the longest prompt and response that it holds at once.
        concurrent: responses that a replica generates at a time, at mean length.
    """

    weights: float
    workspace: float
    cache: float
    cached_tokens: int
    full_length_sequences: int
    concurrent: int


@dataclass(frozen=True)
class Work:
    """What one step of the trainer (one rollout batch) does.

    Args:
        prompt_tokens: of the rollout batch, counted once a response.
        response_tokens: of the rollout batch.
        updates: optimizer steps.
        observations: of them, those that an extra forward pass for the statistics comes before.
        generation_seconds: time to generate.
        scoring_seconds: time of the passes for old and reference log-probabilities.
        observation_seconds: time of the passes for the statistics.
        training_seconds: time of the forward and backward passes.
        seconds: all together, with what the assumptions add.
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


@dataclass(frozen=True)
class Estimate:
    """A run's estimate.

    Args:
        shape: the model's.
        gpu: the kind of GPU.
        layout: the division over the GPUs.
        phases: memory of one GPU.
        limit: bytes that a phase may take.
        host_bytes: memory of a node for what is offloaded, and for a whole copy of the model while loading.
        rollout: the rollout server.
        work: one step.
        steps: of the run, or None if the number of prompts is not known here.
        assumptions: behind all of it.
    """

    shape: ModelShape
    gpu: GPU
    layout: Layout
    phases: tuple[Phase, ...]
    limit: float
    host_bytes: float
    rollout: Rollout
    work: Work
    steps: int | None
    assumptions: Assumptions

    @property
    def gpu_hours_per_step(self) -> float:
        """GPU-hours of one step."""
        return self.layout.gpus * self.work.seconds / 3600

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of the run, or None if its number of steps is not known."""
        return None if self.steps is None else self.steps * self.gpu_hours_per_step


def estimate(
    config: DictConfig, gpu: GPU, assumptions: Assumptions | None = None, train_prompts: int | None = None
) -> Estimate:
    """Estimates a run, or refuses it.

    Args:
        config: a run's whole configuration, composed on verl's main one.
        gpu: the kind of GPU.
        assumptions: what neither fixes.
        train_prompts: prompts of the training set; None reads them from data.train_files where those exist.

    Returns:
        The estimate.

    Raises:
        ConfigurationError: batches do not divide, or a phase does not fit; the message names the key and what to do.
        ValueError: the model's shape is not known.
    """
    assumptions = assumptions or Assumptions()
    shape = shape_of(config.actor_rollout_ref.model.path)
    layout = layout_of(config, shape)
    limit = gpu.memory * (1 - assumptions.allocator_share)
    rollout = rollout_of(config, shape, layout, gpu, assumptions)
    phases = memory_phases(config, shape, layout, gpu, rollout, assumptions)
    for phase in phases:
        if phase.total > limit:
            raise ConfigurationError(phase.key, _value(config, phase.key), too_much(phase, limit, gpu), phase.fix)
    if rollout.full_length_sequences < 1:
        raise ConfigurationError(
            f"{ROLLOUT}.gpu_memory_utilization",
            config.actor_rollout_ref.rollout.gpu_memory_utilization,
            f"leaves {rollout.cache / GIB:.1f} GiB a GPU for the KV cache, which holds {max(rollout.cached_tokens, 0)} "
            f"tokens; the longest sequence has {layout.longest}",
            f"Raise it, or {ROLLOUT}.tensor_model_parallel_size.",
        )
    return Estimate(
        shape=shape,
        gpu=gpu,
        layout=layout,
        phases=phases,
        limit=limit,
        host_bytes=host_bytes(config, shape, layout),
        rollout=rollout,
        work=work_of(config, shape, layout, gpu, rollout, assumptions),
        steps=steps_of(config, train_prompts),
        assumptions=assumptions,
    )


def too_much(phase: Phase, limit: float, gpu: GPU) -> str:
    """Why a phase does not fit, with its largest parts.

    Args:
        phase: the phase.
        limit: bytes that it may take.
        gpu: the kind of GPU.
    """
    largest = sorted(phase.parts.items(), key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    return (
        f"{phase.name} needs {phase.total / GIB:.1f} GiB a GPU of the {limit / GIB:.1f} that a {gpu.name} offers "
        f"({parts})"
    )


def memory_phases(
    config: DictConfig, shape: ModelShape, layout: Layout, gpu: GPU, rollout: Rollout, assumptions: Assumptions
) -> tuple[Phase, ...]:
    """Memory of one GPU at the peak of each phase of a step.

    The optimizer's states are on the GPU during the whole update even where they are offloaded: verl loads them when
    the update begins. Only fsdp_config.offload_policy (FSDP2) keeps them on the host throughout.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        layout: the division over the GPUs.
        gpu: the kind of GPU.
        rollout: the rollout server.
        assumptions: what neither fixes.
    """
    actor, settings = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    engine = actor.fsdp_config
    on_host = bool(engine.offload_policy) and actor.strategy == "fsdp2"
    parameters = 0 if on_host else shape.parameters * model_bytes(engine.model_dtype) / layout.shards
    process = {"process": assumptions.process_gib * GIB}
    share = settings.gpu_memory_utilization * gpu.memory
    asleep = {"sleeping rollout server": assumptions.server_gib * GIB}
    if not (settings.free_cache_engine and settings.get("enable_sleep_mode", True)):
        asleep = {"rollout server that does not sleep": assumptions.server_gib * GIB + share}

    # What stays on the GPU between updates.
    resident = {}
    if not engine.param_offload:
        resident["parameters"] = parameters
    if not engine.optimizer_offload:
        resident["Adam's states"] = 2 * parameters

    tokens = tokens_per_gpu(config, layout, "train")
    states = {"parameters": parameters, "gradients": parameters, "Adam's states": 2 * parameters}
    more_gpus = (
        "Use more nodes (trainer.nnodes), so that each GPU holds less of the parameters, gradients and Adam's states, "
        f"or {ACTOR}.fsdp_config.offload_policy=True, which keeps them on the host and is slow."
    )
    fewer_tokens = (
        f"Lower it, with {ACTOR}.ulysses_sequence_parallel_size raised if the longest sequence then does not fit; "
        "+hardware/model groups do both."
    )
    if not actor.use_dynamic_bsz:
        fewer_tokens = f"Lower it, or share sequences over more GPUs ({ACTOR}.ulysses_sequence_parallel_size)."
        if _clipx(config).get("scope") == "micro_batch":
            fewer_tokens += " With clipx.scope=micro_batch another size is another run: rather share sequences."
    if computes_entropy_in_training(config) and not actor.entropy_checkpointing:
        fewer_tokens += f" Or {ACTOR}.entropy_checkpointing=True, which does not keep the entropy's softmax."
    activations = activation_bytes(config, shape, tokens)
    update = Phase(
        "actor update",
        {
            **process,
            **asleep,
            **states,
            "whole layers": gathered_bytes(config, shape, assumptions, training=True),
            **activations,
            "logits": tokens * shape.vocab_size * HALF * logits_copies(config, training=True),
        },
        key=f"{ACTOR}.ppo_max_token_len_per_gpu" if actor.use_dynamic_bsz else f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        fix=fewer_tokens,
    )
    if engine.get("use_no_sync_for_gradient_accumulation", True):
        key = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
        update = Phase(update.name, update.parts, key, "Set it to False: it keeps a whole gradient on each GPU.")
    elif sum(states.values()) > update.total / 2:
        update = Phase(update.name, update.parts, "trainer.nnodes", more_gpus)
    optimizer = Phase(
        "optimizer step",
        # torch's AdamW updates all parameters at once, through one more tensor of their size.
        {**process, **asleep, **states, "intermediate results": parameters},
        key="trainer.nnodes",
        fix=more_gpus,
    )

    scored = tokens_per_gpu(config, layout, "score")
    # In a forward pass a layer's tensors live until the layer is done.
    working = 12 * shape.hidden_size + 4 * shape.attention_size + 4 * shape.key_value_size
    working += 6 * shape.intermediate_size
    log_prob = Phase(
        "log-probabilities",
        {
            **process,
            **asleep,
            **resident,
            "parameters": parameters,
            "whole layers": gathered_bytes(config, shape, assumptions, training=False),
            "one layer's activations": scored * working,
            "logits": scored * shape.vocab_size * HALF * logits_copies(config, training=False),
            **entropy_chunk(config, shape),
        },
        key=f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        fix=f"Lower it, or set {ACTOR}.entropy_from_logits_with_chunking=True.",
    )
    generation = Phase(
        "generation",
        {
            **process,
            "rollout server outside its share": assumptions.server_gib * GIB,
            "rollout weights": rollout.weights,
            "rollout workspace": rollout.workspace,
            "KV cache": max(share - rollout.weights - rollout.workspace, 0),
            **resident,
        },
        key=f"{ROLLOUT}.gpu_memory_utilization",
        fix=f"Lower it, or set {ACTOR}.fsdp_config.param_offload=True and {ACTOR}.fsdp_config.optimizer_offload=True.",
    )
    transfer = Phase(
        "weight transfer",
        {
            **process,
            "rollout server outside its share": assumptions.server_gib * GIB,
            "rollout weights": rollout.weights,
            **resident,
            "parameters": parameters,
            "bucket": settings.checkpoint_engine.update_weights_bucket_megabytes * 2**20,
            "largest whole parameter": shape.embedding_parameters * model_bytes(engine.model_dtype),
        },
        key=f"{ROLLOUT}.tensor_model_parallel_size",
        fix=f"Raise it, or set {ACTOR}.fsdp_config.optimizer_offload=True.",
    )
    return update, optimizer, log_prob, generation, transfer


def model_bytes(dtype: str) -> int:
    """Bytes of a parameter in the type that verl's engine keeps it in.

    Args:
        dtype: the engine's model_dtype.
    """
    from verl.utils.torch_dtypes import PrecisionType

    return PrecisionType.to_dtype(dtype).itemsize


def tokens_per_gpu(config: DictConfig, layout: Layout, purpose: str) -> int:
    """Most tokens that a GPU has in one micro-batch.

    Args:
        config: the run's configuration.
        layout: the division over the GPUs.
        purpose: train for the actor's update, score for the log-probabilities.
    """
    if purpose == "train":
        node, name, rows = config.actor_rollout_ref.actor, "ppo", layout.mini_batch_rows_per_rank
    else:
        node, name, rows = config.actor_rollout_ref.rollout, "log_prob", layout.rows_per_rank
    all_tokens = math.ceil(rows * layout.longest / layout.sequence_parallel)
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        return min(node[f"{name}_max_token_len_per_gpu"], all_tokens)
    size = node[f"{name}_micro_batch_size_per_gpu"]
    return math.ceil(size * layout.longest / layout.sequence_parallel)


def gathered_bytes(config: DictConfig, shape: ModelShape, assumptions: Assumptions, *, training: bool) -> float:
    """Bytes of parameters, and in training gradients, that FSDP holds whole on a GPU.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        assumptions: how many layers it holds at a time.
        training: whether there is a backward pass.
    """
    actor = config.actor_rollout_ref.actor
    engine = actor.fsdp_config
    precision = engine.get("mixed_precision") or {}
    parameter, reduced = (
        model_bytes(precision.get("param_dtype", "bf16")),
        model_bytes(precision.get("reduce_dtype", "fp32")),
    )
    embeddings = shape.embedding_parameters * (1 if shape.tie_word_embeddings else 2)
    layers = assumptions.gathered_layers if engine.reshard_after_forward else shape.num_hidden_layers
    gathered = (layers * shape.layer_parameters + embeddings) * parameter
    if not training:
        return gathered
    if engine.get("use_no_sync_for_gradient_accumulation", True):
        # FSDP2 accumulates whole gradients in the type that they are reduced in, FSDP1 in the parameters'.
        return gathered + shape.parameters * (reduced if actor.strategy == "fsdp2" else parameter)
    # A layer's gradient as computed and as sent, and the output embedding's, which comes first and is the largest.
    return gathered + (shape.layer_parameters + shape.embedding_parameters) * (parameter + reduced)


def activation_bytes(config: DictConfig, shape: ModelShape, tokens: int) -> dict[str, float]:
    """Bytes of activations of one micro-batch in training, with flash attention.

    The gradients of three of the feed-forward network's tensors come on top in the backward pass.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        tokens: of the micro-batch on this GPU.
    """
    model = config.actor_rollout_ref.model
    saved = saved_bytes(shape)
    gradients = 6 * shape.intermediate_size
    if not model.enable_gradient_checkpointing:
        return {"activations": tokens * (shape.num_hidden_layers * saved + gradients)}
    # Offloaded inputs are on the GPU for the layer at work and the next.
    kept = 2 if model.enable_activation_offload else shape.num_hidden_layers
    return {
        "inputs of all layers": tokens * kept * shape.hidden_size * HALF,
        "one layer's activations": tokens * (saved + gradients),
    }


def saved_bytes(shape: ModelShape) -> int:
    """Bytes that autograd keeps of one token in one layer of transformers' Qwen2 or Llama, in bfloat16.

    Of two RMS norms the input in float32, and the output before and after its weight (16 x hidden); queries, keys,
    values and the attention's output (4 x attention, 4 x key-value); the SwiGLU network's four tensors
    (8 x intermediate).

    Args:
        shape: the model's shape.
    """
    return 16 * shape.hidden_size + 4 * shape.attention_size + 4 * shape.key_value_size + 8 * shape.intermediate_size


def logits_copies(config: DictConfig, *, training: bool) -> float:
    """Tensors of the size of a micro-batch's logits in bfloat16 that exist at a time.

    One: flash-attention's cross-entropy writes its gradient over the logits. A temperature other than 1 makes a scaled
    copy. Entropy takes its softmax and their product. In training its softmax is kept for the backward pass, in chunks
    as float32 beside a float32 copy of the logits, unless it is recomputed; the cross-entropy's gradient then takes a
    tensor of its own, and entropy as a part of the loss two more for its own gradient.

    Args:
        config: the run's configuration.
        training: whether there is a backward pass.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    copies = 1 + (rollout.temperature != 1)
    if training:
        if not computes_entropy_in_training(config):
            return copies
        kept = 4 if actor.entropy_from_logits_with_chunking else 1
        if actor.entropy_checkpointing and not actor.entropy_coeff:
            kept = 0
        return copies + 1 + kept + (2 if actor.entropy_coeff else 0)
    return copies + (0 if actor.entropy_from_logits_with_chunking else 2)


def entropy_chunk(config: DictConfig, shape: ModelShape) -> dict[str, float]:
    """Bytes of a chunk of logits, its softmax and their product in float32, where entropy is computed in chunks.

    Args:
        config: the run's configuration.
        shape: the model's shape.
    """
    actor = config.actor_rollout_ref.actor
    if not actor.entropy_from_logits_with_chunking or config.actor_rollout_ref.model.use_fused_kernels:
        return {}
    return {"chunk of the entropy": 3 * FULL * actor.entropy_from_logits_chunk_size * shape.vocab_size}


def computes_entropy_in_training(config: DictConfig) -> bool:
    """Whether the update computes the entropy of each token, as verl's trainers decide it.

    Args:
        config: the run's configuration.
    """
    actor = config.actor_rollout_ref.actor
    return bool(actor.calculate_entropy or actor.entropy_coeff or _select(config))


def rollout_of(config: DictConfig, shape: ModelShape, layout: Layout, gpu: GPU, assumptions: Assumptions) -> Rollout:
    """What a rollout server has room for.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        layout: the division over the GPUs.
        gpu: the kind of GPU.
        assumptions: the mean lengths.
    """
    settings = config.actor_rollout_ref.rollout
    split = settings.tensor_model_parallel_size
    weights = shape.parameters * HALF / split
    layer = 4 * shape.hidden_size + (2 * shape.attention_size + 4 * shape.key_value_size) / split
    layer += 3 * shape.intermediate_size / split
    workspace = settings.max_num_batched_tokens * layer * HALF
    # The sampler's logits in float32, and a second tensor of their size for their softmax.
    workspace += settings.max_num_seqs * shape.vocab_size * FULL * 2
    cache = settings.gpu_memory_utilization * gpu.memory - weights - workspace
    # More GPUs than key-value heads keep copies of them.
    per_token = shape.key_value_bytes / min(split, shape.num_key_value_heads)
    cached_tokens = int(cache // per_token)
    mean = mean_prompt(config, assumptions) + mean_response(config, assumptions)
    waiting = math.ceil(layout.rows / layout.replicas)
    # With pages for the tokens that exist, not for those that may come.
    concurrent = max(min(settings.max_num_seqs, waiting, int(cached_tokens // mean)), 1)
    return Rollout(
        weights=weights,
        workspace=workspace,
        cache=cache,
        cached_tokens=cached_tokens,
        full_length_sequences=max(cached_tokens // layout.longest, 0),
        concurrent=concurrent,
    )


def work_of(
    config: DictConfig, shape: ModelShape, layout: Layout, gpu: GPU, rollout: Rollout, assumptions: Assumptions
) -> Work:
    """Tokens, optimizer steps and time of one step of the trainer.

    A forward pass takes 2 operations a parameter and token and the attention's own, a backward pass twice that, and
    gradient checkpointing one forward pass more.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        layout: the division over the GPUs.
        gpu: the kind of GPU.
        rollout: the rollout server.
        assumptions: mean lengths and speeds.
    """
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    prompt, response = mean_prompt(config, assumptions), mean_response(config, assumptions)
    passes = actor.ppo_epochs * (2 if _clipx(config).get("update") else 1)
    updates = layout.updates_per_epoch * passes
    observations = observed_updates(config, updates)

    forward = layout.rows * shape.forward_flops(prompt + response)
    speed = layout.gpus * gpu.flops * assumptions.compute_utilisation
    scoring = (0 if bypasses_old_log_prob(config) else 1) + needs_reference(config)
    scoring_seconds = scoring * forward / speed
    observation_seconds = forward * passes * observations / updates / speed
    training_seconds = forward * passes * (4 if model.enable_gradient_checkpointing else 3) / speed
    generation_seconds = generation_seconds_of(config, shape, layout, gpu, rollout, assumptions)
    known = generation_seconds + scoring_seconds + observation_seconds + training_seconds
    return Work(
        prompt_tokens=layout.rows * prompt,
        response_tokens=layout.rows * response,
        updates=updates,
        observations=observations,
        generation_seconds=generation_seconds,
        scoring_seconds=scoring_seconds,
        observation_seconds=observation_seconds,
        training_seconds=training_seconds,
        seconds=known * (1 + assumptions.other_share),
    )


def observed_updates(config: DictConfig, updates: int) -> int:
    """Optimizer steps of a rollout batch that an extra forward pass for the statistics comes before.

    Args:
        config: the run's configuration.
        updates: optimizer steps of a rollout batch.
    """
    select = _select(config)
    if select and select.get("over") == "mini_batch":
        return updates
    if _clipx(config).get("scope") != "mini_batch":
        return 0
    # The first update's statistics follow without a pass where its ratio is 1 by definition.
    return updates if bypasses_old_log_prob(config) else updates - 1


def bypasses_old_log_prob(config: DictConfig) -> bool:
    """Whether the rollout's log-probabilities serve as the old policy's.

    Args:
        config: the run's configuration.
    """
    return bool((config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False))


def generation_seconds_of(
    config: DictConfig, shape: ModelShape, layout: Layout, gpu: GPU, rollout: Rollout, assumptions: Assumptions
) -> float:
    """Seconds to generate a rollout batch.

    A decoding step reads the weights and the cached tokens of every response in it; responses follow each other in the
    places of a replica, and the longest one runs on alone when the others are done.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        layout: the division over the GPUs.
        gpu: the kind of GPU.
        rollout: the rollout server.
        assumptions: mean lengths and speeds.
    """
    settings = config.actor_rollout_ref.rollout
    split = settings.tensor_model_parallel_size
    prompt, response = mean_prompt(config, assumptions), mean_response(config, assumptions)
    cached = shape.key_value_bytes / min(split, shape.num_key_value_heads) * (prompt + response / 2)

    def step(concurrent: int) -> float:
        reading = (rollout.weights + concurrent * cached) / (gpu.bandwidth * assumptions.bandwidth_utilisation)
        computing = 2 * shape.matmul_parameters * concurrent / split / (gpu.flops * assumptions.compute_utilisation)
        return max(reading, computing) + assumptions.decode_step_seconds

    steps = math.ceil(layout.rows / layout.replicas / rollout.concurrent) * response
    tail = max(config.data.max_response_length - steps, 0)
    # Each prompt once: its other responses find it in the cache.
    speed = layout.gpus * gpu.flops * assumptions.compute_utilisation
    prefill = config.data.train_batch_size * shape.forward_flops(prompt) / speed
    return prefill + steps * step(rollout.concurrent) + tail * step(1)


def mean_prompt(config: DictConfig, assumptions: Assumptions) -> int:
    """Mean tokens of a prompt.

    Args:
        config: the run's configuration.
        assumptions: the share of the longest.
    """
    return max(round(config.data.max_prompt_length * assumptions.mean_prompt_share), 1)


def mean_response(config: DictConfig, assumptions: Assumptions) -> int:
    """Mean tokens of a response.

    Args:
        config: the run's configuration.
        assumptions: the share of the longest.
    """
    return max(round(config.data.max_response_length * assumptions.mean_response_share), 1)


def steps_of(config: DictConfig, train_prompts: int | None = None) -> int | None:
    """Steps of the run: trainer.total_training_steps, or whole batches of the training set times the epochs.

    Args:
        config: the run's configuration.
        train_prompts: prompts of the training set; None reads them from data.train_files.

    Returns:
        The number, or None where the files are not here.
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
    """Rows of Parquet files, or None if one is not here.

    Args:
        files: one path, or several.
    """
    import pyarrow.parquet

    paths = [Path(name).expanduser() for name in ([files] if isinstance(files, str) else files)]
    if not all(path.is_file() for path in paths):
        return None
    return sum(pyarrow.parquet.read_metadata(path).num_rows for path in paths)


def host_bytes(config: DictConfig, shape: ModelShape, layout: Layout) -> float:
    """Memory of a node for what is kept off its GPUs, or for loading the model, whichever is more.

    Args:
        config: the run's configuration.
        shape: the model's shape.
        layout: the division over the GPUs.
    """
    engine = config.actor_rollout_ref.actor.fsdp_config
    gpus = layout.gpus // layout.nodes
    size = model_bytes(engine.model_dtype)
    copies = bool(engine.param_offload) + 2 * bool(engine.optimizer_offload)
    if engine.offload_policy:
        copies = 4
    kept = copies * shape.parameters * size * gpus / layout.shards
    if needs_reference(config):
        # verl keeps a reference model's parameters on the host.
        reference = model_bytes(config.actor_rollout_ref.ref.fsdp_config.model_dtype)
        kept += shape.parameters * reference * gpus / layout.shards
    # verl loads on the first rank alone, or, where the embeddings are tied, on every rank.
    loading = shape.parameters * size * (gpus if shape.tie_word_embeddings else 1)
    return max(kept, loading)


def _clipx(config: DictConfig) -> DictConfig | dict:
    return config.get("clipx") or {}


def _select(config: DictConfig) -> DictConfig | None:
    return _clipx(config).get("select")


def _value(config: DictConfig, key: str) -> object:
    from omegaconf import OmegaConf

    return OmegaConf.select(config, key)
