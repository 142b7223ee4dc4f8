"""Which of verl's options tests have run, and what of them only a worker can see; docs/support.md's lists. Not covered:
that what is said to run does (the tests that RUN_BY names).
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.engine import FSDPTurboEngineWithLMHead

from tests.claims.configuration import ACTOR, decided
from verl_clipx.run.support import UNTESTED, untested
from verl_clipx.worker.extra_pass import refuse_attention_on_a_slice
from verl_clipx.worker.state import state_rank

REPOSITORY, MODELS = Path(__file__).parents[2], Path(__file__).parent / "fixtures" / "models"
STRATEGY, NAME, ESTIMATOR = f"{ACTOR}.strategy", "actor_rollout_ref.rollout.name", "algorithm.adv_estimator"
PATH, BYPASS = "actor_rollout_ref.model.path", "algorithm.rollout_correction.bypass_mode"
OTHER, MEGATRON = "other devices than cuda and cpu", f"{STRATEGY}=megatron"
REPLAY = "router replay under Megatron"
# A run of what tests ran.
RUN = (f"{STRATEGY}=fsdp2", f"{NAME}=vllm", f"{ESTIMATOR}=grpo", f"{PATH}={MODELS / 'tied'}")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        *((words, []) for words in ((), (f"{NAME}=cpu",), (f"{ESTIMATOR}=rloo",), ("trainer.use_v1=False",))),
        ((f"{BYPASS}=True",), []),
        *(((words,), [words]) for words in (f"{STRATEGY}=fsdp", f"{STRATEGY}=megatron", f"{NAME}=sglang")),
        ((f"{ESTIMATOR}=optimal_token_baseline",), [f"{ESTIMATOR}=optimal_token_baseline"]),
        ((f"{ACTOR}.qat.enable=True",), ["QAT"]),
        ((f"{PATH}={MODELS / 'of_images'}",), ["images and videos"]),
        ((f"{BYPASS}=True", "trainer.use_v1=False"), ["bypass mode, v0 trainer"]),
        (("algorithm.filter_groups.enable=True",), ["group filtering"]),
        *((("trainer.device=" + device,), [OTHER] * (device in ("npu", "xpu"))) for device in ("npu", "xpu", "cpu")),
        *(
            ((f"{STRATEGY}=megatron", f"+{ACTOR}.megatron.router_replay.mode={mode}"), [MEGATRON, *names])
            for mode, names in (("R2", [REPLAY]), ("R3", [REPLAY]), ("disabled", []))
        ),
    ],
)
def test_an_option_that_no_test_ran_is_named_and_the_receipt_only_warns(overrides, names):
    _, decision = decided("+clipx=grpo", *RUN, *overrides)
    assert untested(decision.resolved.run.options) == names
    if names:
        assert f"; no test has run {', '.join(names)}; ratio to the policy " in decision.line
    assert names or "no test" not in decision.line


# The file of the tests that run each option.
RUN_BY = {
    "invariance": "FSDP2; packing; dynamic batch sizes; Ulysses with flash attention; gradient checkpointing; offload; "
    "hybrid sharding; chunked entropy",
    "vllm": "vLLM",
    "training": "the CPU's rollout; KL loss; bypass mode; rejection in bypass mode; v1 trainer; GRPO's advantages",
    "gpu": "fused kernels; bfloat16",
    "options": "LoRA; several epochs; rollout correction; v0 trainer; one_step_off_policy; fully_async_policy; "
    "RLOO, REINFORCE++, GAE with a critic; several turns with tools",
    "engine": "verl's Tinker worker",
}


def test_an_option_counts_as_run_if_there_is_a_test_that_runs_it():
    page = (REPOSITORY / "docs" / "support.md").read_text()
    (listed,) = re.findall(r"\*\*Run by tests on CPUs:\*\* (.*)\.", page)
    names = re.sub(r" \([^)]*\)", "", listed).split("; ")
    assert sorted(names) == sorted("; ".join(RUN_BY.values()).split("; "))
    assert [file for file in RUN_BY if not (REPOSITORY / f"tests/end_to_end/test_{file}.py").exists()] == []
    (others,) = re.findall(r"\*\*Run by no test, .*:\*\* (.*)\.", page)
    assert [name for name in UNTESTED if name not in others] == []


@pytest.fixture
def model():
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, attn_implementation="sdpa"))


def test_a_models_attention_is_looked_at_in_the_worker(model):
    refuse_attention_on_a_slice(SimpleNamespace(module=model, ulysses_sequence_parallel_size=1))
    for module in (model, [model]):
        with pytest.raises(RuntimeError, match=r"2 ranks share a sequence .*attention is sdpa.*flash_attention_2"):
            refuse_attention_on_a_slice(SimpleNamespace(module=module, ulysses_sequence_parallel_size=2))
    model.config._attn_implementation = "flash_attention_2"
    refuse_attention_on_a_slice(SimpleNamespace(module=model, ulysses_sequence_parallel_size=2))


def test_fsdp_turbos_attention_is_its_own(model):
    """verl's engine without its package: how it takes up its own parallelism."""
    engine = object.__new__(FSDPTurboEngineWithLMHead)
    engine.module, engine.engine_config = model, SimpleNamespace(strategy="fsdp_turbo")
    engine.model_config, engine.ulysses_sequence_parallel_size = SimpleNamespace(hf_config=model.config), 1
    engine._parallel_state = SimpleNamespace(get_ulysses_group_size=lambda: 2, get_ulysses_group=lambda: None)
    engine._process_ulysses_config()
    assert model.config._attn_implementation == "eager" and engine.ulysses_sequence_parallel_size == 2
    refuse_attention_on_a_slice(engine)
    engine.engine_config.strategy = "fsdp2"
    with pytest.raises(RuntimeError, match="attention is eager"):
        refuse_attention_on_a_slice(engine)


@pytest.mark.parametrize(
    ("outputs", "dp_ranks", "expected"),
    [
        # Two stages of a pipeline with two data-parallel ranks each: the last stage has the tokens.
        ((False, False, True, True), (0, 1, 0, 1), 2),
        # FSDP with two ranks for each sequence.
        ((True, False, True, False), (0, 0, 1, 1), 0),
        ((True,), (0,), 0),
    ],
)
def test_a_rank_with_tokens_writes_the_state(monkeypatch, outputs, dp_ranks, expected):
    result, own = [], []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: own.append(int(tensor)))
    for rank, (has_outputs, dp_rank) in enumerate(zip(outputs, dp_ranks, strict=True)):
        engine = SimpleNamespace(
            is_mp_src_rank_with_outputs=lambda has_outputs=has_outputs: has_outputs,
            get_data_parallel_rank=lambda dp_rank=dp_rank: dp_rank,
        )
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        result.append(state_rank(engine, "cpu"))
    assert result == own and max(own) == expected and sum(rank >= 0 for rank in own) == 1
