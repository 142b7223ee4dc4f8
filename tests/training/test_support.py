"""Which of verl's options the driver refuses, and what of them only a worker can see.

Covers: every refusal through a composed configuration, with the nearest run that is served; the attention of a real
model under sequence parallelism; which rank writes the state; docs/support.md's table; that verl can resolve what the
refusals read. Not covered: that what is said to run does (the tests that the table names).
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.training.observation import refuse_attention_on_a_slice
from verl_clipx.training.support import REFUSALS, ROWS
from verl_clipx.training.worker import ClipxTraining

REPOSITORY = Path(__file__).parents[2]
ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
CALCULATED = "actor_rollout_ref.rollout.calculate_log_probs=true"
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
        r"rollout_is=token with .*bypass_mode=True: .*ignored under clipx\.method=acpo.*rollout_is=null",
    ),
    "rejection in bypass mode": (
        ("+clipx=grpo", f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_rs=seq_mean_k3"),
        r"rollout_rs=seq_mean_k3 with .*bypass_mode=True",
    ),
    "weights on a ratio to the sampler": (
        ("+clipx=m2po", CALCULATED, f"{CORRECTION}.rollout_is=token"),
        r"rollout_is=token with clipx\.behaviour=rollout: .*second time.*rollout_is=null, or clipx\.behaviour=old",
    ),
    "VeOmni's routers in the observation": (("+clipx=acpo", VEOMNI, R2), r"router_replay\.mode=R2 with .*acpo"),
    "VeOmni's routers under selection": (
        ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch", VEOMNI, R2),
        r"router_replay\.mode=R2 with .*clipx\.select\.over=sequence",
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


def test_the_critic_s_attention_counts_on_a_cpu(actor, monkeypatch):
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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.option)
def test_a_row_names_a_test_that_is_there_or_a_reason(row):
    files = re.findall(r"tests/[\w/]+\.py", f"{row.test} {row.remark}")
    assert files or row.remark
    assert not [file for file in files if not (REPOSITORY / file).exists()]


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


def test_a_model_s_attention_is_looked_at_in_the_worker(model):
    refuse_attention_on_a_slice(SimpleNamespace(module=model, ulysses_sequence_parallel_size=1))
    for module in (model, [model]):
        with pytest.raises(RuntimeError, match=r"2 ranks share a sequence .*attention is sdpa.*flash_attention_2"):
            refuse_attention_on_a_slice(SimpleNamespace(module=module, ulysses_sequence_parallel_size=2))
    model.config._attn_implementation = "flash_attention_2"
    refuse_attention_on_a_slice(SimpleNamespace(module=model, ulysses_sequence_parallel_size=2))


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
    monkeypatch.setattr("verl_clipx.training.worker.get_device_id", lambda: "cpu")
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, op: own.append(int(tensor)))
    for rank, (has_outputs, dp_rank) in enumerate(zip(outputs, dp_ranks, strict=True)):
        worker = ClipxTraining()
        worker.engine = SimpleNamespace(
            is_mp_src_rank_with_outputs=lambda has_outputs=has_outputs: has_outputs,
            get_data_parallel_rank=lambda dp_rank=dp_rank: dp_rank,
        )
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        found.append(worker._state_rank())
    assert found == own and max(own) == expected and sum(rank >= 0 for rank in own) == 1
