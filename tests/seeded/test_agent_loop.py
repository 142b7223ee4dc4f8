"""Seeds of single samples, the agent loop that sets them, and the Hydra group that chooses it.

Covers: the seed's value, range and arguments; what the agent loop sends and returns, with verl's own loop replaced by a
recorder; the group on top of verl's configuration, with and without hardware=cpu. Not covered: that Ray workers know
the agent loop, and that whole runs repeat (tests/end_to_end/test_resume.py).
"""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from tests.composition import composition
from verl_clipx.seeded.agent_loop import NAME, SeededSingleTurnAgentLoop, sampling_seed

MESSAGES = [{"role": "user", "content": "2 3 = 5"}]


def test_the_seed_is_the_first_31_bits_of_a_sha256_and_every_argument_counts():
    # Every process and machine has to find this value:
    # printf '%s' '[42, 3, 7, 1, [{"content": "2 3 = 5", "role": "user"}]]' | sha256sum
    assert sampling_seed(42, 3, 7, 1, MESSAGES) == 0x48F4AFD5 >> 1
    other = [{"role": "user", "content": "2 3 = 6"}]
    cases = itertools.product(range(3), range(5), range(16), range(8), (MESSAGES, other))
    seeds = [sampling_seed(*case) for case in cases]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    # Not only the low half of the range: the mean of 3840 uniform numbers, to six standard errors.
    assert np.mean(seeds) / 2**31 == pytest.approx(0.5, abs=6 * 12**-0.5 * len(seeds) ** -0.5)


def test_a_message_may_hold_what_json_does_not_know():
    def with_image():
        return [{"role": "user", "content": [{"type": "image", "image": object()}, {"type": "text", "text": "what?"}]}]

    assert sampling_seed(0, 1, 2, 3, with_image()) == sampling_seed(0, 1, 2, 3, with_image())


@pytest.fixture
def sent(monkeypatch):
    """The sampling parameters that verl's agent loop gets from ours, a dict a call."""
    calls = []

    async def record(self, sampling_params, priority=0, **kwargs):
        calls.append(sampling_params)
        return AgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics(), extra_fields={"kept": 1}
        )

    monkeypatch.setattr(SingleTurnAgentLoop, "run", record)
    return calls


def run(sampling_params, **kwargs) -> AgentLoopOutput:
    loop = object.__new__(SeededSingleTurnAgentLoop)
    loop.rollout_config = SimpleNamespace(seed=42)
    fields = {"global_steps": 3, "index": 7, "session_id": 1, "raw_prompt": MESSAGES} | kwargs
    return asyncio.run(loop.run(sampling_params, **fields))


def test_every_request_has_its_own_seed_and_the_shared_parameters_stay(sent):
    shared = {"temperature": 0.7}
    outputs = [run(shared, session_id=session) for session in range(4)]
    assert shared == {"temperature": 0.7}
    assert sent == [{"temperature": 0.7, "seed": sampling_seed(42, 3, 7, session, MESSAGES)} for session in range(4)]
    assert [output.extra_fields["sampling_seed"] for output in outputs] == [call["seed"] for call in sent]
    assert outputs[0].extra_fields["prompt_index"] == 7 and outputs[0].extra_fields["kept"] == 1


def test_the_type_that_verl_carries_a_field_in_does_not_matter(sent):
    for index in (np.int64(7), torch.tensor(7), np.array(7)):
        run({}, index=index, global_steps=np.int32(3))
    assert {call["seed"] for call in sent} == {sampling_seed(42, 3, 7, 1, MESSAGES)}


def test_the_older_trainer_is_refused():
    loop = object.__new__(SeededSingleTurnAgentLoop)
    with pytest.raises(ValueError, match=r"no global_steps, session_id; .* trainer\.use_v1=True"):
        asyncio.run(loop.run({}, raw_prompt=MESSAGES, index=7))


def test_it_is_registered_under_the_name_that_the_group_chooses():
    chosen = composition("+clipx/rollout=seeded").actor_rollout_ref.rollout.agent.default_agent_loop
    assert chosen == NAME
    assert _agent_loop_registry[chosen]["_target_"] == f"{sampling_seed.__module__}.SeededSingleTurnAgentLoop"


@pytest.mark.parametrize(
    "overrides",
    [
        ("+clipx/rollout=seeded", "+clipx=grpo", "actor_rollout_ref.rollout.name=vllm"),
        ("+hardware=cpu", "+clipx/rollout=seeded"),
        ("+clipx/rollout=seeded", "+hardware=cpu"),
    ],
    ids=" ".join,
)
def test_the_groups_sampler_is_chosen_in_any_order_and_only_on_a_cpu_a_higher_precision(overrides):
    config, cpu = composition(*overrides), "+hardware=cpu" in overrides
    sampler = config.trainer.v1.sampler
    assert sampler.custom_sampler == {"path": "pkg://verl_clipx.seeded.sampler", "name": "seeded"}
    assert sampler.sampler_kwargs.get("poll_interval") == (0.2 if cpu else None)
    assert sampler.sampler_kwargs.rollout_name == ("cpu" if cpu else "vllm")
    assert config.actor_rollout_ref.rollout.dtype == ("float64" if cpu else "bfloat16")


def test_without_the_group_the_hardwares_sampler_and_precision_stay():
    config = composition("+hardware=cpu")
    sampler = config.trainer.v1.sampler.custom_sampler
    assert sampler == {"path": "pkg://verl_clipx.cpu.replay_buffer", "name": "frequent_polling"}
    assert config.actor_rollout_ref.rollout.dtype == "float32"
