"""Which of verl's options the driver refuses, and what of them only a worker can see.

Covers: every refusal through a composed configuration, with the nearest run that is served; that each untested option
is seen in one; the attention of a real model under sequence parallelism, FSDP-Turbo's own by verl's code; which rank
writes the state; docs/support.md's table; that verl can resolve what the refusals read. Not covered: that what is said
to run does (the tests that the table names).
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner
from verl.workers.engine import FSDPTurboEngineWithLMHead

from verl_clipx.cli import app
from verl_clipx.run.announcement import announcement
from verl_clipx.run.support import REFUSALS, ROWS, untested
from verl_clipx.worker.extra_pass import refuse_attention_on_a_slice
from verl_clipx.worker.state import state_rank

REPOSITORY = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
CALCULATED = f"{ROLLOUT}.calculate_log_probs=true"
VLLM, RAW = f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.logprobs_mode=raw_logprobs"
DISTILLED, BY_ITSELF = "distillation.enabled=True", "distillation.distillation_loss.use_task_rewards=False"
BYPASSED = f"{CORRECTION}.bypass_mode=True"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size=2"
SDPA = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
FLASH = "+actor_rollout_ref.model.override_config.attn_implementation=flash_attention_3"
PACKED = "actor_rollout_ref.model.use_remove_padding=True"
VEOMNI, MEGATRON = "model_engine=veomni", "model_engine=megatron"
R2 = f"{ACTOR}.veomni.router_replay.mode=R2"
DYNAMIC = (f"{ACTOR}.megatron.dynamic_context_parallel=True", f"{ACTOR}.megatron.max_seqlen_per_dp_cp_rank=100")

FUSED = ("actor_rollout_ref.model.use_fused_kernels=True", f"{ACTOR}.strategy=fsdp2")
MODELS = Path(__file__).parent / "fixtures" / "models"
UNTIED, TIED = (f"actor_rollout_ref.model.path={MODELS / name}" for name in ("untied", "tied"))

CRITIC_S_ULYSSES = (
    "critic.fsdp.ulysses_sequence_parallel_size=2",
    "+critic.model.override_config.attn_implementation=sdpa",
)

REFUSED = {
    "Ulysses with sdpa": (
        ("+clipx=grpo", ULYSSES, SDPA),
        r"ulysses_sequence_parallel_size=2 with .*attn_implementation=sdpa: .*own slice.*flash_attention_2",
    ),
    "Ulysses with sdpa, observed": (("+clipx=observe", ULYSSES, SDPA), r"attn_implementation=sdpa"),
    "Ulysses of the engine with eager": (
        (
            "+clipx=grpo",
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        ),
        r"fsdp_config\.ulysses_sequence_parallel_size=2 with .*attn_implementation=eager",
    ),
    "Ulysses of the reference": (
        ("+clipx=grpo", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", SDPA),
        r"ref\.ulysses_sequence_parallel_size=2 with actor_rollout_ref\.model\..*=sdpa",
    ),
    "VeOmni's Ulysses with sdpa": (
        ("+clipx=grpo", VEOMNI, f"{ACTOR}.veomni.ulysses_parallel_size=2", f"{ACTOR}.veomni.attn_implementation=sdpa"),
        r"veomni\.ulysses_parallel_size=2 with .*veomni\.attn_implementation=sdpa",
    ),
    "weights in bypass mode": (
        ("+clipx=acpo", f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token"),
        r"rollout_is=token with .*bypass_mode=True: .*the method acpo is already .*second time.*rollout_is=null",
    ),
    "weights on a ratio to the sampler": (
        ("+clipx=m2po", CALCULATED, f"{CORRECTION}.rollout_is=token"),
        r"rollout_is=token with clipx\.behaviour=rollout: .*second time.*rollout_is=null, or clipx\.behaviour=old",
    ),
    "verl's REINFORCE in bypass mode": (
        ("+clipx=grpo", BYPASSED, f"{CORRECTION}.loss_type=reinforce"),
        r"loss_type=reinforce under the method grpo: only verl's own bypass loss reads it.*loss_type=ppo_clip",
    ),
    "distillation without task rewards": (
        ("+clipx=acpo", DISTILLED, BY_ITSELF),
        r"use_task_rewards=False with distillation\.enabled=True: .*the method acpo would train nothing.*=True",
    ),
    "distillation without task rewards, observed": (
        ("+clipx=observe", DISTILLED, BY_ITSELF),
        r"use_task_rewards=False with distillation\.enabled=True: .*=observe would describe a loss that is not trained",
    ),
    "top_p under a ratio to the sampler": (
        ("+clipx=m2po", CALCULATED, VLLM, f"{ROLLOUT}.top_p=0.9"),
        r"top_p=0\.9, .*logprobs_mode=processed_logprobs with clipx\.behaviour=rollout: vllm's .* that is kept"
        r".*top_p=1, or .*logprobs_mode=raw_logprobs\.\"",
    ),
    "top_k in bypass mode": (
        ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.top_k=20", f"{ROLLOUT}.temperature=0.8"),
        # At another temperature the bare logits' are no remedy.
        r"top_k=20, .* with .*bypass_mode=True: .*Set actor_rollout_ref\.rollout\.top_k=-1\.\"",
    ),
    "min_p under rollout correction": (
        ("+clipx=acpo", f"{CORRECTION}.rollout_is=token", VLLM, f"+{ROLLOUT}.min_p=0.05"),
        r"min_p=0\.05, .* with .*rollout_is=token: .*Set actor_rollout_ref\.rollout\.min_p=0, or ",
    ),
    "top_p and top_k under rejection": (
        ("+clipx=acpo", f"{CORRECTION}.rollout_rs=seq_mean_k3", VLLM, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=50"),
        r"top_p=0\.9, .*top_k=50, .* with .*rollout_rs=seq_mean_k3: .*Set .*top_p=1, .*top_k=-1, or ",
    ),
    "top_p on the CPU's server": (
        ("+clipx=m2po", CALCULATED, f"{ROLLOUT}.name=cpu", f"{ROLLOUT}.top_p=0.9"),
        r"top_p=0\.9, .*processed_logprobs with .*: cpu's log-probabilities are over the tokens that truncation keeps",
    ),
    "top_p on a server that verl tells nothing": (
        ("+clipx=acpo", BYPASSED, f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9", RAW),
        r"top_p=0\.9 with .*bypass_mode=True: depending on the version of sglang, .*Set .*rollout\.top_p=1\.\"",
    ),
    "the mode of vLLM's own arguments": (
        (
            *("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.top_p=0.9", RAW),
            f"+{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=processed_logprobs",
        ),
        r"top_p=0\.9, .*engine_kwargs\.vllm\.logprobs_mode=processed_logprobs with .*bypass_mode=True",
    ),
    "bare logits at a temperature": (
        ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.temperature=0.8", RAW),
        r"logprobs_mode=raw_logprobs, .*temperature=0\.8 with .*: vllm's .* at temperature 1, the trainer's at 0\.8",
    ),
    "logits": (
        ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.logprobs_mode=raw_logits"),
        r"logprobs_mode=raw_logits with .*: vllm returns logits in place of log-probabilities\. Set .*=processed",
    ),
    "VeOmni's routers in the observation": (("+clipx=acpo", VEOMNI, R2), r"router_replay\.mode=R2 under .* acpo"),
    "VeOmni's routers under selection": (
        ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch", VEOMNI, R2),
        r"router_replay\.mode=R2 under .*clipx\.select\.over=sequence",
    ),
    "VeOmni's routers where rejection has a selection counted beforehand": (
        (
            *("+clipx=grpo", "+clipx/select=high_entropy", VEOMNI, R2),
            *(f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_rs=token_k1"),
        ),
        r"router_replay\.mode=R2 under the method grpo: the extra pass",
    ),
    "fused kernels of untied embeddings": (
        ("+clipx=grpo", *FUSED, UNTIED),
        r"use_fused_kernels=True with .*strategy=fsdp2, .*model\.path=.*untied: .*Set .*use_fused_kernels=False",
    ),
    "Megatron's dynamic context parallelism": (
        ("+clipx=grpo", MEGATRON, *DYNAMIC),
        r"megatron\.dynamic_context_parallel=True: .*data-parallel group",
    ),
}
SERVED = {
    "Ulysses with flash attention": ("+clipx=acpo", ULYSSES, FLASH, PACKED),
    "Ulysses with verl's default attention": ("+clipx=acpo", ULYSSES, PACKED),
    "sdpa without Ulysses": ("+clipx=acpo", SDPA),
    "Ulysses of the critic, whose attention on GPUs is flash attention whatever is said": (
        "+clipx=grpo",
        *CRITIC_S_ULYSSES,
    ),
    "fused kernels of tied embeddings": ("+clipx=grpo", *FUSED, TIED),
    "fused kernels of untied embeddings under FSDP1": ("+clipx=grpo", FUSED[0], UNTIED),
    "fused kernels of a model that is elsewhere": ("+clipx=grpo", *FUSED, "actor_rollout_ref.model.path=hdfs://model"),
    "bypass mode": ("+clipx=acpo", f"{CORRECTION}.bypass_mode=True"),
    "rejection in bypass mode": ("+clipx=acpo", f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_rs=token_k1"),
    "bypass mode in the older trainer": ("+clipx=acpo", f"{CORRECTION}.bypass_mode=True", "trainer.use_v1=False"),
    "weights on a ratio to the old policy": (
        *("+clipx=m2po", "clipx.behaviour=old", CALCULATED, f"{CORRECTION}.rollout_is=token"),
    ),
    "rejection under a ratio to the sampler": ("+clipx=m2po", CALCULATED, f"{CORRECTION}.rollout_rs=seq_mean_k3"),
    "weights without bypass mode": ("+clipx=acpo", f"{CORRECTION}.rollout_is=token"),
    "verl's own loss in bypass mode": (
        "+clipx=observe",
        f"{CORRECTION}.bypass_mode=True",
        f"{CORRECTION}.rollout_is=token",
    ),
    "verl's kind of loss, written out": ("+clipx=acpo", BYPASSED, f"{CORRECTION}.loss_type=ppo_clip"),
    "verl's own REINFORCE": ("+clipx=observe", BYPASSED, f"{CORRECTION}.loss_type=reinforce"),
    "distillation beside task rewards": ("+clipx=acpo", DISTILLED),
    "distillation without task rewards that is off": ("+clipx=acpo", BY_ITSELF),
    "distillation's own clip keys": ("+clipx=acpo", DISTILLED, "distillation.distillation_loss.clip_ratio_high=0.28"),
    "top_p where only metrics compare": ("+clipx=acpo", VLLM, f"{ROLLOUT}.top_p=0.9"),
    "top_p under M2PO's ratio to the old policy": ("+clipx=m2po_reference", VLLM, f"{ROLLOUT}.top_p=0.9"),
    "top_p of the bare logits": ("+clipx=m2po", CALCULATED, VLLM, f"{ROLLOUT}.top_p=0.9", RAW),
    "top_p of validation": ("+clipx=m2po", CALCULATED, VLLM, f"{ROLLOUT}.val_kwargs.top_p=0.7"),
    "a temperature": ("+clipx=m2po", CALCULATED, VLLM, f"{ROLLOUT}.temperature=0.8"),
    "verl's own loss in bypass mode under top_p": ("+clipx=observe", BYPASSED, VLLM, f"{ROLLOUT}.top_p=0.9"),
    "VeOmni's routers without an observation": ("+clipx=acpo", "clipx.scope=lagged", VEOMNI, R2),
    "VeOmni": ("+clipx=acpo", VEOMNI),
    "Megatron": ("+clipx=acpo", MEGATRON),
}


def built(config):
    """The clipx node that a composed configuration builds."""
    return instantiate(config.clipx)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_stops_in_the_driver(actor, name):
    overrides, message = REFUSED[name]
    with pytest.raises(InstantiationException, match=message):
        actor(*overrides)


def test_the_critics_attention_counts_on_a_cpu(actor, monkeypatch):
    monkeypatch.setattr("verl.plugin.platform.get_platform", lambda: SimpleNamespace(device_name="cpu"))
    with pytest.raises(InstantiationException, match=r"critic\.fsdp\.ulysses_.*=2 with critic\.model\..*=sdpa"):
        actor("+clipx=grpo", *CRITIC_S_ULYSSES)


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_goes_on(actor, name):
    assert actor(*SERVED[name]).policy_loss.run.options


@pytest.mark.slow
def test_verl_resolves_the_configuration_in_place_and_the_options_stay(composed):
    config = composed("+clipx=acpo", f"{CORRECTION}.rollout_is=token")
    # verl's task runners do this before anything else.
    OmegaConf.resolve(config)
    options = instantiate(config.actor_rollout_ref.actor.policy_loss, _convert_="partial").run.options
    assert options[f"{CORRECTION}.rollout_is"] == "token" and options[f"{ACTOR}.strategy"] == "fsdp"


@pytest.mark.slow
def test_every_refused_row_is_refused_above(composed):
    missing = []
    for refusal in REFUSALS:
        nodes = [composed(*overrides) for overrides, _ in REFUSED.values()]
        if not any(refusal(node.actor_rollout_ref.actor.policy_loss.run.options, built(node)) for node in nodes):
            missing.append(refusal.__name__)
    assert missing == []


# A run of what tests ran, and what of it is another in a run with each untested option.
RUN = ("+clipx=grpo", f"{ACTOR}.strategy=fsdp2", VLLM, "algorithm.adv_estimator=grpo", TIED)
STRATEGY, NAME, ESTIMATOR = f"{ACTOR}.strategy", f"{ROLLOUT}.name", "algorithm.adv_estimator"
UNTESTED = {
    "FSDP1": {STRATEGY: "fsdp"},
    "Megatron": {STRATEGY: "megatron"},
    "Megatron, router replay R2 or R3": {STRATEGY: "megatron"},
    "MindSpeed": {STRATEGY: "megatron"},
    "VeOmni": {STRATEGY: "veomni"},
    "VeOmni, router replay R3": {STRATEGY: "veomni"},
    "TorchTitan": {STRATEGY: "torchtitan"},
    "FSDP-Turbo": {STRATEGY: "fsdp_turbo"},
    "Automodel": {STRATEGY: "automodel"},
    "QAT": {f"{ACTOR}.qat.enable": True},
    "multi-token prediction": {"actor_rollout_ref.model.mtp.enable": True},
    "PrefixGrouper": {f"{ACTOR}.use_prefix_grouper": True},
    "images and videos": {"actor_rollout_ref.model.path": str(MODELS / "of_images")},
    "SGLang": {NAME: "sglang"},
    "bypass mode, v0 trainer": {f"{CORRECTION}.bypass_mode": True, "trainer.use_v1": False},
    "distillation beside task rewards": {"distillation.enabled": True},
    "optimal token baseline": {ESTIMATOR: "optimal_token_baseline"},
    "group filtering": {"algorithm.filter_groups.enable": True},
}


def test_a_run_is_known_to_have_options_that_no_test_ran(actor):
    options = dict(actor(*RUN).policy_loss.run.options)
    assert "no test" not in announcement(actor(*RUN).policy_loss)
    assert untested(options) == []
    more = {f"{CORRECTION}.bypass_mode": True, NAME: "cpu", ESTIMATOR: "rloo"}
    assert untested(options | more) == [] == untested(options | {"trainer.use_v1": False})
    assert UNTESTED.keys() == {row.option for row in ROWS if row.state == "untested"}
    for option, changes in UNTESTED.items():
        # What the composed run has under these keys tells them apart from others.
        assert all(options[key] not in (None, value) for key, value in changes.items()), option
        found = untested(options | changes)
        assert found in ([option], [f"{key}={value}" for key, value in changes.items()]), option
        policy_loss = actor(*RUN).policy_loss
        policy_loss.run.options = options | changes
        assert f"; no test has run {found[0]}; old_log_probs" in announcement(policy_loss)


# The file of the tests that run each option.
RUN_BY = {
    **dict.fromkeys(
        (
            "FSDP2",
            "packing",
            "dynamic batch sizes",
            "Ulysses, flash attention",
            "gradient checkpointing",
            "offload",
            "hybrid sharding",
            "chunked entropy",
            "LoRA",
        ),
        "tests/end_to_end/test_invariance.py",
    ),
    **dict.fromkeys(
        ("vLLM",),
        "tests/end_to_end/test_vllm.py",
    ),
    **dict.fromkeys(
        (
            "the CPU's rollout",
            "KL loss",
            "bypass mode",
            "rejection in bypass mode",
            "v1 trainer, sync",
            "v1 trainer, colocate_async",
            "GRPO's advantages",
        ),
        "tests/end_to_end/test_training.py",
    ),
    **dict.fromkeys(
        ("LoRA, merged for the rollout",),
        "tests/end_to_end/test_options.py",
    ),
    **dict.fromkeys(
        ("fused kernels", "bfloat16"),
        "tests/end_to_end/test_gpu.py",
    ),
    **dict.fromkeys(
        (
            "several epochs",
            "rollout correction",
            "v1 trainer, separate_async",
            "v0 trainer",
            "one_step_off_policy",
            "fully_async_policy",
            "RLOO, REINFORCE++, GAE with a critic",
            "several turns with tools",
        ),
        "tests/end_to_end/test_trainers.py",
    ),
    **dict.fromkeys(
        ("verl's Tinker worker",),
        "tests/end_to_end/test_engine.py",
    ),
}


def test_an_option_counts_as_run_if_there_is_a_test_that_runs_it():
    assert RUN_BY.keys() == {row.option for row in ROWS if row.tested}
    assert [file for file in RUN_BY.values() if not (REPOSITORY / file).exists()] == []
    assert [row.option for row in ROWS if not (row.tested or row.remark)] == []
    # Which tests there are does not decide what a run does.
    assert "tests/" not in (REPOSITORY / "verl_clipx/run/support.py").read_text()


def test_the_page_has_the_table_that_the_command_prints():
    page = (REPOSITORY / "docs" / "support.md").read_text()
    table = page.split("<!-- clipx doctor --options -->\n")[1].split("\n<!-- end -->")[0]
    assert CliRunner().invoke(app, ["doctor", "--options"]).output == f"{table}\n"


@pytest.fixture
def model():
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    return Qwen2ForCausalLM(config)


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
    found, own = [], []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: own.append(int(tensor)))
    for rank, (has_outputs, dp_rank) in enumerate(zip(outputs, dp_ranks, strict=True)):
        engine = SimpleNamespace(
            is_mp_src_rank_with_outputs=lambda has_outputs=has_outputs: has_outputs,
            get_data_parallel_rank=lambda dp_rank=dp_rank: dp_rank,
        )
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(state_rank(engine, "cpu"))
    assert found == own and max(own) == expected and sum(rank >= 0 for rank in own) == 1
