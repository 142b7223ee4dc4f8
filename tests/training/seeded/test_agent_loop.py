"""Seeds of single samples, the agent loop that sets them, with verl's own loop replaced by a recorder, and the Hydra
group that chooses it. Not covered: that Ray workers know it, and that whole runs repeat
(tests/end_to_end/test_resume.py).
"""

import asyncio
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from tests.composition import composition
from verl_clipx.training.seeded import AGENT_LOOP
from verl_clipx.training.seeded.agent_loop import SeededSingleTurnAgentLoop, sampling_seed

MESSAGES = [{"role": "user", "content": "2 3 = 5"}]


def test_the_seed_is_the_first_31_bits_of_a_sha256_and_every_argument_counts():
    # Every process and machine has to find this value:
    # printf '%s' '[42, 3, 7, 1, [{"content": "2 3 = 5", "role": "user"}]]' | sha256sum
    assert sampling_seed(42, 3, 7, 1, MESSAGES) == 0x48F4AFD5 >> 1
    other_messages = [{"role": "user", "content": "2 3 = 6"}]
    arguments = itertools.product(range(3), range(5), range(16), range(8), (MESSAGES, other_messages))
    seeds = [sampling_seed(*combination) for combination in arguments]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    # Not only the low half of the range: the mean of 3840 uniform numbers, to six standard errors.
    assert np.mean(seeds) / 2**31 == pytest.approx(0.5, abs=6 * 12**-0.5 * len(seeds) ** -0.5)
    # A message may hold what JSON does not know.
    first, second = ([{"role": "user", "content": [{"type": "image", "image": object()}]}] for _ in range(2))
    assert sampling_seed(0, 1, 2, 3, first) == sampling_seed(0, 1, 2, 3, second)


@pytest.fixture
def calls_of_verl(monkeypatch):
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


def test_every_request_has_its_own_seed_and_the_shared_parameters_stay(calls_of_verl):
    shared = {"temperature": 0.7}
    outputs = [run(shared, session_id=session) for session in range(4)]
    assert shared == {"temperature": 0.7}
    for session, (call, output) in enumerate(zip(calls_of_verl, outputs, strict=True)):
        seed = sampling_seed(42, 3, 7, session, MESSAGES)
        assert call == {"temperature": 0.7, "seed": seed}
        assert output.extra_fields["sampling_seed"] == seed
    assert outputs[0].extra_fields["prompt_index"] == 7 and outputs[0].extra_fields["kept"] == 1
    # The type that verl carries a field in does not matter.
    for index in (np.int64(7), torch.tensor(7), np.array(7)):
        run({}, index=index, global_steps=np.int32(3))
    assert {call["seed"] for call in calls_of_verl[4:]} == {sampling_seed(42, 3, 7, 1, MESSAGES)}


def test_the_older_trainer_is_refused():
    loop = object.__new__(SeededSingleTurnAgentLoop)
    with pytest.raises(ValueError, match=r"no global_steps, session_id; .* trainer\.use_v1=True"):
        asyncio.run(loop.run({}, raw_prompt=MESSAGES, index=7))


@pytest.mark.parametrize("overrides", [(), ("+clipx=acpo",), ("+clipx/rollout=seeded",)])
def test_verl_knows_the_agent_loop_in_the_worker_of_a_run_that_chooses_it_and_in_no_other(monkeypatch, overrides):
    monkeypatch.delitem(_agent_loop_registry, AGENT_LOOP, raising=False)
    monkeypatch.delitem(sys.modules, SeededSingleTurnAgentLoop.__module__)
    config = composition(*overrides)
    # Everything that the worker is built from comes after its rollout's configuration.
    monkeypatch.setattr(agent_loop, "omega_conf_to_dataclass", lambda node: node)
    monkeypatch.setattr(agent_loop, "get_dataset_class", lambda _: None)
    config.actor_rollout_ref.model = {"tokenizer": None, "processor": None, "hf_config": {}}
    agent_loop.AgentLoopWorker(config, None)
    chosen = config.actor_rollout_ref.rollout.agent.default_agent_loop
    expected = f"{sampling_seed.__module__}.SeededSingleTurnAgentLoop" if "seeded" in str(overrides) else None
    assert _agent_loop_registry.get(AGENT_LOOP, {}).get("_target_") == expected
    assert (chosen == AGENT_LOOP) == (expected is not None) and chosen in _agent_loop_registry


MODULE_BY_SAMPLER = {
    "seeded": "pkg://verl_clipx.training.seeded.sampler",
    "frequent_polling": "pkg://verl_clipx.training.cpu.replay_buffer",
}


@pytest.mark.parametrize(
    ("overrides", "sampler", "arguments", "dtype"),
    [
        pytest.param(
            "+clipx/rollout=seeded +clipx=grpo actor_rollout_ref.rollout.name=vllm",
            "seeded",
            {"poll_interval": None, "rollout_name": "vllm"},
            "bfloat16",
            id="not on a cpu",
        ),
        pytest.param(
            "+hardware=cpu +clipx/rollout=seeded",
            "seeded",
            {"poll_interval": 0.2, "rollout_name": "cpu"},
            "float64",
            id="after the hardware",
        ),
        pytest.param(
            "+clipx/rollout=seeded +hardware=cpu",
            "seeded",
            {"poll_interval": 0.2, "rollout_name": "cpu"},
            "float64",
            id="before the hardware",
        ),
        # The hardware's sampler and precision stay.
        pytest.param(
            "+hardware=cpu",
            "frequent_polling",
            {"poll_interval": 0.2, "rollout_name": None},
            "float32",
            id="without the group",
        ),
    ],
)
def test_the_groups_sampler_is_chosen_in_any_order_and_only_on_a_cpu_a_higher_precision(
    overrides, sampler, arguments, dtype
):
    config = composition(*overrides.split())
    node = config.trainer.v1.sampler
    assert node.custom_sampler == {"path": MODULE_BY_SAMPLER[sampler], "name": sampler}
    assert {name: node.sampler_kwargs.get(name) for name in arguments} == arguments
    assert config.actor_rollout_ref.rollout.dtype == dtype
