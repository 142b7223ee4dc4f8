"""Bytes of the tensors that a pass over a micro-batch needs: whole layers, activations, logits."""

from omegaconf import DictConfig, OmegaConf

from verl_clipx.reproduction.cost.assumptions import Assumptions
from verl_clipx.reproduction.models import ModelShape

# Bytes of a bfloat16 number: logits, activations, the rollout's weights and its KV cache.
HALF = 2
# Bytes of a float32 number.
FULL = 4


def model_bytes(dtype: str) -> int:
    """Bytes of a parameter in the type that verl's engine keeps it in.

    Args:
        dtype: the engine's model_dtype.
    """
    from verl.utils.torch_dtypes import PrecisionType

    return PrecisionType.to_dtype(dtype).itemsize


def gathered_bytes(config: DictConfig, shape: ModelShape, assumptions: Assumptions, *, training: bool) -> float:
    """Bytes of parameters, and in training gradients, that FSDP holds whole on a GPU.

    Args:
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
    """
    return 16 * shape.hidden_size + 4 * shape.attention_size + 4 * shape.key_value_size + 8 * shape.intermediate_size


def logits_copies(config: DictConfig, *, training: bool) -> float:
    """Tensors of the size of a micro-batch's logits in bfloat16 that exist at a time.

    One: flash-attention's cross-entropy writes its gradient over the logits. A temperature other than 1 makes a scaled
    copy. Entropy takes its softmax and their product. In training the cross-entropy's gradient then takes a tensor of
    its own, and the forward pass keeps the softmax, in chunks as float32 beside a float32 copy of the logits, unless it
    is recomputed: until the backward pass where entropy is a part of verl's loss (two more for its own gradient) or of
    verl's metrics; entropy selection alone lets go of it before.

    Args:
        training: whether there is a backward pass.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.model.use_fused_kernels:
        return 0
    copies = 1 + (rollout.temperature != 1)
    chunked = actor.entropy_from_logits_with_chunking
    if not training:
        return copies + (0 if chunked else 2)
    if not computes_entropy_in_training(config):
        return copies
    kept = 4 if chunked else 1
    if actor.entropy_checkpointing and not actor.entropy_coeff:
        kept = 0
    if not (actor.calculate_entropy or actor.entropy_coeff):
        return copies + max(1, kept if chunked else 2)
    return copies + 1 + kept + (2 if actor.entropy_coeff else 0)


def entropy_chunk(config: DictConfig, shape: ModelShape) -> dict[str, float]:
    """Bytes of a chunk of logits, its softmax and their product in float32, where entropy is computed in chunks."""
    actor = config.actor_rollout_ref.actor
    if not actor.entropy_from_logits_with_chunking or config.actor_rollout_ref.model.use_fused_kernels:
        return {}
    return {"chunk of the entropy": 3 * FULL * actor.entropy_from_logits_chunk_size * shape.vocab_size}


def computes_entropy_in_training(config: DictConfig) -> bool:
    """Whether the update computes the entropy of each token, as verl's trainers decide it."""
    actor = config.actor_rollout_ref.actor
    return bool(actor.calculate_entropy or actor.entropy_coeff or OmegaConf.select(config, "clipx.select"))
