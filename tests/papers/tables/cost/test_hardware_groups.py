"""The groups of configs/hardware: models fit on their machines, and their keys place a run and change nothing else."""

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.papers.tables.runs import ACTOR, CONFIGS, MODELS, ROLLOUT, VERL_CONFIGS, composed
from verl_clipx.papers.tables.cost.assumptions import A100, H100
from verl_clipx.papers.tables.cost.estimate import estimate


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["a100x4", "a100x8", "h100x8"])
@pytest.mark.parametrize("model", ["1.5b", "3b", "7b"])
def test_machines_hold_models_up_to_8b(hardware, model):
    result = estimate(composed(MODELS[model], hardware=hardware), H100 if hardware == "h100x8" else A100)
    assert result.run.layout.gpus == (4 if hardware == "a100x4" else 8)
    assert result.rollout.full_length_sequences > 20


@pytest.mark.slow
def test_size_groups():
    assert estimate(composed(MODELS["14b"], "+hardware/model=14b"), A100).run.layout.sequence_parallel == 2
    long = ["+hardware/response=64k", "data.max_response_length=65536"]
    assert estimate(composed(MODELS["7b"], *long), H100).run.layout.data_parallel == 2
    two_nodes = ["+hardware/model=32b", "trainer.nnodes=2", "data.max_response_length=65536"]
    assert estimate(composed(MODELS["32b"], *two_nodes), A100).run.layout.replicas == 4


def test_keys_that_the_groups_set_change_no_mathematics():
    """A list to be extended on purpose: keys that place a run on its machine, which every verl from 0.9.0 on has."""
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
