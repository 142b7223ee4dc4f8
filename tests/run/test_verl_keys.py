"""What becomes of verl's keys: taken over, not used, or refused; the table of all of them.

Covers: by overrides on verl's configuration, as the driver decides and as the workers then build it: what each clip key
becomes under each method and when it counts, what is named as not used, every refusal with the nearest run that is
served, by the fields of the error; GRPO and SAPO with verl's keys against verl's own losses; every leaf that verl
composes, under each of its engines, has a row. Not covered: that no key is missing which verl's losses read
(tests/worker/test_verl_contract.py), what the rows say of drawn configurations (tests/worker/test_drawn.py).
"""

import importlib.util
import inspect
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from typer.testing import CliRunner
from verl.trainer.ppo import core_algos
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

from tests.claims.configuration import ACTOR, actor_of, built, decided, hydra_s, merged, parsed, refusals_in, refused
from tests.golden.runs import registered_loss
from verl_clipx.cli import app
from verl_clipx.methods import BUILT_IN
from verl_clipx.run.start import decide
from verl_clipx.run.verl_keys import (
    CLIP_KEYS,
    NOT_IN_VERL,
    ON_THE_PATH,
    READ,
    ROWS,
    SYNC_STEP,
    is_registered_in_the_source,
    misplaced,
    read,
    row_of,
)

REPOSITORY = Path(__file__).parents[2]
CORRECTION, ROLLOUT = "algorithm.rollout_correction", "actor_rollout_ref.rollout"
POLICY_LOSS = f"{ACTOR}.policy_loss"
LOG_PROBS = f"{ROLLOUT}.calculate_log_probs"


def of_verl(**keys):
    return [f"{ACTOR}.{key}={value}" for key, value in keys.items()]


# --- Clip keys -------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_verl_and_each_is_of_a_loss_of_verls():
    actor = hydra_s().actor_rollout_ref.actor
    sources = inspect.getsource(core_algos)
    for key, value in CLIP_KEYS.items():
        name = key.rpartition(".")[2]
        if key in (f"policy_loss.{name}" for name in NOT_IN_VERL):
            assert OmegaConf.select(actor, key) is None
            continue
        owner = PolicyLossConfig if key.startswith("policy_loss.") else ActorConfig
        assert OmegaConf.select(actor, key) == value
        assert name == "dro_beta" or owner.__dataclass_fields__[name].default == value
        assert name in sources


@pytest.mark.parametrize(
    ("group", "keys", "expected"),
    [
        ("grpo", dict(clip_ratio_high=0.28), dict(clip_low=0.8, clip_high=1.28, dual_clip=3.0)),
        (
            "grpo",
            dict(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=10),
            dict(clip_low=0.9, clip_high=1.3, dual_clip=10.0),
        ),
        # Its own keys stand before the common one, as in verl.
        ("grpo", dict(clip_ratio=0.4, clip_ratio_high=0.28), dict(clip_low=0.6, clip_high=1.28)),
        ("grpo", dict(clip_ratio=0.1, clip_ratio_low="null"), dict(clip_low=0.9, clip_high=1.1)),
        # A sequence's width on tokens is taken, and the line calls it unusual.
        ("grpo", dict(clip_ratio_low=3e-4), dict(clip_low=0.9997)),
        ("grpo", dict(clip_ratio_low=1), dict(clip_low=0.0)),
        # Said twice, the same.
        ("dapo", dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3), dict(clip_low=0.8, clip_high=1.28)),
        ("dapo", dict(clip_ratio_low=0.3), dict(clip_low=0.7, clip_high=1.28)),
        ("cispo", dict(clip_ratio_high=5), dict(clip_low=0.8, clip_high=6.0)),
        # verl's CISPO script: a lower bound of -9 is none.
        ("cispo_minimax", dict(clip_ratio_low=10, clip_ratio_high=0.28), dict(clip_low=None)),
        ("dgpo", dict(clip_ratio_low=0.3), dict(clip_low=0.7, clip_high=1.2)),
        ("ce_gppo", dict(clip_ratio_c=3), dict(dual_clip=3.0)),
        # Of the token's log-ratio.
        ("gmpo", dict(clip_ratio_low=0.3, clip_ratio_high=0.5), dict(clip_low=math.exp(-0.3), clip_high=math.exp(0.5))),
        ("dro", {"policy_loss.dro_beta": 0.5}, dict(beta=0.5)),
        ("dro", {"policy_loss.dro_beta": "null"}, dict(beta=0.05)),
        # Of the sequence's ratio.
        ("gspo", dict(clip_ratio_low=1e-2, clip_ratio_high=6e-4), dict(clip_low=0.99, clip_high=1.0006)),
        # Divergences, and the truncation, as in verl's dppo losses.
        (
            "dppo",
            dict(clip_ratio_low=0.15, clip_ratio_high=0.1, clip_ratio_c=20),
            dict(threshold_low=0.15, threshold_high=0.1, weight_high=20.0),
        ),
        ("acpo", dict(clip_ratio_c=10), dict(dual_clip=10.0, epsilon_base=0.2)),
        # SAPO's temperatures: verl reads the actor's, its scripts write them under policy_loss.
        ("sapo", dict(tau_pos=2.0, tau_neg=4), dict(tau_positive=2.0, tau_negative=4.0)),
        ("sapo", {"policy_loss.tau_neg": 1.2}, dict(tau_positive=1.0, tau_negative=1.2)),
        ("sapo", {"tau_pos": 2.0, "policy_loss.tau_pos": 2.0}, dict(tau_positive=2.0)),
        # null: no dual clip, which is all that a method without one has.
        ("grpo", dict(clip_ratio_c="null"), dict(dual_clip=None, clip_high=1.2)),
        ("dppo", dict(clip_ratio_c="null"), dict(weight_high=None)),
        # A loss of one's own with fixed bounds.
        ("custom", dict(clip_ratio_high=0.28), dict(clip_high=1.28)),
    ],
)
def test_verls_key_becomes_the_methods(group, keys, expected):
    own = ["clipx.function=tests.example_losses:soft"] if group == "custom" else []
    config, decision = decided(f"+clipx={group}", *own, *of_verl(**keys))
    method = actor_of(config).policy_loss.clipx.method
    assert {name: getattr(method, name) for name in expected} == expected
    taken = decision.resolved.run.taken
    # Written down for verl's own print of the configuration and for the record.
    assert {name: config.clipx[name] for name in taken} == {name: of["value"] for name, of in taken.items()}
    assert all(of["key"] in keys and getattr(method, name) == of["value"] for name, of in taken.items())
    # Decided again, as in a notebook, it is the same.
    again = decide(config, group=group)
    assert (again.line, again.resolved.run.taken) == (decision.line, taken)


@pytest.mark.parametrize(
    ("group", "overrides", "key", "parameter"),
    [
        # Ours is set too: by the user, even to its default, or by the group.
        ("grpo", ["clipx.clip_high=1.3", *of_verl(clip_ratio_high=0.28)], "clip_ratio_high", "clip_high=1.28"),
        ("grpo", ["clipx.clip_high=1.2", *of_verl(clip_ratio_high=0.28)], "clip_ratio_high", "clip_high=1.2"),
        ("grpo", ["clipx.dual_clip=null", *of_verl(clip_ratio_c=10)], "clip_ratio_c", "dual_clip=null"),
        ("grpo", ["clipx.clip_low=0.7", *of_verl(clip_ratio=0.2)], "clip_ratio", "clip_low=0.8"),
        ("dapo", of_verl(clip_ratio_high=0.3), "clip_ratio_high", "clip_high=1.28"),
        # verl's default counts where the user has written it.
        ("dapo", of_verl(clip_ratio_high=0.2), "clip_ratio_high", "clip_high=1.28"),
        ("acpo_reference", of_verl(clip_ratio_c=10), "clip_ratio_c", "dual_clip=3"),
        ("acpo_reference", of_verl(clip_ratio_c="null"), "clip_ratio_c", "dual_clip=null"),
        ("sapo", ["clipx.tau_positive=3", *of_verl(tau_pos=2)], "tau_pos", "tau_positive=3"),
        ("dro", ["clipx.beta=0.1", *of_verl(**{"policy_loss.dro_beta": 0.5})], "policy_loss.dro_beta", "beta=0.1"),
        # It cannot mean this.
        ("cispo", of_verl(clip_ratio_low=10), "clip_ratio_low", "clip_low=-9"),
        ("grpo", of_verl(clip_ratio_high=-0.1), "clip_ratio_high", "clip_high=0.9"),
        ("grpo", of_verl(clip_ratio_c=1), "clip_ratio_c", "dual_clip=1"),
        ("gspo", of_verl(clip_ratio_low=-0.1), "clip_ratio_low", "clip_low=1.1"),
        ("sapo", of_verl(tau_pos=0), "tau_pos", "tau_positive=0"),
        ("sapo", of_verl(tau_neg="null"), "tau_neg", "tau_negative=null"),
        ("dro", of_verl(**{"policy_loss.dro_beta": 0}), "policy_loss.dro_beta", "beta=0"),
        ("grpo", of_verl(clip_ratio_high="high"), "clip_ratio_high", "number"),
        # A percentage.
        ("dapo", of_verl(clip_ratio_high=28), "clip_ratio_high", "write 0.28"),
        ("gmpo", of_verl(clip_ratio_low=28), "clip_ratio_low", "write 0.28"),
        ("dppo", of_verl(clip_ratio_low=20), "clip_ratio_low", "write 0.2"),
        # Bounds of tokens on the ratio of a sequence.
        ("gspo", of_verl(clip_ratio_high=0.28), "clip_ratio_high", "clip_high=1.28"),
        ("gspo", of_verl(clip_ratio_low=0.2), "clip_ratio_low", "clip_low=0.8"),
        # Two keys of verl's for one parameter.
        (
            "sapo",
            of_verl(**{"tau_pos": 2, "policy_loss.tau_pos": 3}),
            "policy_loss.tau_pos",
            f"{ACTOR}.tau_pos=2",
        ),
    ],
)
def test_a_value_that_the_method_cannot_take_over_is_refused_with_both_keys(group, overrides, key, parameter):
    (refusal,) = refused(f"+clipx={group}", *overrides)
    given = next(word.partition("=")[2] for word in overrides if word.startswith(f"{ACTOR}.{key}="))
    assert refusal.key == f"{ACTOR}.{key}"
    assert str(refusal.value) == given.replace("null", "None")
    assert parameter in f"{refusal.reason}. {refusal.advice}"


def test_a_tokens_width_on_a_sequences_ratio_is_taken_where_ours_says_so_too():
    config, _ = decided("+clipx=gspo", "clipx.clip_high=1.28", *of_verl(clip_ratio_high=0.28))
    assert actor_of(config).policy_loss.clipx.method.clip_high == 1.28


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        ("acpo", dict(clip_ratio_high=0.28)),
        ("bapo", dict(clip_ratio=0.1)),
        ("sapo", dict(clip_ratio_low=0.1)),
        ("gspo", dict(clip_ratio_c=10)),
        ("grpo", dict(tau_pos=2)),
        ("acpo", {"policy_loss.tau_neg": 2}),
        ("acpo", {"policy_loss.dro_beta": 0.5, "clip_ratio_low": 0.1}),
        *(
            ("acpo", {f"policy_loss.{key}": value})
            for key, value in dict(
                clip_cov_ratio=0.01, clip_cov_lb=2.0, clip_cov_ub=4.0, kl_cov_ratio=0.01, ppo_kl_coef=1.0
            ).items()
        ),
    ],
)
def test_a_clip_key_that_the_method_does_not_read_is_named_and_stops_nothing(group, keys):
    config, decision = decided(f"+clipx={group}", *of_verl(**keys))
    said = ", ".join(
        f"{key}={value}" for key, value in sorted(keys.items(), key=lambda pair: [*CLIP_KEYS].index(pair[0]))
    )
    assert f"; verl's {said} not used; " in decision.line
    unused = {f"{ACTOR}.{key}": value for key, value in keys.items()}
    # The record and the workers have it too, and the parameters are the group's.
    assert config.actor_rollout_ref.actor.policy_loss.run.unused == unused == decision.resolved.run.unused
    policy_loss = actor_of(config).policy_loss
    assert (
        policy_loss.run.unused == unused
        and policy_loss.clipx == actor_of(merged([f"+clipx={group}"])).policy_loss.clipx
    )


@pytest.mark.parametrize(
    ("group", "keys"),
    [
        # verl's defaults, written out, and null, ask for nothing.
        ("acpo", dict(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2)),
        ("gspo", dict(clip_ratio_c="null")),
        ("acpo", {"tau_pos": 1.0, "policy_loss.ppo_kl_coef": 0.1, "policy_loss.dro_beta": "null"}),
        # verl's own loss reads its keys as always.
        ("observe", {"clip_ratio_low": 10, "tau_pos": 2, "policy_loss.kl_cov_ratio": 0.1}),
    ],
)
def test_where_nothing_is_lost_nothing_is_named(group, keys):
    config, decision = decided(f"+clipx={group}", *of_verl(**keys))
    assert "not used" not in decision.line and decision.resolved.run.unused == {} == decision.resolved.run.taken
    assert "clip_low" not in config.clipx


@pytest.mark.parametrize("name", BUILT_IN)
def test_without_verls_keys_nothing_is_taken_over(name):
    run = decided(f"+clipx={name}")[1].resolved.run
    assert run.taken == {} == run.unused


@pytest.mark.parametrize(
    "keys", [dict(clip_ratio_low=0.1, clip_ratio_high=0.05, clip_ratio_c=1.2), dict(clip_ratio_c=9)]
)
def test_grpo_with_verls_keys_is_verls_vanilla(keys, tensors):
    config, _ = decided("+clipx=grpo", *of_verl(**keys))
    ours = registered_loss(actor_of(config), tensors)
    vanilla = registered_loss(built(hydra_s(*of_verl(**keys))), tensors)
    torch.testing.assert_close(ours[:2], vanilla[:2])


def test_sapo_with_verls_temperatures_is_verls_sapo(tensors):
    keys = of_verl(tau_pos=2.0, tau_neg=3.5)
    config, _ = decided("+clipx=sapo", *keys)
    # Which verl's averages by, whatever the run's mode is.
    ours = registered_loss(actor_of(config), tensors, loss_agg_mode="seq-mean-token-mean")
    verl = registered_loss(built(hydra_s(*keys, f"{POLICY_LOSS}.loss_mode=sapo")), tensors)
    torch.testing.assert_close(ours[:2], verl[:2])


# --- Refusals --------------------------------------------------------------------------------------------------------

VLLM, RAW = f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.logprobs_mode=raw_logprobs"
DISTILLED, BY_ITSELF = "distillation.enabled=True", "distillation.distillation_loss.use_task_rewards=False"
BYPASSED, WEIGHTS = f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token"
ULYSSES, MEGATRON, VEOMNI = (
    f"{ACTOR}.ulysses_sequence_parallel_size=2",
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.strategy=veomni",
)
OVERRIDE = "actor_rollout_ref.model.override_config.attn_implementation"
R2 = f"{ACTOR}.veomni.router_replay.mode=R2"
FUSED = ("actor_rollout_ref.model.use_fused_kernels=True", f"{ACTOR}.strategy=fsdp2")
UNTIED, TIED = (
    f"actor_rollout_ref.model.path={Path(__file__).parent / 'fixtures' / 'models' / name}"
    for name in ("untied", "tied")
)
MODE, REJECTED = "trainer.v1.trainer_mode", f"{CORRECTION}.rollout_rs=seq_mean_k3"
THRESHOLD = f"{CORRECTION}.rollout_rs_threshold=0.01"
TOP_P = f"{ROLLOUT}.top_p=0.9"

# key=value: reason. Advice.
FORM = re.compile(r"(?s)[\w.]+=.+?: .+[^.]\. [A-Z].+[.]")

# What is given, the key of the refusal, and what its reason or advice names besides.
REFUSED = [
    # What would train something else than the line says.
    (("+clipx=acpo", f"{POLICY_LOSS}.loss_mode=vanilla"), f"{POLICY_LOSS}.loss_mode", "clipx.method=acpo"),
    (("+clipx=gppo", "clipx.method=aspo"), f"{POLICY_LOSS}.loss_mode", "+clipx=aspo"),
    ((f"{POLICY_LOSS}.loss_mode=clipx_acpo",), f"{POLICY_LOSS}.loss_mode", "+clipx=acpo"),
    ((f"{POLICY_LOSS}.loss_mode=clipx_somebody_s",), f"{POLICY_LOSS}.loss_mode", "+clipx=custom clipx.function="),
    (("+clipx=observe", f"{POLICY_LOSS}.loss_mode=clipx_grpo"), f"{POLICY_LOSS}.loss_mode", "+clipx=grpo"),
    (("+clipx=observe", f"{POLICY_LOSS}.loss_mode=ppo"), f"{POLICY_LOSS}.loss_mode", "vanilla"),
    (("+clipx=acpo", DISTILLED, BY_ITSELF), BY_ITSELF.partition("=")[0], "the method acpo"),
    (("+clipx=observe", DISTILLED, BY_ITSELF), BY_ITSELF.partition("=")[0], "+clipx=observe"),
    (("+clipx=acpo", BYPASSED, WEIGHTS), f"{CORRECTION}.rollout_is", "bypass_mode=True"),
    (("+clipx=m2po", f"{LOG_PROBS}=true", WEIGHTS), f"{CORRECTION}.rollout_is", "clipx.behaviour=old"),
    (("+clipx=grpo", BYPASSED, f"{CORRECTION}.loss_type=reinforce"), f"{CORRECTION}.loss_type", "ppo_clip"),
    *(
        (
            ("+clipx=grpo", f"{POLICY_LOSS}.rollout_correction.{key}"),
            f"{POLICY_LOSS}.rollout_correction.{name}",
            CORRECTION,
        )
        for key, name in (("rollout_is=sequence", "rollout_is"), ("loss_type=reinforce", "loss_type"))
    ),
    (
        ("+clipx=grpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
        f"{ACTOR}.loss_agg_mode",
        f"{ACTOR}.loss_scale_factor=null",
    ),
    # Ratios to the sampler that are off.
    (("+clipx=m2po", VLLM, TOP_P), f"{ROLLOUT}.top_p", "raw_logprobs"),
    (("+clipx=m2po", f"{ROLLOUT}.name=cpu", TOP_P), f"{ROLLOUT}.top_p", "cpu's log-probabilities"),
    # At another temperature the bare logits' are no remedy.
    (
        ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.top_k=20", f"{ROLLOUT}.temperature=0.8"),
        f"{ROLLOUT}.top_k",
        "top_k=-1.",
    ),
    (("+clipx=acpo", WEIGHTS, VLLM, f"{ROLLOUT}.min_p=0.05"), f"{ROLLOUT}.min_p", "min_p=0"),
    (("+clipx=acpo", REJECTED, THRESHOLD, VLLM, TOP_P, f"{ROLLOUT}.top_k=50"), f"{ROLLOUT}.top_p", "top_k=-1"),
    (("+clipx=acpo", BYPASSED, f"{ROLLOUT}.name=sglang", TOP_P, RAW), f"{ROLLOUT}.top_p", "the version of sglang"),
    (
        ("+clipx=acpo", BYPASSED, VLLM, TOP_P, RAW, f"{ROLLOUT}.engine_kwargs.vllm.logprobs_mode=processed_logprobs"),
        f"{ROLLOUT}.top_p",
        "engine_kwargs.vllm.logprobs_mode=processed_logprobs",
    ),
    (("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.temperature=0.8", RAW), f"{ROLLOUT}.logprobs_mode", "temperature=0.8"),
    (("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.logprobs_mode=raw_logits"), f"{ROLLOUT}.logprobs_mode", "processed"),
    # Engines that cannot serve the loss.
    (("+clipx=grpo", ULYSSES, f"{OVERRIDE}=sdpa"), ULYSSES.partition("=")[0], f"{OVERRIDE}=flash_attention_2"),
    (("+clipx=observe", ULYSSES, f"{OVERRIDE}=sdpa"), ULYSSES.partition("=")[0], OVERRIDE),
    *(
        (("+clipx=grpo", f"{key}=2", f"{OVERRIDE}=eager"), key, f"{OVERRIDE}=eager")
        for key in (
            f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
        )
    ),
    (
        ("+clipx=grpo", f"{ACTOR}.veomni.ulysses_parallel_size=2", f"{ACTOR}.veomni.attn_implementation=sdpa"),
        f"{ACTOR}.veomni.ulysses_parallel_size",
        "veomni.attn_implementation=sdpa",
    ),
    (("+clipx=acpo", VEOMNI, R2), f"{ACTOR}.veomni.router_replay.mode", "clipx.scope=lagged"),
    (
        ("+clipx=grpo", "+clipx/select=high_entropy", "clipx.select.over=mini_batch", VEOMNI, R2),
        f"{ACTOR}.veomni.router_replay.mode",
        "clipx.select.over=sequence",
    ),
    (
        ("+clipx=grpo", "+clipx/select=high_entropy", VEOMNI, R2, BYPASSED, REJECTED, THRESHOLD),
        f"{ACTOR}.veomni.router_replay.mode",
        "the method grpo",
    ),
    (("+clipx=grpo", *FUSED, UNTIED), FUSED[0].partition("=")[0], "untied"),
    (
        ("+clipx=grpo", MEGATRON, f"{ACTOR}.megatron.dynamic_context_parallel=True"),
        f"{ACTOR}.megatron.dynamic_context_parallel",
        "data-parallel group",
    ),
    # What verl would stop at minutes later, or pass over.
    *((("+clipx=observe", f"{ACTOR}.ppo_epochs={n}"), f"{ACTOR}.ppo_epochs", "no update") for n in (0, -2, 0.5)),
    *((("+clipx=acpo", f"{MODE}={mode}"), MODE, "colocate_async, ") for mode in ("nonsense", "sampler")),
    (("+clipx=acpo", f"{CORRECTION}.rollout_is=nonsense"), f"{CORRECTION}.rollout_is", "'token'"),
    (("+clipx=acpo", WEIGHTS, f"{CORRECTION}.rollout_is_threshold='5_0.5'"), f"{CORRECTION}.rollout_is", "lower bound"),
    (("+clipx=grpo", f"{CORRECTION}.rollout_rs=token_k9", THRESHOLD), f"{CORRECTION}.rollout_rs", "'token_k1'"),
    (("+clipx=grpo", f"{CORRECTION}.rollout_rs=token_k1"), f"{CORRECTION}.rollout_rs", "must be provided"),
    *(
        ((f"+clipx={group}", f"{LOG_PROBS}=False", *words), LOG_PROBS, words[0])
        for group in ("acpo", "observe")
        for words in ((BYPASSED,), (WEIGHTS,), (REJECTED, THRESHOLD))
    ),
    (("+clipx=bapo", "clipx.weight=rollout", f"{LOG_PROBS}=False"), LOG_PROBS, "clipx.weight=rollout"),
    (("+clipx=observe", f"{POLICY_LOSS}.loss_mode=dro"), f"{POLICY_LOSS}.dro_beta", "loss_mode=dro"),
    *(
        (("+clipx=observe", f"{POLICY_LOSS}.{key}=1.2"), f"{POLICY_LOSS}.{key}", f"{ACTOR}.{key}")
        for key in ("tau_pos", "tau_neg")
    ),
    # Keys of the loss where nothing reads them.
    *(
        ((f"+clipx={group}", f"{key}=0.3"), key, f"{ACTOR}.{key.rpartition('.')[2]}")
        for group in ("acpo", "observe")
        for key in ("actor.clip_ratio_high", "algorithm.kl_loss_coef", "clip_ratio", "critic.tau_pos")
    ),
]


@pytest.mark.parametrize(("overrides", "key", "named"), REFUSED, ids=lambda value: None)
def test_it_is_refused_with_key_value_and_what_to_do(overrides, key, named):
    (refusal,) = refused(*overrides)
    assert refusal.key == key and named in f"{refusal.reason}. {refusal.advice}" and refusal.advice
    given = {word.partition("=")[0]: word.partition("=")[2] for word in overrides}
    assert key not in given or str(refusal.value) == given[key]
    assert FORM.fullmatch(str(refusal)), refusal


def test_all_that_is_wrong_is_said_at_once():
    keys = [
        refusal.key
        for refusal in refused("+clipx=dapo", *of_verl(clip_ratio_high=0.2, ppo_epochs=0), BYPASSED, WEIGHTS)
    ]
    assert keys == [f"{CORRECTION}.rollout_is", f"{ACTOR}.ppo_epochs", f"{ACTOR}.clip_ratio_high"]


def test_every_refusal_of_the_table_is_met_above():
    tests, met = {row.refusal for row in ROWS if row.refusal is not None}, set()
    for overrides, _, _ in REFUSED:
        groups = [word for word in overrides if word.startswith("+clipx")]
        if groups:
            config = merged(groups, parsed(*(word for word in overrides if word not in groups)))
            values, node = read(config), instantiate(config.clipx)
            met |= {test for test in tests if test(values, node)}
    assert [test.__name__ for test in tests - met] == []


SERVED = [
    ("+clipx=acpo", ULYSSES, f"{OVERRIDE}=flash_attention_3"),
    ("+clipx=acpo", ULYSSES),
    ("+clipx=acpo", f"{OVERRIDE}=sdpa"),
    # On GPUs verl's critic takes flash attention whatever is said.
    (
        "+clipx=grpo",
        "critic.fsdp.ulysses_sequence_parallel_size=2",
        "critic.model.override_config.attn_implementation=sdpa",
    ),
    ("+clipx=grpo", *FUSED, TIED),
    ("+clipx=grpo", FUSED[0], UNTIED),
    ("+clipx=grpo", *FUSED, "actor_rollout_ref.model.path=hdfs://model"),
    ("+clipx=acpo", BYPASSED),
    ("+clipx=acpo", BYPASSED, REJECTED, THRESHOLD),
    ("+clipx=acpo", BYPASSED, "trainer.use_v1=False"),
    ("+clipx=m2po", "clipx.behaviour=old", WEIGHTS),
    ("+clipx=m2po", REJECTED, THRESHOLD),
    ("+clipx=acpo", WEIGHTS),
    ("+clipx=observe", BYPASSED, WEIGHTS),
    ("+clipx=acpo", BYPASSED, f"{CORRECTION}.loss_type=ppo_clip"),
    ("+clipx=observe", BYPASSED, f"{CORRECTION}.loss_type=reinforce"),
    ("+clipx=acpo", DISTILLED),
    ("+clipx=acpo", BY_ITSELF),
    ("+clipx=acpo", DISTILLED, "distillation.distillation_loss.clip_ratio_high=0.28"),
    ("+clipx=acpo", VLLM, TOP_P),
    ("+clipx=m2po_reference", VLLM, TOP_P),
    ("+clipx=m2po", VLLM, TOP_P, RAW),
    ("+clipx=m2po", VLLM, f"{ROLLOUT}.val_kwargs.top_p=0.7"),
    ("+clipx=m2po", VLLM, f"{ROLLOUT}.temperature=0.8"),
    ("+clipx=observe", BYPASSED, VLLM, TOP_P),
    ("+clipx=acpo", "clipx.scope=lagged", VEOMNI, R2),
    ("+clipx=acpo", VEOMNI),
    ("+clipx=acpo", MEGATRON),
    ("+clipx=grpo", f"{LOG_PROBS}=False"),
    ("+clipx=grpo", "trainer.use_v1=False", f"{MODE}=nonsense"),
    ("+clipx=grpo", "rollout.nnodes=1", f"{MODE}=nonsense"),
    *(("+clipx=observe", f"{MODE}={mode}") for mode in ("null", "sync", "colocate_async", "separate_async")),
    ("+clipx=grpo", f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"),
    ("+clipx=observe", f"{POLICY_LOSS}.loss_mode=dro", f"{POLICY_LOSS}.dro_beta=0.1", f"{ACTOR}.tau_neg=1.2"),
    # What verl passes on to other code may have any name.
    ("+clipx=acpo", "reward.custom_reward_function.reward_kwargs.clip_ratio=0.3"),
    ("+clipx=acpo", "actor_rollout_ref.model.override_config.clip_ratio=0.3"),
]


@pytest.mark.parametrize("overrides", SERVED, ids=lambda value: None)
def test_the_nearest_run_that_is_served_is_not_refused(overrides):
    returning = [] if any(word.startswith(LOG_PROBS) for word in overrides) else [f"{LOG_PROBS}=True"]
    assert refused(*overrides, *returning) == []


def test_the_critics_attention_counts_on_a_cpu(monkeypatch):
    monkeypatch.setattr("verl.plugin.platform.get_platform", lambda: SimpleNamespace(device_name="cpu"))
    (refusal,) = refused(*SERVED[3])
    assert refusal.key == "critic.fsdp.ulysses_sequence_parallel_size"


def test_any_of_verls_losses_is_observed(monkeypatch):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "somebody_s", lambda **_: None)
    names = [name for name in core_algos.POLICY_LOSS_REGISTRY if not name.startswith("clipx_")]
    assert {"vanilla", "gspo", "bypass_mode", "somebody_s"} <= set(names)
    for name in names:
        words = (f"{POLICY_LOSS}.loss_mode={name}", f"{POLICY_LOSS}.dro_beta=0.1")
        assert f"verl's own loss {name}, observed" in decided("+clipx=observe", *words)[1].line


def test_a_trainer_that_somebody_registered_is_taken(monkeypatch):
    from verl.trainer.ppo.v1 import trainer_base

    assert all(map(is_registered_in_the_source, trainer_base.TRAINER_REGISTRY))
    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "somebody_s", SimpleNamespace)
    assert not is_registered_in_the_source("somebody_s")
    assert refused("+clipx=grpo", f"{MODE}=somebody_s") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        *(("verl.trainer", "ppo_trainer", [f"model_engine={e}"]) for e in ("dp", "megatron", "veomni", "torchtitan")),
        (
            "verl.experimental.one_step_off_policy",
            "one_step_off_ppo_trainer",
            ["hydra.searchpath=[pkg://verl.trainer.config]"],
        ),
        ("verl.experimental.fully_async_policy", "fully_async_ppo_trainer", []),
        ("verl.trainer", "ppo_trainer", ["+hardware=cpu", "+clipx=acpo", "+clipx/select=high_entropy"]),
    ],
)
def test_what_verl_composes_by_itself_is_nowhere_misplaced(module, name, words):
    folder = Path(importlib.util.find_spec(module).submodule_search_locations[0])
    with initialize_config_dir(str(folder / "config"), version_base=None):
        assert list(misplaced(compose(name, words))) == []


def test_a_refusal_reaches_a_configuration_that_no_driver_has_seen():
    with pytest.raises(Exception) as raised:
        actor_of(merged(["+clipx=dapo"], {f"{ACTOR}.ppo_epochs": 0, f"{ACTOR}.clip_ratio_high": 0.3}))
    assert [refusal.key for refusal in refusals_in(raised.value)] == [f"{ACTOR}.ppo_epochs", f"{ACTOR}.clip_ratio_high"]


# --- The table -------------------------------------------------------------------------------------------------------

KEYS = REPOSITORY / "tests" / "worker" / "fixtures" / "verl_loss_keys"
ENGINES = ("dp", "megatron", "veomni", "torchtitan")


def leaves(node, prefix=""):
    if not OmegaConf.is_dict(node) or not len(node):
        yield prefix
        return
    for key in node:
        yield from leaves(node._get_node(key), f"{prefix}.{key}".lstrip("."))


@pytest.mark.parametrize("engine", [pytest.param(e, marks=() if e == "dp" else pytest.mark.slow) for e in ENGINES])
def test_every_composed_key_has_a_row(engine):
    missing = [key for key in leaves(hydra_s(f"model_engine={engine}")) if row_of(key) is None]
    assert missing == [], "give it a row in verl_clipx/run/verl_keys.py"


@pytest.mark.slow
def test_no_row_is_without_a_key():
    keys = {key for engine in ENGINES for key in leaves(hydra_s(f"model_engine={engine}"))}
    keys |= {key for path in KEYS.iterdir() for key in path.read_text().split()} | {*READ}
    assert [row.key for row in ROWS if row not in {row_of(key) for key in keys}] == []


def test_a_key_has_one_row_and_the_most_special_one_counts():
    assert [key for key, number in Counter(row.key for row in ROWS).items() if number > 1] == []
    assert row_of(f"{ACTOR}.clip_ratio_low").key == f"{ACTOR}.clip_ratio_low"
    assert row_of("critic.optim.lr").key == "critic"
    assert row_of("data_of_mine") is None and SYNC_STEP not in READ


@pytest.mark.parametrize("node", [ACTOR, POLICY_LOSS, "algorithm", CORRECTION, "distillation.distillation_loss"])
def test_a_new_key_beside_those_of_the_path_has_none(node):
    assert any(row.key.rpartition(".")[0] == node for row in ON_THE_PATH)
    assert row_of(f"{node}.a_new_key") is None


def test_the_page_has_the_table_that_doctor_prints():
    page = (REPOSITORY / "docs" / "support.md").read_text()
    table = page.split("<!-- clipx doctor --keys -->\n")[1].split("\n<!-- end -->")[0]
    assert CliRunner().invoke(app, ["doctor", "--keys"]).output == f"{table}\n"
