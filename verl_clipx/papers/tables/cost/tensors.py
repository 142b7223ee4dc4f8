"""Bytes of the tensors that a pass over a micro-batch needs: gathered layers, activations, logits."""

from verl_clipx.papers.tables.cost.run import Run, model_bytes
from verl_clipx.papers.tables.models import ModelShape

# Bytes of a bfloat16 number: logits, activations, the rollout's weights and its KV cache.
HALF = 2
# Bytes of a float32 number.
FULL = 4


def gathered_bytes(run: Run, *, training: bool) -> float:
    """Return the bytes of unsharded parameters (in training also gradients) that FSDP holds on a GPU."""
    engine, shape = run.engine, run.shape
    precision = engine.get("mixed_precision") or {}
    parameter = model_bytes(precision.get("param_dtype", "bf16"))
    reduced = model_bytes(precision.get("reduce_dtype", "fp32"))
    embeddings = shape.embedding_parameters * (1 if shape.tie_word_embeddings else 2)
    layers = run.assumptions.gathered_layers if engine.reshard_after_forward else shape.num_hidden_layers
    gathered = (layers * shape.layer_parameters + embeddings) * parameter
    if not training:
        return gathered
    if engine.get("use_no_sync_for_gradient_accumulation", True):
        # FSDP2 accumulates unsharded gradients in the reduction dtype, FSDP1 in the parameters' dtype.
        return gathered + shape.parameters * (reduced if run.actor.strategy == "fsdp2" else parameter)
    # The gradient of a layer as computed and as sent, and of the output embedding, which comes first and is largest.
    return gathered + (shape.layer_parameters + shape.embedding_parameters) * (parameter + reduced)


def activation_bytes(run: Run, tokens: int) -> dict[str, float]:
    """Bytes of activations of one micro-batch in training, with flash attention.

    The gradients of three of the feed-forward network's tensors come on top in the backward pass.
    """
    model, shape = run.config.actor_rollout_ref.model, run.shape
    saved = saved_bytes(shape)
    gradients = 6 * shape.intermediate_size
    if not model.enable_gradient_checkpointing:
        return {"activations": tokens * (shape.num_hidden_layers * saved + gradients)}
    # Offloaded inputs are on the GPU only for the current layer and the next.
    kept = 2 if model.enable_activation_offload else shape.num_hidden_layers
    return {
        "inputs of all layers": tokens * kept * shape.hidden_size * HALF,
        "one layer's activations": tokens * (saved + gradients),
    }


def saved_bytes(shape: ModelShape) -> int:
    """Return the bytes that autograd saves per token and layer of transformers' Qwen2 or Llama, in bfloat16.

    These are, for two RMS norms, the input in float32 and the output before and after its weight (16 x hidden);
    queries, keys, values and the attention output (4 x attention, 4 x key-value); and the SwiGLU network's four tensors
    (8 x intermediate).
    """
    return 16 * shape.hidden_size + 4 * shape.attention_size + 4 * shape.key_value_size + 8 * shape.intermediate_size


def logits_copies(run: Run, *, training: bool) -> float:
    """Return how many tensors of the size of a micro-batch's logits in bfloat16 exist at the same time.

    There is at least one: flash-attention's cross-entropy writes its gradient over the logits. A temperature other than
    1 adds a scaled copy. Entropy needs its softmax and their product. In training the cross-entropy's gradient then
    needs its own tensor, and the forward pass keeps the softmax (if chunked, in float32 beside a float32 copy of the
    logits) unless it is recomputed. It is kept until the backward pass if entropy is part of verl's loss (two more for
    its own gradient) or of verl's metrics; with entropy selection alone it is released earlier.
    """
    actor = run.actor
    if run.config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    copies = 1 + (run.rollout.temperature != 1)
    chunked = actor.entropy_from_logits_with_chunking
    if not training:
        return copies + (0 if chunked else 2)
    if not run.computes_entropy_in_training:
        return copies
    kept = 4 if chunked else 1
    if actor.entropy_checkpointing and not actor.entropy_coeff:
        kept = 0
    if not (actor.calculate_entropy or actor.entropy_coeff):
        return copies + max(1, kept if chunked else 2)
    return copies + 1 + kept + (2 if actor.entropy_coeff else 0)


def entropy_chunk(run: Run) -> dict[str, float]:
    """Return the bytes of a chunk of logits, its softmax and their product in float32, if entropy is chunked."""
    if not run.actor.entropy_from_logits_with_chunking or run.config.actor_rollout_ref.model.use_fused_kernels:
        return {}
    return {"chunk of the entropy": 3 * FULL * run.actor.entropy_from_logits_chunk_size * run.shape.vocab_size}
