"""Shapes of models: sizes against transformers' own modules on the meta device, and against verl's count of operations.

Not covered: that the hub's config.json files still say what the table says (nothing is downloaded).
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config
from verl.utils.flops_counter import FlopsCounter

from verl_clipx.papers.tables.models import KNOWN_SHAPES, LLAMA_3B, ModelShape, shape_from_config, shape_of

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def config_of(shape: ModelShape):
    family = Qwen2Config if shape.attention_bias else LlamaConfig
    return family(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
    )


@pytest.mark.parametrize(
    "shape",
    [
        KNOWN_SHAPES["qwen2.5-3b-instruct"],
        KNOWN_SHAPES["deepseek-r1-distill-qwen-1.5b"],
        KNOWN_SHAPES["deepseek-r1-distill-qwen-14b"],
        LLAMA_3B,
    ],
    ids=["tied", "untied", "14b", "llama"],
)
def test_parameters_are_those_of_transformers(shape):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3.09),
        ("Qwen/Qwen2.5-7B", 7.62),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7.62),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78),
        ("/models/DeepSeek-R1-Distill-Qwen-14B/", 14.77),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", 32.76),
        ("meta-llama/Llama-3.2-3B", 3.21),
    ],
)
def test_sizes_are_the_published_ones(name, billions):
    assert shape_of(name).parameters / 1e9 == pytest.approx(billions, abs=0.006)


def test_operations_are_verls_without_the_embeddings_lookup(monkeypatch):
    # The speed of a device, which is not used, and which this machine may not have.
    monkeypatch.setattr("verl.utils.flops_counter.get_device_flops", lambda: 1.0)
    shape = KNOWN_SHAPES["qwen2.5-7b"]
    lengths = [100, 3000]
    # verl counts forward and backward (three times the forward) in 1e12, and both embeddings as products.
    counted, _ = FlopsCounter(config_of(shape)).estimate_flops(lengths, 1.0)
    ours = 3 * sum(shape.forward_flops(length) for length in lengths)
    lookup = 6 * shape.embedding_parameters * sum(lengths)
    # verl leaves out biases and norms.
    assert ours + lookup == pytest.approx(counted * 1e12, rel=1e-4)


def test_kv_cache_of_one_token_by_hand():
    # 28 layers, keys and values, 4 heads of 128, two bytes.
    assert KNOWN_SHAPES["qwen2.5-7b"].key_value_bytes == 28 * 2 * 4 * 128 * 2 == 57344


def test_a_folder_wins_over_its_name(tmp_path):
    folder = tmp_path / "Qwen2.5-7B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", **TINY}))
    assert shape_of(str(folder)).hidden_size == 64


def test_a_config_without_heads_of_its_own_width():
    shape = shape_from_config({"model_type": "llama", **TINY})
    assert (shape.head_dim, shape.tie_word_embeddings, shape.attention_bias) == (16, False, False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_unknown_names_and_families_are_refused():
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.model\.path=Qwen/Qwen9-1T: .*config\.json"):
        shape_of("Qwen/Qwen9-1T")
    with pytest.raises(ValueError, match="model_type=mixtral"):
        shape_from_config({"model_type": "mixtral", **TINY})
