"""A micro-batch's activations against a real layer's, and its logits by what the configuration computes of them."""

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2Model

from tests.papers.tables.runs import ACTOR, MODELS, changed, composed, phase
from verl_clipx.papers.tables.cost.assumptions import A100
from verl_clipx.papers.tables.cost.estimate import estimate
from verl_clipx.papers.tables.cost.tensors import saved_bytes
from verl_clipx.papers.tables.models import ModelShape


@pytest.mark.parametrize("groups", [4, 2])
def test_what_autograd_keeps_of_a_layer_is_what_a_real_one_keeps(groups):
    tokens, shape = 64, ModelShape(256, 1024, 1, 4, groups, 64, 32, False, True)
    config = Qwen2Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=groups,
        vocab_size=32,
        attn_implementation="sdpa",
    )
    model = Qwen2Model(config).to(torch.bfloat16)
    inputs = torch.randn(1, tokens, 256, dtype=torch.bfloat16, requires_grad=True)
    rotary = model.rotary_emb(inputs, torch.arange(tokens)[None])
    # Parameters are there anyway, and the rotary tables are all layers' own.
    elsewhere = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *rotary)}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in elsewhere:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.layers[0](inputs, position_embeddings=rotary, attention_mask=None)
    measured = sum(storage.nbytes() for storage in kept.values()) / tokens
    # One float32 number a head from the attention and one from each norm come on top.
    assert measured == saved_bytes(shape) + 4 * 4 + 4 * 2


def test_logits_by_temperature_entropy_and_kernel():
    one = 16384 * 152064 * 2

    def logits(name, **changes):
        changes = {key.replace("__", "."): value for key, value in changes.items()}
        actor = {f"actor_rollout_ref.{key}": value for key, value in changes.items()}
        return phase(estimate(changed(actor), A100), name).parts["logits"] / one

    assert logits("actor update") == logits("log-probabilities") == 1
    for name in ("actor update", "log-probabilities"):
        assert logits(name, rollout__temperature=0.7) == 2
    assert logits("log-probabilities", actor__entropy_from_logits_with_chunking=False) == 3
    # In the loss: the cross-entropy's gradient, two for its own, and what it keeps: float32 chunks, or the softmax.
    assert logits("actor update", actor__entropy_coeff=0.001) == 1 + 1 + 2 + 4
    unchunked = {"actor__entropy_from_logits_with_chunking": False}
    assert logits("actor update", actor__entropy_coeff=0.001, **unchunked) == 1 + 1 + 2 + 1
    # Outside the loss, for a metric.
    assert logits("actor update", actor__calculate_entropy=True, **unchunked) == 1 + 1 + 1
    assert logits("actor update", actor__calculate_entropy=True, actor__entropy_checkpointing=True) == 1 + 1
    assert logits("actor update", model__use_fused_kernels=True) == 0


@pytest.mark.slow
def test_entropy_selection_keeps_nothing_for_the_backward_pass():
    one = 16384 * 152064 * 2

    def logits(*overrides):
        config = composed(MODELS["7b"], "+clipx=grpo", "+clipx/select=high_entropy", *overrides, hardware="a100x8")
        return phase(estimate(config, A100), "actor update").parts["logits"] / one

    # In the forward pass what it keeps, or the softmax and their product; in the backward pass a gradient.
    assert logits() == 1 + 4
    assert logits(f"{ACTOR}.entropy_from_logits_with_chunking=False") == 1 + 2
    assert logits(f"{ACTOR}.entropy_checkpointing=True") == 1 + 1
    assert logits(f"{ACTOR}.calculate_entropy=True") == 1 + 1 + 4
