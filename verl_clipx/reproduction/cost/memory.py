"""Memory of a GPU at each phase's peak, of the rollout server on it, and of the host."""

import math
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl_clipx.reproduction.cost.assumptions import GIB, GPU, Assumptions, mean_prompt, mean_response
from verl_clipx.reproduction.cost.tensors import (
    FULL,
    HALF,
    activation_bytes,
    computes_entropy_in_training,
    entropy_chunk,
    gathered_bytes,
    logits_copies,
    model_bytes,
)
from verl_clipx.reproduction.divisibility import ACTOR, ROLLOUT, Layout, needs_reference
from verl_clipx.reproduction.models import ModelShape


@dataclass(frozen=True)
class Phase:
    """Memory of one GPU at a phase's peak.

    Args:
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


def memory_phases(
    config: DictConfig, shape: ModelShape, layout: Layout, gpu: GPU, rollout: Rollout, assumptions: Assumptions
) -> tuple[Phase, ...]:
    """Memory of one GPU at the peak of each phase of a step.

    The optimizer's states are on the GPU during the whole update even where they are offloaded: verl loads them when
    the update begins. Only fsdp_config.offload_policy (FSDP2) keeps them on the host throughout.
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
        if OmegaConf.select(config, "clipx.scope") == "micro_batch":
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
    name = "use_no_sync_for_gradient_accumulation"
    # verl 0.9.0 lacks the key and works as with True.
    if engine.get(name, True):
        set_it = "Set it to False" if name in engine else "verl 0.9.0 lacks the key; use verl 0.9.1"
        fix = f"{set_it}: a whole gradient is kept on each GPU."
        update = Phase(update.name, update.parts, f"{ACTOR}.fsdp_config.{name}", fix)
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


def tokens_per_gpu(config: DictConfig, layout: Layout, purpose: str) -> int:
    """Most tokens that a GPU has in one micro-batch.

    Args:
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


def rollout_of(config: DictConfig, shape: ModelShape, layout: Layout, gpu: GPU, assumptions: Assumptions) -> Rollout:
    """What a rollout server has room for."""
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


def host_bytes(config: DictConfig, shape: ModelShape, layout: Layout) -> float:
    """Memory of a node for what is kept off its GPUs, or for loading the model, whichever is more."""
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
