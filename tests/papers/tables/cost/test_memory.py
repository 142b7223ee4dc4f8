"""Memory of the phases, the rollout server and the host, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.papers.tables.runs import ACTOR, BASE, MODELS, PARAMETERS_7B, ROLLOUT, changed, phase
from verl_clipx.papers.tables.cost.assumptions import A100, GIB
from verl_clipx.papers.tables.cost.estimate import estimate


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


@pytest.mark.slow
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
