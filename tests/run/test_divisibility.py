"""What does not divide in a run: by hand, and against verl's functions that stop a run which does not divide. Not
covered: attention heads, which depend on the model.
"""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.engine_workers import TrainingWorker

from tests.claims.configuration import parse
from tests.composition import composition
from verl_clipx.run.divisibility import what_does_not_divide

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
# Beneath the plugin's, which takes the name over.
WORKER_OF_VERL = TrainingWorker.__bases__[-1]
# DGPO's batches: 512 prompts, 32 of them a mini-batch, 8 responses each.
BASE = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=512",
    "data.max_prompt_length=1024",
    "data.max_response_length=8192",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=9216",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
)


def keys_refused(changes):
    """KEY=VALUE of each message about what does not divide, of a run with some keys changed."""
    config = composition(*BASE)
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return [message.partition(": ")[0] for message in what_does_not_divide(config)]


def verl_trains(rows_per_rank, mini_batch_rows, data_parallel):
    """Whether verl's worker accepts a mini-batch."""
    engine = SimpleNamespace(
        get_data_parallel_size=lambda: data_parallel,
        get_data_parallel_rank=lambda: 0,
        train_mode=mock.Mock(side_effect=SystemExit),
    )
    data = TensorDict({"responses": torch.zeros(rows_per_rank, 1)}, batch_size=[rows_per_rank])
    tu.assign_non_tensor(data, mini_batch_size=mini_batch_rows)
    try:
        inspect.unwrap(WORKER_OF_VERL.train_mini_batch)(SimpleNamespace(engine=engine), data)
    # Thrown by the engine that it came to.
    except SystemExit:
        return True
    except AssertionError:
        return False


def verl_pads_nothing(prompts, mini_batch, samples, data_parallel):
    """Whether verl's v1 trainer leaves a rollout batch without padding sequences."""
    config = composition(*BASE, f"{ACTOR}.ppo_mini_batch_size={mini_batch}", f"{ROLLOUT}.n={samples}")
    trainer = SimpleNamespace(config=config, use_critic=False, global_steps=1)
    return prompts * samples % PPOTrainer._get_required_batch_multiple(trainer, data_parallel) == 0


@settings(max_examples=25, deadline=None)
@given(nodes=st.integers(1, 4), prompts=st.integers(1, 64), mini_batch=st.integers(1, 64), samples=st.integers(1, 8))
def test_what_is_accepted_is_what_verl_trains_without_padding(nodes, prompts, mini_batch, samples):
    keys = keys_refused(
        {
            "trainer.nnodes": nodes,
            "data.train_batch_size": prompts,
            f"{ACTOR}.ppo_mini_batch_size": mini_batch,
            f"{ROLLOUT}.n": samples,
        }
    )
    ranks = 8 * nodes
    rows = prompts * samples
    trains = rows % ranks == 0 and verl_trains(rows // ranks, mini_batch * samples, ranks)
    accepted = trains and verl_pads_nothing(prompts, mini_batch, samples, ranks)
    assert keys == ([] if accepted else [f"{ACTOR}.ppo_mini_batch_size={mini_batch}"])


TOKENS_PER_GPU = f"{ACTOR}.ppo_max_token_len_per_gpu"
MICRO_BATCH_SIZE = f"{ACTOR}.ppo_micro_batch_size_per_gpu"


def test_token_budgets_and_micro_batches_are_refused_as_verl_refuses_them():
    batch = TensorDict({"input_ids": torch.ones(2, 9216), "attention_mask": torch.ones(2, 9216)}, batch_size=[2])
    assert keys_refused({}) == [] and len(rearrange_micro_batches(batch, max_token_len=9216)[0]) == 2
    assert f"{TOKENS_PER_GPU}=9215" in keys_refused({TOKENS_PER_GPU: 9215})
    with pytest.raises(AssertionError, match="max_token_len must be greater"):
        rearrange_micro_batches(batch, max_token_len=9215)
    # Two GPUs that share the sequence have the double budget.
    assert keys_refused({TOKENS_PER_GPU: 4608, f"{ACTOR}.ulysses_sequence_parallel_size": 2}) == []
    rows = TensorDict({"responses": torch.zeros(32, 1)}, batch_size=[32])
    tu.assign_non_tensor(rows, use_dynamic_bsz=False, micro_batch_size_per_gpu=8)
    assert (
        keys_refused({f"{ACTOR}.use_dynamic_bsz": False, MICRO_BATCH_SIZE: 8}) == []
        and len(prepare_micro_batches(rows)[0]) == 4
    )
    tu.assign_non_tensor(rows, micro_batch_size_per_gpu=5)
    assert keys_refused({f"{ACTOR}.use_dynamic_bsz": False, MICRO_BATCH_SIZE: 5}) == [f"{MICRO_BATCH_SIZE}=5"]
    with pytest.raises(AssertionError, match="must be divisible"):
        prepare_micro_batches(rows)


REFERENCE = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
ULYSSES = "ulysses_sequence_parallel_size"
# 30 prompts of 8 responses for 8 GPUs divide, but not 512 prompts by 30.
MINI_BATCH_OF_30 = f"{ACTOR}.ppo_mini_batch_size=30"


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ("trainer.nnodes=-1", "trainer.nnodes=-1"),
        ("trainer.n_gpus_per_node=True", "trainer.n_gpus_per_node=True"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=3", f"{ACTOR}.ulysses_sequence_parallel_size=3"),
        # verl's older key, if it is above 1, overrides the newer one.
        (f"{ACTOR}.fsdp_config.{ULYSSES}=3", f"{ACTOR}.fsdp_config.{ULYSSES}=3"),
        (f"{ACTOR}.{ULYSSES}=2 {ACTOR}.fsdp_config.{ULYSSES}=3", ""),
        # What cannot be divided by.
        (f"{ACTOR}.{ULYSSES}=0", f"{ACTOR}.{ULYSSES}=0"),
        (f"{ACTOR}.{ULYSSES}=null", f"{ACTOR}.{ULYSSES}=null"),
        (f"{ACTOR}.fsdp_config.{ULYSSES}=0", f"{ACTOR}.fsdp_config.{ULYSSES}=0"),
        (f"{ACTOR}.use_dynamic_bsz=False {MICRO_BATCH_SIZE}=0", f"{MICRO_BATCH_SIZE}=0"),
        (f"{TOKENS_PER_GPU}=null", f"{TOKENS_PER_GPU}=null {ROLLOUT}.log_prob_max_token_len_per_gpu=null"),
        (f"{ROLLOUT}.tensor_model_parallel_size=0", f"{ROLLOUT}.tensor_model_parallel_size=0"),
        (f"{ROLLOUT}.data_parallel_size=null", f"{ROLLOUT}.data_parallel_size=null"),
        ("data.gen_batch_size=many", "data.gen_batch_size=many"),
        (f"{ACTOR}.fsdp_config.fsdp_size=null", f"{ACTOR}.fsdp_config.fsdp_size=null"),
        (f"{ACTOR}.fsdp_config.fsdp_size=4", ""),
        (f"{ROLLOUT}.tensor_model_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size=3"),
        (f"trainer.nnodes=2 {ROLLOUT}.tensor_model_parallel_size=16", ""),
        # Only where there is a reference model.
        (f"{REFERENCE}=100", ""),
        (f"{REFERENCE}=100 {ACTOR}.use_kl_loss=True", f"{REFERENCE}=100"),
        # Several at once.
        (
            f"data.gen_batch_size=100 {ACTOR}.fsdp_config.fsdp_size=3",
            f"data.gen_batch_size=100 {ACTOR}.fsdp_config.fsdp_size=3",
        ),
        # Engines and trainers that divide a run in their own way.
        (f"{ACTOR}.strategy=megatron {MINI_BATCH_OF_30}", ""),
        (f"trainer.v1.trainer_mode=separate_async {MINI_BATCH_OF_30}", ""),
        (f"trainer.v1.trainer_mode=separate_async trainer.use_v1=False {MINI_BATCH_OF_30}", MINI_BATCH_OF_30),
    ],
)
def test_each_rule_names_its_key_and_value(overrides, refused):
    assert keys_refused(parse(*overrides.split())) == refused.split()
