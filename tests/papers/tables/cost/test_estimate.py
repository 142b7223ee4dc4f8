"""What fits and what is refused, and what must hold whatever the assumptions are.

Not covered: whether the estimate is right. No GPU was used; docs/dev/hardware.md says what that leaves open.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import open_dict

from tests.papers.tables.runs import ACTOR, MODELS, ROLLOUT, changed, composed, phase
from verl_clipx.papers.tables.cost.assumptions import A100, GIB, H100
from verl_clipx.papers.tables.cost.estimate import estimate
from verl_clipx.papers.tables.divisibility import ConfigurationError


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
    assert estimate(changed(long, one), H100).run.layout.longest == 66560


def test_a_whole_gradient_on_each_gpu_does_not_fit_beside_7b_on_four():
    key = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
    with pytest.raises(ConfigurationError, match=r"use_no_sync_for_gradient_accumulation=True: .*Set it to False"):
        estimate(composed(MODELS["7b"], f"{key}=True", hardware="a100x4"), A100)
    # As verl 0.9.0 composes it: without the key, and so that it can't be switched off.
    without_the_key = composed(MODELS["7b"], hardware="a100x4").copy()
    with open_dict(without_the_key):
        del without_the_key.actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation
    with pytest.raises(ConfigurationError, match=r"gradient_accumulation=None: .*lacks the key; use verl 0\.9\.1"):
        estimate(without_the_key, A100)


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


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    model=st.sampled_from(["1.5b", "3b", "7b"]),
    nodes=st.sampled_from([1, 2, 4, 8, 16]),
    temperature=st.sampled_from([0.7, 1.0]),
)
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
