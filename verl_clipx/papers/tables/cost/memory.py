"""Estimates peak memory per GPU in each phase, of the rollout server on it, and of the host."""

import math
from dataclasses import dataclass

from omegaconf import OmegaConf

from verl_clipx.papers.tables.cost.assumptions import GIB
from verl_clipx.papers.tables.cost.run import Run, model_bytes
from verl_clipx.papers.tables.cost.tensors import (
    FULL,
    HALF,
    activation_bytes,
    entropy_chunk,
    gathered_bytes,
    logits_copies,
)
from verl_clipx.papers.tables.divisibility import ACTOR, ROLLOUT, needs_reference


@dataclass(frozen=True)
class Phase:
    """Memory of one GPU at a phase's peak.

    Args:
        parts: bytes by purpose.
        key: the configuration key that reduces it most.
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
    """Contents of one GPU's share of a rollout server.

    Args:
        weights: bytes of its slice of the model.
        workspace: bytes of activations and logits during generation.
        cache: bytes left for the KV cache.
        cached_tokens: tokens that fit in the KV cache of one replica.
        full_length_sequences: sequences of maximum prompt and response length that fit in it at once.
        concurrent: responses that a replica generates at a time, at mean length.
    """

    weights: float
    workspace: float
    cache: float
    cached_tokens: int
    full_length_sequences: int
    concurrent: int


def memory_phases(run: Run, rollout: Rollout) -> tuple[Phase, ...]:
    """Return the memory of one GPU at the peak of each phase of a step."""
    return (
        actor_update(run),
        optimizer_step(run),
        log_probabilities(run),
        generation(run, rollout),
        transfer(run, rollout),
    )


def actor_update(run: Run) -> Phase:
    """Forward and backward passes of the update.

    The optimizer states are on the GPU during the whole update even if they are offloaded: verl loads them when the
    update begins. Only fsdp_config.offload_policy (FSDP2) keeps them on the host throughout.
    """
    tokens = tokens_per_gpu(run, "train")
    parts = {
        **_beside_the_update(run),
        **_states(run),
        "whole layers": gathered_bytes(run, training=True),
        **activation_bytes(run, tokens),
        "logits": tokens * run.shape.vocab_size * HALF * logits_copies(run, training=True),
    }
    name = "use_no_sync_for_gradient_accumulation"
    # verl 0.9.0 lacks the key and behaves as if it were True.
    if run.engine.get(name, True):
        set_it = "Set it to False" if name in run.engine else "verl 0.9.0 lacks the key; use verl 0.9.1"
        key, fix = f"{ACTOR}.fsdp_config.{name}", f"{set_it}: otherwise each GPU keeps a whole gradient."
    elif sum(_states(run).values()) > sum(parts.values()) / 2:
        key, fix = "trainer.nnodes", MORE_GPUS
    else:
        size = "ppo_max_token_len_per_gpu" if run.actor.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
        key, fix = f"{ACTOR}.{size}", fewer_tokens(run)
    return Phase("actor update", parts, key, fix)


def fewer_tokens(run: Run) -> str:
    """Say how to reduce an update's activations and logits."""
    fix = (
        f"Lower it, with {ACTOR}.ulysses_sequence_parallel_size raised if the longest sequence then does not fit; "
        "+hardware/model groups do both."
    )
    if not run.actor.use_dynamic_bsz:
        fix = f"Lower it, or share sequences over more GPUs ({ACTOR}.ulysses_sequence_parallel_size)."
        if OmegaConf.select(run.config, "clipx.scope") == "micro_batch":
            fix += " With clipx.scope=micro_batch another size is another run: rather share sequences."
    if run.computes_entropy_in_training and not run.actor.entropy_checkpointing:
        fix += f" Or {ACTOR}.entropy_checkpointing=True, which does not keep the entropy's softmax."
    return fix


def optimizer_step(run: Run) -> Phase:
    """torch's AdamW step, which updates all parameters at once and needs one more tensor of their size."""
    parts = {**_beside_the_update(run), **_states(run), "intermediate results": run.parameter_bytes}
    return Phase("optimizer step", parts, "trainer.nnodes", MORE_GPUS)


def log_probabilities(run: Run) -> Phase:
    """Forward pass for old and reference log-probabilities; a layer's tensors live until the layer is done."""
    tokens, shape = tokens_per_gpu(run, "score"), run.shape
    working = 12 * shape.hidden_size + 4 * shape.attention_size + 4 * shape.key_value_size + 6 * shape.intermediate_size
    parts = {
        **_beside_the_update(run),
        **_resident(run),
        "parameters": run.parameter_bytes,
        "whole layers": gathered_bytes(run, training=False),
        "one layer's activations": tokens * working,
        "logits": tokens * shape.vocab_size * HALF * logits_copies(run, training=False),
        **entropy_chunk(run),
    }
    fix = f"Lower it, or set {ACTOR}.entropy_from_logits_with_chunking=True."
    return Phase("log-probabilities", parts, f"{ROLLOUT}.log_prob_max_token_len_per_gpu", fix)


def generation(run: Run, rollout: Rollout) -> Phase:
    """Generation by the rollout server."""
    parts = {
        **_beside_generation(run),
        "rollout weights": rollout.weights,
        "rollout workspace": rollout.workspace,
        "KV cache": max(_share(run) - rollout.weights - rollout.workspace, 0),
        **_resident(run),
    }
    fix = f"Lower it, or set {ACTOR}.fsdp_config.param_offload=True and {ACTOR}.fsdp_config.optimizer_offload=True."
    return Phase("generation", parts, f"{ROLLOUT}.gpu_memory_utilization", fix)


def transfer(run: Run, rollout: Rollout) -> Phase:
    """Transfer of the new weights to the rollout server."""
    parts = {
        **_beside_generation(run),
        "rollout weights": rollout.weights,
        **_resident(run),
        "parameters": run.parameter_bytes,
        "bucket": run.rollout.checkpoint_engine.update_weights_bucket_megabytes * 2**20,
        "largest whole parameter": run.shape.embedding_parameters * model_bytes(run.engine.model_dtype),
    }
    fix = f"Raise it, or set {ACTOR}.fsdp_config.optimizer_offload=True."
    return Phase("weight transfer", parts, f"{ROLLOUT}.tensor_model_parallel_size", fix)


MORE_GPUS = (
    "Use more nodes (trainer.nnodes), so that each GPU holds less of the parameters, gradients and Adam's states, "
    f"or {ACTOR}.fsdp_config.offload_policy=True, which keeps them on the host and is slow."
)


def _share(run: Run) -> float:
    """The rollout server's share of a GPU's memory."""
    return run.rollout.gpu_memory_utilization * run.gpu.memory


def _beside_the_update(run: Run) -> dict[str, float]:
    server = run.assumptions.server_gib * GIB
    process = {"process": run.assumptions.process_gib * GIB}
    if run.rollout.free_cache_engine and run.rollout.get("enable_sleep_mode", True):
        return {**process, "sleeping rollout server": server}
    return {**process, "rollout server that does not sleep": server + _share(run)}


def _beside_generation(run: Run) -> dict[str, float]:
    outside = run.assumptions.server_gib * GIB
    return {"process": run.assumptions.process_gib * GIB, "rollout server outside its share": outside}


def _states(run: Run) -> dict[str, float]:
    parameters = run.parameter_bytes
    return {"parameters": parameters, "gradients": parameters, "Adam's states": 2 * parameters}


def _resident(run: Run) -> dict[str, float]:
    """Tensors that stay on the GPU between updates."""
    found = {} if run.engine.param_offload else {"parameters": run.parameter_bytes}
    return found if run.engine.optimizer_offload else {**found, "Adam's states": 2 * run.parameter_bytes}


def tokens_per_gpu(run: Run, purpose: str) -> int:
    """Return the maximum number of tokens that a GPU processes in one micro-batch.

    Args:
        purpose: "train" for the actor's update, "score" for the log-probabilities.
    """
    layout = run.layout
    if purpose == "train":
        node, name, rows = run.actor, "ppo", layout.mini_batch_rows_per_rank
    else:
        node, name, rows = run.rollout, "log_prob", layout.rows_per_rank
    all_tokens = math.ceil(rows * layout.longest / layout.sequence_parallel)
    if run.actor.use_dynamic_bsz:
        return min(node[f"{name}_max_token_len_per_gpu"], all_tokens)
    size = node[f"{name}_micro_batch_size_per_gpu"]
    return math.ceil(size * layout.longest / layout.sequence_parallel)


def rollout_of(run: Run) -> Rollout:
    """Estimate what a rollout server has room for."""
    settings, shape, layout = run.rollout, run.shape, run.layout
    split = settings.tensor_model_parallel_size
    weights = shape.parameters * HALF / split
    layer = 4 * shape.hidden_size + (2 * shape.attention_size + 4 * shape.key_value_size) / split
    layer += 3 * shape.intermediate_size / split
    workspace = settings.max_num_batched_tokens * layer * HALF
    # The sampler's logits in float32, and a second tensor of the same size for their softmax.
    workspace += settings.max_num_seqs * shape.vocab_size * FULL * 2
    cache = _share(run) - weights - workspace
    # If there are more GPUs than key-value heads, the heads are replicated.
    per_token = shape.key_value_bytes / min(split, shape.num_key_value_heads)
    cached_tokens = int(cache // per_token)
    mean = run.mean_prompt + run.mean_response
    waiting = math.ceil(layout.rows / layout.replicas)
    # Pages are allocated for existing tokens, not for future ones.
    concurrent = max(min(settings.max_num_seqs, waiting, int(cached_tokens // mean)), 1)
    return Rollout(
        weights=weights,
        workspace=workspace,
        cache=cache,
        cached_tokens=cached_tokens,
        full_length_sequences=max(cached_tokens // layout.longest, 0),
        concurrent=concurrent,
    )


def host_bytes(run: Run) -> float:
    """Return the host memory of a node for offloaded tensors or for loading the model, whichever is larger."""
    engine, shape, layout = run.engine, run.shape, run.layout
    gpus = layout.gpus // layout.nodes
    size = model_bytes(engine.model_dtype)
    copies = bool(engine.param_offload) + 2 * bool(engine.optimizer_offload)
    if engine.offload_policy:
        copies = 4
    kept = copies * shape.parameters * size * gpus / layout.shards
    if needs_reference(run.config):
        # verl keeps a reference model's parameters on the host.
        reference = model_bytes(run.config.actor_rollout_ref.ref.fsdp_config.model_dtype)
        kept += shape.parameters * reference * gpus / layout.shards
    # verl loads the model only on the first rank or, if the embeddings are tied, on every rank.
    loading = shape.parameters * size * (gpus if shape.tie_word_embeddings else 1)
    return max(kept, loading)
