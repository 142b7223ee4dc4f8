"""The division of a run over its GPUs: by hand, and against verl's functions that stop a run which does not divide.

Not covered: verl's checks inside vLLM's processes (the split of the heads over tensor-parallel ranks is vLLM's own).
"""

import inspect
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.engine_workers import TrainingWorker

from tests.papers.tables.runs import ACTOR, BASE, changed
from verl_clipx.papers.tables.divisibility import ConfigurationError, layout_of
from verl_clipx.papers.tables.models import QWEN_7B, QWEN_14B

# Beneath the plugin's, which takes the name over.
WORKER_OF_VERL = TrainingWorker.__bases__[-1]


class Reached(Exception):
    """verl went past its checks."""


def verl_trains(rows_per_rank: int, mini_batch_rows: int, data_parallel: int) -> bool:
    """Whether verl's worker accepts a mini-batch."""

    @contextmanager
    def train_mode(**kwargs):
        raise Reached
        yield

    engine = SimpleNamespace(
        get_data_parallel_size=lambda: data_parallel, get_data_parallel_rank=lambda: 0, train_mode=train_mode
    )
    data = TensorDict({"responses": torch.zeros(rows_per_rank, 1)}, batch_size=[rows_per_rank])
    tu.assign_non_tensor(data, mini_batch_size=mini_batch_rows)
    try:
        inspect.unwrap(WORKER_OF_VERL.train_mini_batch)(SimpleNamespace(engine=engine), data)
    except Reached:
        return True
    except AssertionError:
        return False


def verl_pads_nothing(config, data_parallel: int) -> bool:
    """Whether verl's v1 trainer leaves a rollout batch without padding sequences."""
    trainer = SimpleNamespace(config=config, use_critic=False, global_steps=1)
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return rows % PPOTrainer._get_required_batch_multiple(trainer, data_parallel) == 0


def test_dgpos_batches_on_one_and_on_four_nodes():
    layout = layout_of(BASE, QWEN_7B)
    assert (layout.gpus, layout.shards, layout.data_parallel, layout.replicas) == (8, 8, 8, 8)
    assert (layout.rows, layout.rows_per_rank, layout.updates_per_epoch) == (4096, 512, 16)
    assert (layout.mini_batch_rows, layout.mini_batch_rows_per_rank, layout.longest) == (256, 32, 9216)

    layout = layout_of(changed({"trainer.nnodes": 4, f"{ACTOR}.ulysses_sequence_parallel_size": 4}), QWEN_7B)
    assert (layout.gpus, layout.shards, layout.data_parallel, layout.replicas) == (32, 32, 8, 32)
    assert (layout.rows_per_rank, layout.mini_batch_rows_per_rank) == (512, 32)

    layout = layout_of(changed({"actor_rollout_ref.rollout.tensor_model_parallel_size": 4}), QWEN_7B)
    assert (layout.replicas, layout.gpus_per_replica) == (2, 4)


def test_the_parameters_can_be_shared_within_a_node_only():
    layout = layout_of(changed({"trainer.nnodes": 2, f"{ACTOR}.fsdp_config.fsdp_size": 8}), QWEN_7B)
    assert (layout.gpus, layout.shards) == (16, 8)


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.integers(1, 4),
    prompts=st.integers(1, 64),
    mini_batch=st.integers(1, 64),
    samples=st.integers(1, 8),
)
def test_what_is_accepted_is_what_verl_trains_without_padding(nodes, prompts, mini_batch, samples):
    config = changed(
        {
            "trainer.nnodes": nodes,
            "data.train_batch_size": prompts,
            f"{ACTOR}.ppo_mini_batch_size": mini_batch,
            "actor_rollout_ref.rollout.n": samples,
        }
    )
    ranks = 8 * nodes
    rows, mini_batch_rows = prompts * samples, mini_batch * samples
    trains = rows % ranks == 0 and verl_trains(rows // ranks, mini_batch_rows, ranks)
    try:
        layout = layout_of(config, QWEN_7B)
    except ConfigurationError as error:
        assert error.key == f"{ACTOR}.ppo_mini_batch_size"
        assert not (trains and verl_pads_nothing(config, ranks))
    else:
        assert trains and verl_pads_nothing(config, ranks)
        assert layout.updates_per_epoch * layout.mini_batch_rows_per_rank == layout.rows_per_rank


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 10, 20])
@pytest.mark.parametrize("shape", [QWEN_7B, QWEN_14B], ids=["28 heads", "40 heads"])
def test_sequence_parallel_sizes_are_those_of_verl(size, shape):
    class Config:
        num_attention_heads, num_key_value_heads = shape.num_attention_heads, shape.num_key_value_heads

        @property
        def model_type(self):
            raise Reached

    model = type("Model", (), {"config": Config()})()
    try:
        apply_monkey_patch(model, ulysses_sp_size=size)
    except Reached:
        accepted = True
    except AssertionError:
        accepted = False
    config = changed(
        {
            # 240 GPUs, so that every size above divides them.
            "trainer.nnodes": 30,
            f"{ACTOR}.ulysses_sequence_parallel_size": size,
            f"{ACTOR}.ppo_mini_batch_size": 240,
            "data.train_batch_size": 240,
        }
    )
    if accepted:
        assert layout_of(config, shape).data_parallel == 240 // size
    else:
        with pytest.raises(ConfigurationError, match=f"ulysses_sequence_parallel_size={size}: .*attention heads"):
            layout_of(config, shape)


def test_a_token_budget_below_the_longest_sequence_is_refused_as_verl_refuses_such_a_sequence():
    budgets = {f"{ACTOR}.ppo_max_token_len_per_gpu": 9216, f"{ACTOR}.ulysses_sequence_parallel_size": 1}
    assert layout_of(changed(budgets), QWEN_7B).longest == 9216
    short = {**budgets, f"{ACTOR}.ppo_max_token_len_per_gpu": 9215}
    with pytest.raises(ConfigurationError, match=r"ppo_max_token_len_per_gpu=9215: .*Set at least 9216"):
        layout_of(changed(short), QWEN_7B)
    # Two GPUs that share the sequence have the double budget.
    shared = {f"{ACTOR}.ppo_max_token_len_per_gpu": 4608, f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    assert layout_of(changed(shared), QWEN_7B).sequence_parallel == 2

    batch = TensorDict({"input_ids": torch.ones(2, 9216), "attention_mask": torch.ones(2, 9216)}, batch_size=[2])
    assert len(rearrange_micro_batches(batch, max_token_len=9216)[0]) == 2
    with pytest.raises(AssertionError, match="max_token_len must be greater"):
        rearrange_micro_batches(batch, max_token_len=9215)


@pytest.mark.parametrize(("size", "divides"), [(8, True), (32, True), (5, False), (64, False)])
def test_micro_batches_by_sequences_divide_a_ranks_mini_batch_as_verl_wants_it(size, divides):
    data = TensorDict({"responses": torch.zeros(32, 1)}, batch_size=[32])
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=size)
    static = {
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": size,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    }
    if divides:
        assert len(prepare_micro_batches(data)[0]) == 32 // size
        assert layout_of(changed(static), QWEN_7B).mini_batch_rows_per_rank == 32
    else:
        with pytest.raises(AssertionError, match="must be divisible"):
            prepare_micro_batches(data)
        with pytest.raises(ConfigurationError, match=f"ppo_micro_batch_size_per_gpu={size}: .*the 32 responses"):
            layout_of(changed(static), QWEN_7B)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.nnodes": 0}, r"trainer\.nnodes=0"),
        ({f"{ACTOR}.ppo_mini_batch_size": 30}, r"ppo_mini_batch_size=30: does not divide data\.train_batch_size=512"),
        ({"trainer.nnodes": 64}, r"ppo_mini_batch_size=32: .*512 data-parallel ranks.*Use a multiple of 64 prompts"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 3}, r"ulysses_sequence_parallel_size=3: does not divide the 8"),
        ({f"{ACTOR}.fsdp_config.fsdp_size": 3}, r"fsdp_size=3: does not divide the 8 GPUs"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 3}, r"tensor_model_parallel_size=3: .*3 GPUs"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 8}, r"tensor_model_parallel_size=8: .*28 attention"),
        ({f"{ACTOR}.strategy": "megatron"}, r"strategy=megatron: not covered"),
        ({"actor_rollout_ref.model.lora_rank": 8}, r"lora_rank=8: not covered"),
        ({"actor_rollout_ref.model.use_remove_padding": False}, r"use_remove_padding=False: not covered"),
        ({"algorithm.adv_estimator": "gae"}, r"adv_estimator=gae: not covered"),
        ({"trainer.v1.trainer_mode": "separate_async"}, r"trainer_mode=separate_async: not covered"),
        ({"actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": False}, r"log_prob_use_dynamic_bsz=False: must equal"),
        ({"data.gen_batch_size": 100}, r"gen_batch_size=100: does not divide"),
        # From here on verl's own checks, and those of the method's node.
        ({f"{ACTOR}.loss_agg_mode": "token-median"}, r"verl refuses it: .*token-median"),
        ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}, r"verl refuses it: .*loss_scale_factor"),
        ({"clipx.clip_low": "???"}, r"^clipx\.clip_low=\?\?\?: has no value"),
        ({"clipx.clip_low": 1.5}, r"verl refuses it: .*clip_low"),
    ],
)
def test_refusals_name_the_key_the_value_and_what_to_do(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        layout_of(changed(changes), QWEN_7B)


def test_a_reference_models_budget_counts_only_where_there_is_one():
    changes = {"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 100}
    assert layout_of(changed(changes), QWEN_7B).gpus == 8
    with pytest.raises(ConfigurationError, match=r"actor_rollout_ref\.ref\.log_prob_max_token_len_per_gpu=100"):
        layout_of(changed({**changes, f"{ACTOR}.use_kl_loss": True}), QWEN_7B)
