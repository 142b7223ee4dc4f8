"""The estimator: memory, tokens and time by hand, and what must hold whatever the assumptions are.

Not covered: whether the estimate is right. No GPU was used; docs/hardware.md says what that leaves open.
"""

from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict
from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2Model

from tests.reproduction.runs import composed
from verl_clipx.reproduction.cost import A100, GIB, H100, Assumptions, estimate, rows_of, saved_bytes, steps_of
from verl_clipx.reproduction.divisibility import ConfigurationError
from verl_clipx.reproduction.models import ModelShape

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
BASE = composed("Qwen/Qwen2.5-7B")
MODELS = {
    "1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "3b": "Qwen/Qwen2.5-3B-Instruct",
    "7b": "Qwen/Qwen2.5-7B",
    "14b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
    "32b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
}
PARAMETERS_7B = 7_615_616_512


def changed(changes: dict, base=BASE):
    config = base.copy()
    with open_dict(config):
        for key, value in changes.items():
            OmegaConf.update(config, key, value)
    return config


def phase(result, name: str):
    return next(phase for phase in result.phases if phase.name == name)


def test_update_of_7b_on_eight_a100_by_hand():
    parts = phase(estimate(BASE, A100), "actor update").parts
    # float32: 4 bytes a parameter, and Adam's two, over eight GPUs.
    assert parts["parameters"] == parts["gradients"] == PARAMETERS_7B * 4 / 8
    assert parts["Adam's states"] == PARAMETERS_7B * 8 / 8
    # 28 inputs of 3584 numbers in bfloat16 for each of 16384 tokens.
    assert parts["inputs of all layers"] == 16384 * 28 * 3584 * 2 == 3_288_334_336
    # 16 * 3584 + 4 * 3584 + 4 * 512 + 8 * 18944 bytes a token, and 6 * 18944 of gradients.
    assert parts["one layer's activations"] == 16384 * 338_944 == 5_553_258_496
    # Temperature 1: one tensor.
    assert parts["logits"] == 16384 * 152064 * 2 == 4_982_833_152
    # bfloat16: three layers of 233057792 and two embeddings of 544997376; gradients of a layer and an embedding, as
    # computed (2 bytes) and as sent (4).
    assert parts["whole layers"] == 2 * (3 * 233_057_792 + 2 * 544_997_376) + 6 * (233_057_792 + 544_997_376)
    assert sum(parts.values()) / GIB == pytest.approx(38.74, abs=0.01)


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


def test_the_optimizers_states_are_there_during_the_update_even_where_they_are_offloaded():
    kept = {f"{ACTOR}.fsdp_config.param_offload": False, f"{ACTOR}.fsdp_config.optimizer_offload": False}
    offloaded, resident = estimate(BASE, A100), estimate(changed(kept), A100)
    for name in ("actor update", "optimizer step"):
        assert phase(offloaded, name).total == phase(resident, name).total
    # Between updates 12 bytes a parameter stay on the GPUs, or none.
    difference = phase(resident, "generation").total - phase(offloaded, "generation").total
    assert difference == PARAMETERS_7B * 12 / 8
    # The log-probabilities need the parameters anyway.
    difference = phase(resident, "log-probabilities").total - phase(offloaded, "log-probabilities").total
    assert difference == PARAMETERS_7B * 8 / 8
    # 12 bytes of every parameter are on the host of one node; while loading, 4.
    assert offloaded.host_bytes == PARAMETERS_7B * 12
    assert resident.host_bytes == PARAMETERS_7B * 4


def test_offload_policy_keeps_the_states_on_the_host_throughout():
    result = estimate(changed({f"{ACTOR}.fsdp_config.offload_policy": True}), A100)
    parts = phase(result, "actor update").parts
    assert parts["parameters"] == parts["gradients"] == parts["Adam's states"] == 0
    assert result.host_bytes == PARAMETERS_7B * 16
    # FSDP1 ignores it.
    fsdp1 = changed({f"{ACTOR}.fsdp_config.offload_policy": True, f"{ACTOR}.strategy": "fsdp"})
    assert phase(estimate(fsdp1, A100), "actor update").parts["gradients"] == PARAMETERS_7B * 4 / 8


def test_32b_needs_more_than_a_node():
    one = composed(MODELS["32b"], "+hardware/model=32b")
    with pytest.raises(ConfigurationError, match=r"trainer\.nnodes=1: actor update needs .* Use more nodes"):
        estimate(one, A100)
    # 32.76e9 parameters of 16 bytes over 32 GPUs.
    four = estimate(changed({"trainer.nnodes": 4}, one), A100)
    states = sum(phase(four, "actor update").parts[name] for name in ("parameters", "gradients", "Adam's states"))
    assert states / GIB == pytest.approx(32.764 * 16 / 32 * 1e9 / GIB, rel=1e-4)
    assert all(phase.total < four.limit for phase in four.phases)
    # Responses of 64k tokens, which eight GPUs share.
    long = {"trainer.nnodes": 4, "data.max_response_length": 65536}
    assert estimate(changed(long, one), H100).layout.longest == 66560


@pytest.mark.parametrize("hardware", ["a100x4", "a100x8", "h100x8"])
@pytest.mark.parametrize("model", ["1.5b", "3b", "7b"])
def test_machines_hold_models_up_to_8b(hardware, model):
    result = estimate(composed(MODELS[model], hardware=hardware), H100 if hardware == "h100x8" else A100)
    assert result.layout.gpus == (4 if hardware == "a100x4" else 8)
    assert result.rollout.full_length_sequences > 20


def test_size_groups():
    assert estimate(composed(MODELS["14b"], "+hardware/model=14b"), A100).layout.sequence_parallel == 2
    long = ["+hardware/response=64k", "data.max_response_length=65536"]
    assert estimate(composed(MODELS["7b"], *long), H100).layout.data_parallel == 2
    two_nodes = ["+hardware/model=32b", "trainer.nnodes=2", "data.max_response_length=65536"]
    assert estimate(composed(MODELS["32b"], *two_nodes), A100).layout.replicas == 4


def test_a_whole_gradient_on_each_gpu_does_not_fit_beside_7b_on_four():
    key = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
    with pytest.raises(ConfigurationError, match=r"use_no_sync_for_gradient_accumulation=True: .*Set it to False"):
        estimate(composed(MODELS["7b"], f"{key}=True", hardware="a100x4"), A100)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 100_000}, r"ppo_max_token_len_per_gpu=100000: actor update needs"),
        (
            {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 300_000, f"{ROLLOUT}.temperature": 0.6},
            r"log_prob_max_token_len_per_gpu=300000: log-probabilities needs",
        ),
        (
            {"actor_rollout_ref.actor.entropy_coeff": 0.01, f"{ACTOR}.ppo_max_token_len_per_gpu": 32_768},
            r"ppo_max_token_len_per_gpu=32768: actor update needs .*logits .*Or actor_rollout_ref.actor.entropy_check",
        ),
        (
            {
                f"{ACTOR}.use_dynamic_bsz": False,
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 8,
                "clipx.scope": "micro_batch",
            },
            r"ppo_micro_batch_size_per_gpu=8: actor update needs .*scope=micro_batch another size is another run",
        ),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.95}, r"gpu_memory_utilization=0\.95: generation needs"),
        ({f"{ROLLOUT}.gpu_memory_utilization": 0.2}, r"gpu_memory_utilization=0\.2: leaves .*Raise it"),
        ({f"{ROLLOUT}.free_cache_engine": False}, r"actor update needs .*rollout server that does not sleep"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_key_and_its_parts(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        estimate(changed(changes), A100)


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
    # Outside the loss, as for entropy selection.
    assert logits("actor update", actor__calculate_entropy=True, **unchunked) == 1 + 1 + 1
    assert logits("actor update", actor__calculate_entropy=True, actor__entropy_checkpointing=True) == 1 + 1
    assert logits("actor update", model__use_fused_kernels=True) == 0


def test_rollout_of_7b_by_hand():
    rollout = estimate(BASE, A100).rollout
    assert rollout.weights == PARAMETERS_7B * 2
    # 8192 tokens through a layer, and float32 logits of 512 sequences, twice.
    layer = 4 * 3584 + 2 * 3584 + 4 * 512 + 3 * 18944
    assert rollout.workspace == 8192 * layer * 2 + 512 * 152064 * 8
    assert rollout.cache == pytest.approx(0.7 * 79.1 * GIB - rollout.weights - rollout.workspace)
    assert rollout.cached_tokens == int(rollout.cache / 57344)
    assert rollout.full_length_sequences == rollout.cached_tokens // 9216
    # Mean lengths: 512 and 4096 tokens.
    assert rollout.concurrent == rollout.cached_tokens // 4608


def test_tensor_parallel_splits_weights_and_cache_until_the_heads_run_out():
    four = estimate(changed({f"{ROLLOUT}.tensor_model_parallel_size": 4}), A100).rollout
    assert four.weights == PARAMETERS_7B * 2 / 4
    assert four.cached_tokens == int(four.cache // (57344 / 4))


def test_tokens_updates_and_operations_by_hand():
    result = estimate(BASE, A100, train_prompts=5130)
    work = result.work
    # 4096 responses of 4096 tokens after prompts of 512.
    assert (work.prompt_tokens, work.response_tokens) == (4096 * 512, 4096 * 4096)
    assert (work.updates, work.observations, work.observation_seconds) == (16, 0, 0)
    # Two operations a parameter (without the embedding's lookup), and 2 * layers * heads * head width * length.
    forward = 4096 * (2 * (PARAMETERS_7B - 544_997_376) * 4608 + 2 * 28 * 3584 * 4608**2)
    speed = 8 * 312e12 * 0.35
    assert work.scoring_seconds == pytest.approx(forward / speed)
    # Forward, backward, and forward again for checkpointing.
    assert work.training_seconds == pytest.approx(4 * forward / speed)
    known = work.generation_seconds + work.scoring_seconds + work.training_seconds
    assert work.seconds == pytest.approx(1.15 * known)
    # Ten whole batches of 512, 30 epochs.
    assert result.steps == 10 * 30
    assert result.gpu_hours == pytest.approx(300 * 8 * work.seconds / 3600)


def test_generation_by_hand_without_a_tail_and_with_one():
    result = estimate(BASE, A100)
    rollout = result.rollout
    bandwidth, flops = 2.04e12 * 0.5, 312e12 * 0.35
    places = rollout.concurrent
    cached = 57344 * (512 + 2048)

    def step(concurrent):
        reading = (rollout.weights + concurrent * cached) / bandwidth
        return max(reading, 2 * (PARAMETERS_7B - 544_997_376) * concurrent / flops) + 0.006

    prefill = 512 * (2 * (PARAMETERS_7B - 544_997_376) * 512 + 2 * 28 * 3584 * 512**2) / (8 * flops)
    rounds = -(-512 // places)
    assert rounds > 1
    assert result.work.generation_seconds == pytest.approx(prefill + rounds * 4096 * step(places))

    # On 64 GPUs each has 64 responses: one round of 4096 tokens, and the longest response's other 4096 alone.
    many = estimate(changed({"trainer.nnodes": 8}), A100)
    assert many.rollout.concurrent == 64
    assert many.work.generation_seconds == pytest.approx(prefill / 8 + 4096 * step(64) + 4096 * step(1))


@pytest.mark.parametrize(
    ("overrides", "updates", "observations"),
    [
        (["+clipx=grpo"], 16, 0),
        # The first update's ratio is 1.
        (["+clipx=acpo"], 16, 15),
        (["+clipx=bapo", f"{ACTOR}.ppo_epochs=2"], 32, 31),
        (["+clipx=acpo", "clipx.scope=lagged"], 16, 0),
        (["+clipx=acpo_reference"], 16, 0),
        (["+clipx=grpo", "+clipx/update=lopti"], 32, 0),
        (["+clipx=acpo", "+clipx/update=lopti"], 32, 31),
        (["+clipx=acpo", "algorithm.rollout_correction.bypass_mode=True"], 16, 16),
        (["+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch"], 16, 16),
    ],
)
def test_updates_and_passes_for_the_statistics(overrides, updates, observations):
    work = estimate(composed(MODELS["1.5b"], *overrides), A100).work
    assert (work.updates, work.observations) == (updates, observations)
    # A pass for the statistics is a forward pass over one update's share; the update's own take four.
    assert work.observation_seconds / work.training_seconds == pytest.approx(observations / updates / 4)
    forward = work.training_seconds / 4 / (updates / 16)
    assert work.scoring_seconds in (0, pytest.approx(forward))


def test_scoring_counts_the_reference_and_what_is_bypassed():
    plain = estimate(BASE, A100).work.scoring_seconds
    assert estimate(changed({f"{ACTOR}.use_kl_loss": True}), A100).work.scoring_seconds == 2 * plain
    bypass = {"algorithm.rollout_correction.bypass_mode": True}
    assert estimate(changed(bypass), A100).work.scoring_seconds == 0


def test_steps_come_from_the_files_unless_the_run_says(tmp_path):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for path in paths:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": range(800)}), path)
    files = [str(path) for path in paths]
    assert rows_of(files) == 1600
    assert steps_of(changed({"data.train_files": files, "trainer.total_epochs": 5})) == 15
    assert steps_of(changed({"data.train_files": files, "data.train_max_samples": 600, "trainer.total_epochs": 5})) == 5
    assert steps_of(changed({"data.train_files": files, "trainer.total_training_steps": 7})) == 7
    assert steps_of(BASE) is None
    assert steps_of(BASE, 1024) == 2 * 30


def test_longer_responses_cost_more_through_their_assumption():
    short, long = (estimate(BASE, A100, Assumptions(mean_response_share=share)).work for share in (0.25, 1))
    assert long.response_tokens == 4 * short.response_tokens
    assert long.generation_seconds > 4 * short.generation_seconds
    assert long.training_seconds > 3 * short.training_seconds


SIZES = st.sampled_from(["1.5b", "3b", "7b"])


@settings(max_examples=10, deadline=None)
@given(model=SIZES, nodes=st.sampled_from([1, 2, 4, 8, 16]), temperature=st.sampled_from([0.7, 1.0]))
def test_more_nodes_never_take_more_memory_or_time(model, nodes, temperature):
    base = changed({"actor_rollout_ref.model.path": MODELS[model], f"{ROLLOUT}.temperature": temperature})
    few = estimate(changed({"trainer.nnodes": nodes}, base), A100)
    more = estimate(changed({"trainer.nnodes": 2 * nodes}, base), A100)
    for before, after in zip(few.phases, more.phases, strict=True):
        assert after.total <= before.total
    assert more.host_bytes <= few.host_bytes
    assert more.work.training_seconds <= few.work.training_seconds
    assert more.work.generation_seconds <= few.work.generation_seconds * (1 + 1e-9)
    assert more.work.prompt_tokens == few.work.prompt_tokens


@settings(max_examples=10, deadline=None)
@given(budget=st.integers(9216, 16384), more=st.integers(1, 4096), checkpointing=st.booleans())
def test_a_larger_budget_never_takes_less_memory(budget, more, checkpointing):
    def update(tokens):
        changes = {
            f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
            "actor_rollout_ref.model.path": MODELS["1.5b"],
            "actor_rollout_ref.model.enable_gradient_checkpointing": checkpointing,
        }
        gpu = replace(A100, memory=1000 * GIB)
        return phase(estimate(changed(changes), gpu), "actor update").total

    assert update(budget + more) > update(budget)


def test_keys_that_the_groups_set_change_no_mathematics():
    """A list to be extended on purpose: keys that place a run on its machine."""
    from hydra import compose, initialize_config_dir

    from tests.reproduction.runs import CONFIGS, VERL_CONFIGS

    allowed = {
        "trainer": {"device", "nnodes", "n_gpus_per_node"},
        "actor_rollout_ref.model": {
            "use_remove_padding",
            "enable_gradient_checkpointing",
            "enable_activation_offload",
            "override_config.attn_implementation",
        },
        ACTOR: {
            "strategy",
            "use_dynamic_bsz",
            "ppo_max_token_len_per_gpu",
            "ulysses_sequence_parallel_size",
            "entropy_from_logits_with_chunking",
            "fsdp_config.param_offload",
            "fsdp_config.optimizer_offload",
            "fsdp_config.offload_policy",
            "fsdp_config.reshard_after_forward",
            "fsdp_config.use_no_sync_for_gradient_accumulation",
            "fsdp_config.fsdp_size",
        },
        "actor_rollout_ref.ref": {"entropy_from_logits_with_chunking"},
        ROLLOUT: {
            "name",
            "tensor_model_parallel_size",
            "gpu_memory_utilization",
            "free_cache_engine",
            "enforce_eager",
            "enable_chunked_prefill",
            "max_num_batched_tokens",
            "max_num_seqs",
        },
    }
    allowed = {f"{node}.{key}" for node, keys in allowed.items() for key in keys}
    with initialize_config_dir(str(VERL_CONFIGS), version_base=None):
        known = compose("ppo_trainer", [f"hydra.searchpath=[file://{CONFIGS}]"])
    for path in (CONFIGS / "hardware").rglob("*.yaml"):
        if path.stem == "cpu":
            continue
        keys = set(leaves(OmegaConf.load(path))) - {"defaults"}
        assert keys <= allowed, path
        for key in keys - {"actor_rollout_ref.model.override_config.attn_implementation"}:
            parent, _, leaf = key.rpartition(".")
            assert leaf in list(OmegaConf.select(known, parent)), (path, key)


def leaves(node, prefix: str = ""):
    """Dotted keys of a tree's leaves."""
    for key, value in node.items():
        if OmegaConf.is_dict(value):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
