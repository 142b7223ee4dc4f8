"""Options of verl's engine through the real verl, ACPO on fresh samples: what support.py says of them.

In each, with `-m matrix`, ACPO's bounds adapt, metrics are of every token and finite, and the rollout has the weights
that were trained. Not covered: that no option changes bounds or gradients (test_invariance.py), GPUs, LoRA's adapters
in a rollout (the CPU's takes merged ones alone).
"""

import math
import shutil
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM

from .options_in_workers import options_of
from .runs import SECONDS, Run, check_receipt, launch, loading, metrics_of, output_of
from .test_trainers import check_adapted, train_acpo

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"
TWO_RANKS = "trainer.n_gpus_per_node=2"
PACKING = f"{MODEL}.use_remove_padding=True"
TOGETHER = (
    *(PACKING, f"{MODEL}.enable_gradient_checkpointing=True"),
    *(f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=200"),
    *(f"{FSDP}.param_offload=True", f"{FSDP}.optimizer_offload=True"),
    *(f"{ACTOR}.entropy_from_logits_with_chunking=True", f"{ACTOR}.entropy_from_logits_chunk_size=16"),
    f"{ACTOR}.calculate_entropy=True",
)
ULYSSES = (
    *(PACKING, f"{ACTOR}.ulysses_sequence_parallel_size=2"),
    f"{MODEL}.override_config.attn_implementation=flash_attention_2",
)

# Has a worker print what of them is in force.
SHOWN = loading("options_in_workers")


def check_together(run: Run) -> None:
    """In the worker each of `TOGETHER` is in force."""
    found = options_of(run.output)
    assert found["offload"] == [True, True] and found["sent to"][-1] == "cpu" and len(found["sent to"]) >= 2
    assert found["chunked entropy"] and found["gradient checkpointing"]
    # Packed into one row.
    assert set(found["rows of inputs"]) == {1}
    assert (run.log["actor/entropy"] > 0).all()


def check_run(run: Run, *, rollout_difference: float = 1e-4, tolerance: float = 1e-3) -> None:
    """What holds of two steps under every option; the rollout has the trained weights, but for the difference."""
    check_adapted(run, [1, 2], updates=2, tolerance=tolerance)
    for metric in check_receipt(run).filter(regex="^actor/"):
        assert run.log[metric].map(math.isfinite).all(), metric
    assert run.log["training/rollout_probs_diff_max"].max() < rollout_difference


def test_two_ranks_share_sequences(task, tmp_path):
    check_run(train_acpo(task, tmp_path, TWO_RANKS, *ULYSSES, environment=loading("flash_attention")))


def test_lora_merged_for_the_rollout(task, tmp_path):
    adapter = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8", f"{MODEL}.lora.merge=True")
    run = train_acpo(task, tmp_path, *adapter, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.optim.lr=1e-2")
    # verl rounds merged weights to bfloat16, whatever the rollout's precision is.
    check_run(run, rollout_difference=0.02)
    # The reference is the model without its adapter, from which the first step led away; the rollout went with it.
    assert abs(run.log["rollout_corr/kl"][2]) < 0.1 * run.log["actor/kl_loss"][1]


def test_fused_kernels_under_hybrid_sharding(task, tmp_path):
    policy = tmp_path / "tied"
    shutil.copytree(task.policy, policy)
    model = AutoModelForCausalLM.from_pretrained(policy)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(policy)
    fused = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend=torch", PACKING)
    sharded = ("trainer.n_gpus_per_node=4", f"{FSDP}.fsdp_size=2")
    check_run(train_acpo(replace(task, policy=policy), tmp_path, *sharded, *fused))


def test_bfloat16(task, tmp_path):
    run = train_acpo(task, tmp_path, f"{FSDP}.mixed_precision.param_dtype=bf16")
    # The rollout stays in float32.
    # Both passes round, also where the first update's bounds are those at ratio 1.
    check_run(run, rollout_difference=0.05, tolerance=0.3)
    assert run.log["training/rollout_probs_diff_max"].max() > 1e-4


def test_a_run_that_another_worker_trains_stops_before_its_first_step(task, tmp_path):
    process = launch(task, tmp_path, "+clipx=grpo", steps=3, environment=loading("verl_s_worker_in_workers"))
    assert process.wait(timeout=SECONDS) != 0
    # The registered loss refuses; what never calls it the trainer stops (tests/worker/test_receipt.py).
    message = "RuntimeError: clipx_grpo is called by verl's ppo_loss in a worker without the plugin's"
    assert message in output_of(tmp_path)
    assert not metrics_of(tmp_path).read_text()
