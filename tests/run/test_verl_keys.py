"""What becomes of verl's keys, as the driver decides and the workers build it: taken over, not used, or refused, with
the nearest run that is served; every key that verl composes has a row or is known to be off the loss's path. Not
covered: that no key is missing which verl's losses read (tests/training/worker/test_verl_contract.py), what drawn
configurations train (tests/training/worker/test_drawn.py).
"""

import inspect
import math
import re
import runpy
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.workers.config.actor import ActorConfig, PolicyLossConfig

from tests.claims.configuration import ACTOR, actor_of, compose_by_hydra, decide, find_refusals, merge, parse
from verl_clipx.common import verl_version
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.run.keys import (
    CLIP_KEYS,
    LOSS_MODE,
    NOT_IN_VERL,
    READ_BY_VERL,
    ROWS,
    declare,
    entries_by_key,
    read,
    row_of,
)
from verl_clipx.run.record import record_of
from verl_clipx.run.start import resolve_into_config

REPOSITORY = Path(__file__).parents[2]
OFF_THE_PATH = REPOSITORY / "tests" / "run" / "fixtures" / "keys_off_the_path.txt"
CORRECTION = "algorithm.rollout_correction"
ROLLOUT = "actor_rollout_ref.rollout"
POLICY_LOSS = f"{ACTOR}.policy_loss"
LOG_PROBS = f"{ROLLOUT}.calculate_log_probs"
HOLD = ("+clipx/hold=clip_fraction", "clipx.hold.value=0.02")


def actor_overrides(**keys):
    """Overrides of keys below verl's actor."""
    return [f"{ACTOR}.{key}={value}" for key, value in keys.items()]


# --- Clip keys -------------------------------------------------------------------------------------------------------


def test_the_defaults_are_those_of_verl_and_each_is_of_a_loss_of_verls():
    actor = compose_by_hydra().actor_rollout_ref.actor
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
        # Its own keys stand before the common one, as in verl.
        ("grpo", dict(clip_ratio=0.4, clip_ratio_high=0.28), dict(clip_low=0.6, clip_high=1.28, dual_clip=3.0)),
        ("grpo", dict(clip_ratio=0.1, clip_ratio_low="null"), dict(clip_low=0.9, clip_high=1.1)),
        # A sequence's width on tokens is taken, and the line calls it unusual.
        ("grpo", dict(clip_ratio_low=3e-4), dict(clip_low=0.9997)),
        # Said twice, the same; a group's other parameters stay.
        ("dapo", dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3), dict(clip_low=0.8, clip_high=1.28)),
        ("dapo", dict(clip_ratio_low=0.3), dict(clip_low=0.7, clip_high=1.28)),
        # verl's CISPO script: a lower bound of -9 is none.
        ("cispo_minimax", dict(clip_ratio_low=10, clip_ratio_high=0.28), dict(clip_low=None)),
        ("ce_gppo", dict(clip_ratio_c=3), dict(dual_clip=3.0)),
        # Of the token's log-ratio, of the sequence's ratio, and of the divergence.
        ("gmpo", dict(clip_ratio_low=0.3, clip_ratio_high=0.5), dict(clip_low=math.exp(-0.3), clip_high=math.exp(0.5))),
        ("gspo", dict(clip_ratio_low=1e-2, clip_ratio_high=6e-4), dict(clip_low=0.99, clip_high=1.0006)),
        ("dppo", dict(clip_ratio_low=0.15, clip_ratio_c=20), dict(threshold_low=0.15, weight_high=20.0)),
        ("dro", {"policy_loss.dro_beta": 0.5}, dict(beta=0.5)),
        ("dro", {"policy_loss.dro_beta": "null"}, dict(beta=0.05)),
        ("acpo", dict(clip_ratio_c=10), dict(dual_clip=10.0, epsilon_base=0.2)),
        # SAPO's temperatures: verl reads the actor's, its scripts write them under policy_loss.
        ("sapo", {"tau_pos": 2.0, "policy_loss.tau_neg": 1.2}, dict(tau_positive=2.0, tau_negative=1.2)),
        ("sapo", {"tau_pos": 2.0, "policy_loss.tau_pos": 2.0}, dict(tau_positive=2.0)),
        # null: no dual clip, which is all that a method without one has.
        ("grpo", dict(clip_ratio_c="null"), dict(dual_clip=None, clip_high=1.2)),
        # A loss of one's own with fixed bounds.
        ("custom", dict(clip_ratio_high=0.28), dict(clip_high=1.28)),
    ],
)
def test_verls_key_becomes_the_methods(group, keys, expected):
    function = ["clipx.function=tests.example_losses:soft"] if group == "custom" else []
    config, decision = decide(f"+clipx={group}", *function, *actor_overrides(**keys))
    method = actor_of(config).policy_loss.clipx.method
    assert {name: getattr(method, name) for name in expected} == expected
    taken = decision.record.loss.taken
    # Written down for verl's own print of the configuration and for the record.
    for name, verl_key in taken.items():
        assert verl_key["key"] in keys
        assert config.clipx[name] == getattr(method, name) == verl_key["value"]
    # Decided again, as in a notebook, it is the same.
    again = resolve_into_config(config, group=group)
    assert (again.record.line, again.record.loss.taken) == (decision.record.line, taken)


@pytest.mark.parametrize(
    ("group", "overrides", "key", "parameter"),
    [
        # Ours is set too: by the user, even to its default, or by the group.
        ("grpo", ["clipx.clip_high=1.2", *actor_overrides(clip_ratio_high=0.28)], "clip_ratio_high", "clip_high=1.2"),
        ("grpo", ["clipx.dual_clip=null", *actor_overrides(clip_ratio_c=10)], "clip_ratio_c", "dual_clip=null"),
        ("grpo", ["clipx.clip_low=0.7", *actor_overrides(clip_ratio=0.2)], "clip_ratio", "clip_low=0.8"),
        ("dapo", actor_overrides(clip_ratio_high=0.3), "clip_ratio_high", "clip_high=1.28"),
        # verl's default counts where the user has written it.
        ("dapo", actor_overrides(clip_ratio_high=0.2), "clip_ratio_high", "clip_high=1.28"),
        ("acpo_reference", actor_overrides(clip_ratio_c="null"), "clip_ratio_c", "dual_clip=null"),
        (
            "dro",
            ["clipx.beta=0.1", *actor_overrides(**{"policy_loss.dro_beta": 0.5})],
            "policy_loss.dro_beta",
            "beta=0.1",
        ),
        # It cannot mean this: no number, beyond an end, a percentage, bounds of tokens on the ratio of a sequence.
        ("grpo", actor_overrides(clip_ratio_high="high"), "clip_ratio_high", "number"),
        ("cispo", actor_overrides(clip_ratio_low=10), "clip_ratio_low", "clip_low=-9"),
        ("sapo", actor_overrides(tau_neg="null"), "tau_neg", "tau_negative=null"),
        ("dapo", actor_overrides(clip_ratio_high=28), "clip_ratio_high", "write 0.28"),
        ("grpo", actor_overrides(clip_ratio_low=1.5), "clip_ratio_low", "write 0.015"),
        ("gspo", actor_overrides(clip_ratio_high=0.28), "clip_ratio_high", "clip_high=1.28"),
        # The exponential of a width is above the largest float.
        ("gmpo", actor_overrides(clip_ratio_high=1000), "clip_ratio_high", "clip_high=inf, which must be a number"),
        ("gmpo", actor_overrides(clip_ratio_low=-1000), "clip_ratio_low", "clip_low=inf, which must be a number"),
        # With six digits it would be another bound, which contradicts the key.
        ("gspo", actor_overrides(clip_ratio_high=0.28000001), "clip_ratio_high", "set clipx.clip_high=1.28000001 if"),
        # Two keys of verl's for one parameter.
        (
            "sapo",
            actor_overrides(**{"tau_pos": 2, "policy_loss.tau_pos": 3}),
            "policy_loss.tau_pos",
            f"{ACTOR}.tau_pos=2",
        ),
    ],
)
def test_a_value_that_the_method_cannot_take_over_is_refused_with_both_keys(group, overrides, key, parameter):
    (refusal,) = find_refusals(f"+clipx={group}", *overrides)
    value = next(word.partition("=")[2] for word in overrides if word.startswith(f"{ACTOR}.{key}="))
    assert refusal.key == f"{ACTOR}.{key}"
    assert str(refusal.value) == value.replace("null", "None")
    assert parameter in f"{refusal.reason}. {refusal.advice}"


@pytest.mark.parametrize(
    ("group", "keys", "is_named"),
    [
        ("acpo", dict(clip_ratio_high=0.28), True),
        ("gspo", dict(clip_ratio_c=10), True),
        ("acpo", {"policy_loss.dro_beta": 0.5, "policy_loss.tau_neg": 2, "policy_loss.clip_cov_ratio": 0.01}, True),
        # verl's defaults, written out, and null, ask for nothing.
        ("acpo", dict(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2), False),
        ("gspo", dict(clip_ratio_c="null"), False),
        ("acpo", {"tau_pos": 1.0, "policy_loss.ppo_kl_coef": 0.1, "policy_loss.dro_beta": "null"}, False),
        # verl's own loss reads its keys as always.
        ("observe", {"clip_ratio_low": 10, "tau_pos": 2, "policy_loss.kl_cov_ratio": 0.1}, False),
    ],
)
def test_a_clip_key_that_the_method_does_not_read_is_named_and_stops_nothing(group, keys, is_named):
    config, decision = decide(f"+clipx={group}", *actor_overrides(**keys))
    unused = {f"{ACTOR}.{key}": value for key, value in keys.items()} if is_named else {}
    in_order = sorted(keys.items(), key=lambda pair: [*CLIP_KEYS].index(pair[0]))
    remark = f"; verl's {', '.join(f'{key}={value}' for key, value in in_order)} not used; "
    assert (remark in decision.record.line) == ("not used" in decision.record.line) == is_named
    # The record and the workers have it too, and the parameters are the group's.
    policy_loss = actor_of(config).policy_loss
    assert policy_loss.run.record.loss.unused == unused == decision.record.loss.unused
    assert record_of(OmegaConf.to_container(config)).loss.unused == unused
    assert decision.record.loss.taken == {} and "clip_low" not in config.clipx
    assert policy_loss.clipx == actor_of(merge([f"+clipx={group}"])).policy_loss.clipx


# --- Refusals --------------------------------------------------------------------------------------------------------

VLLM = f"{ROLLOUT}.name=vllm"
RAW_LOG_PROBS = f"{ROLLOUT}.logprobs_mode=raw_logprobs"
LOG_PROBS_OF_VLLM = "engine_kwargs.vllm.logprobs_mode=processed_logprobs"
TOP_P = f"{ROLLOUT}.top_p=0.9"
DISTILLATION = "distillation.enabled=True"
WITHOUT_TASK_REWARDS = "distillation.distillation_loss.use_task_rewards=False"
BYPASSED = f"{CORRECTION}.bypass_mode=True"
TOKEN_WEIGHTS = f"{CORRECTION}.rollout_is=token"
CENTERED_SCORES = f"+{CORRECTION}.score_centering=True"
SEQUENCE_REJECTION = (f"{CORRECTION}.rollout_rs=seq_mean_k3", f"{CORRECTION}.rollout_rs_threshold=0.01")
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size=2"
MEGATRON = f"{ACTOR}.strategy=megatron"
VEOMNI = f"{ACTOR}.strategy=veomni"
FSDP2 = f"{ACTOR}.strategy=fsdp2"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
FUSED_KERNELS = "actor_rollout_ref.model.use_fused_kernels=True"
SELECTED_BEFORE_UPDATE = ("+clipx/select=high_entropy", "clipx.select.over=mini_batch")
MODELS = Path(__file__).parent / "fixtures" / "models"
# Whether the model's head has the embedding's weights.
UNTIED_MODEL = f"actor_rollout_ref.model.path={MODELS / 'untied'}"
TIED_MODEL = f"actor_rollout_ref.model.path={MODELS / 'tied'}"

# key=value: reason. Advice.
FORM_OF_REFUSAL = re.compile(r"(?s)[\w.]+=.+?: .+[^.]\. [A-Z].+[.]")

# What the reason or the advice names, and the overrides, of which the last is refused.
REFUSED = [
    # What would train something else than the line says.
    ("clipx.method=acpo", ("+clipx=acpo", f"{POLICY_LOSS}.loss_mode=vanilla")),
    ("+clipx=acpo", (f"{POLICY_LOSS}.loss_mode=clipx_acpo",)),
    ("+clipx=custom clipx.function=", (f"{POLICY_LOSS}.loss_mode=clipx_somebody_s",)),
    ("+clipx=grpo", ("+clipx=observe", f"{POLICY_LOSS}.loss_mode=clipx_grpo")),
    ("vanilla", ("+clipx=observe", f"{POLICY_LOSS}.loss_mode=ppo")),
    ("the method acpo", ("+clipx=acpo", DISTILLATION, WITHOUT_TASK_REWARDS)),
    ("+clipx=observe", ("+clipx=observe", DISTILLATION, WITHOUT_TASK_REWARDS)),
    ("bypass_mode=True", ("+clipx=acpo", BYPASSED, TOKEN_WEIGHTS)),
    ("clipx.behaviour=old", ("+clipx=m2po", f"{LOG_PROBS}=true", TOKEN_WEIGHTS)),
    ("method tests_to_sampler", ("+clipx=custom", "clipx.function=tests.example_losses:ToSampler", TOKEN_WEIGHTS)),
    # A mask that compares two policies which are one.
    ("clipx.mask.rule=icepop", ("+clipx=grpo", "+clipx/mask=icepop", BYPASSED)),
    ("ppo_clip", ("+clipx=grpo", BYPASSED, f"{CORRECTION}.loss_type=reinforce")),
    ("its own loss", ("+clipx=grpo", BYPASSED, CENTERED_SCORES)),
    # As verl's presets bypass_pg_*_sc will set them.
    ("its own loss", ("+clipx=topr", BYPASSED, CENTERED_SCORES)),
    ("logits", ("+clipx=observe", BYPASSED, f"{CORRECTION}.loss_type=reinforce", CENTERED_SCORES)),
    ("clipx.pull.anchor=rollout", ("+clipx=grpo", "+clipx/pull=k2", "clipx.pull.anchor=rollout", f"{LOG_PROBS}=False")),
    (CORRECTION, ("+clipx=grpo", f"{POLICY_LOSS}.rollout_correction.rollout_is=sequence")),
    (f"{ACTOR}.loss_scale_factor=null", ("+clipx=grpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm")),
    # Ratios to the sampler that are off.
    ("raw_logprobs", ("+clipx=m2po", VLLM, TOP_P)),
    # At another temperature the bare logits' are no remedy.
    ("top_k=-1.", ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.temperature=0.8", f"{ROLLOUT}.top_k=20")),
    ("cpu's log-prob", ("+clipx=acpo", TOKEN_WEIGHTS, f"{ROLLOUT}.name=cpu", f"{ROLLOUT}.min_p=0.05")),
    ("top_k=-1", ("+clipx=acpo", *SEQUENCE_REJECTION, VLLM, f"{ROLLOUT}.top_k=50", TOP_P)),
    ("the version of sglang", ("+clipx=acpo", BYPASSED, f"{ROLLOUT}.name=sglang", RAW_LOG_PROBS, TOP_P)),
    (LOG_PROBS_OF_VLLM, ("+clipx=acpo", BYPASSED, VLLM, RAW_LOG_PROBS, f"{ROLLOUT}.{LOG_PROBS_OF_VLLM}", TOP_P)),
    ("temperature=0.8", ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.temperature=0.8", RAW_LOG_PROBS)),
    ("processed", ("+clipx=acpo", BYPASSED, VLLM, f"{ROLLOUT}.logprobs_mode=raw_logits")),
    # verl's LOCAL, where verl has it: `test_verls_local_is_refused_as_soon_as_verl_has_it`.
    ("clipx.method=grpo", ("+clipx=grpo", f"{POLICY_LOSS}.loss_mode=local")),
    ("logits", ("+clipx=observe", f"{POLICY_LOSS}.loss_mode=local")),
    # Where the loss runs elsewhere.
    *(
        (named, (group, override))
        for group, named in (("+clipx=acpo", "the method acpo"), ("+clipx=observe", "+clipx=observe"))
        for override in (
            "trainer.v1.trainer_mode=remote_backend",
            "+trainer.remote_backend=arctic",
            "+runtime.backend=monarch",
        )
    ),
    # Engines that cannot serve the loss.
    (f"{ATTENTION}=sdpa", ("+clipx=grpo", f"{ATTENTION}=sdpa", ULYSSES)),
    (
        f"{ATTENTION}=sdpa",
        ("+clipx=observe", f"{ATTENTION}=sdpa", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"),
    ),
    (f"{ATTENTION}=sdpa", ("+clipx=grpo", f"{ATTENTION}=sdpa", ULYSSES.replace("actor.", "ref."))),
    ("untied", ("+clipx=grpo", FSDP2, UNTIED_MODEL, FUSED_KERNELS)),
    ("R3", ("+clipx=acpo", VEOMNI, f"+{ACTOR}.veomni.router_replay.mode=R2")),
    ("before each update", ("+clipx=grpo", *SELECTED_BEFORE_UPDATE, VEOMNI, f"+{ACTOR}.veomni.router_replay.mode=R2")),
    ("data-parallel group", ("+clipx=grpo", MEGATRON, f"{ACTOR}.megatron.dynamic_context_parallel=True")),
    # What verl would stop at minutes later, or pass over.
    ("no update", ("+clipx=observe", f"{ACTOR}.ppo_epochs=0")),
    ("no update", ("+clipx=observe", f"{ACTOR}.ppo_epochs=0.5")),
    ("'token'", ("+clipx=acpo", f"{CORRECTION}.rollout_is=nonsense")),
    ("must be provided", ("+clipx=grpo", f"{CORRECTION}.rollout_rs=token_k1")),
    (BYPASSED, ("+clipx=acpo", BYPASSED, f"{LOG_PROBS}=False")),
    (TOKEN_WEIGHTS, ("+clipx=observe", TOKEN_WEIGHTS, f"{LOG_PROBS}=False")),
    (SEQUENCE_REJECTION[0], ("+clipx=acpo", *SEQUENCE_REJECTION, f"{LOG_PROBS}=False")),
    ("clipx.weight=rollout", ("+clipx=bapo", "clipx.weight=rollout", f"{LOG_PROBS}=False")),
    ("clipx.behaviour=rollout", ("+clipx=m2po", f"{LOG_PROBS}=False")),
    # Bounds beside those that are solved for.
    ("clipx.hold", ("+clipx=dapo", *HOLD, "clipx.clip_high=1.28")),
    ("clipx.hold", ("+clipx=ipo", *HOLD, "clipx.threshold=0.5")),
    # Keys of the loss where nothing reads them.
    (f"{ACTOR}.clip_ratio_high", ("+clipx=acpo", "actor.clip_ratio_high=0.3")),
    (f"{ACTOR}.kl_loss_coef", ("+clipx=observe", "algorithm.kl_loss_coef=0.3")),
    (f"{ACTOR}.clip_ratio", ("+clipx=acpo", "clip_ratio=0.3")),
]


@pytest.mark.parametrize(("named", "overrides"), REFUSED, ids=lambda value: None)
def test_the_last_override_is_refused_with_key_value_and_what_to_do(named, overrides):
    (refusal,) = find_refusals(*overrides)
    assert f"{refusal.key}={refusal.value}" == overrides[-1].lstrip("+")
    assert named in f"{refusal.reason}. {refusal.advice}" and refusal.advice
    assert FORM_OF_REFUSAL.fullmatch(str(refusal)), refusal


def test_all_that_is_wrong_is_said_at_once():
    keys = [
        refusal.key
        for refusal in find_refusals(
            "+clipx=dapo", *actor_overrides(clip_ratio_high=0.2, ppo_epochs=0), BYPASSED, TOKEN_WEIGHTS
        )
    ]
    assert keys == [f"{CORRECTION}.rollout_is", f"{ACTOR}.ppo_epochs", f"{ACTOR}.clip_ratio_high"]


OWN_LOSS = ("+clipx=custom", "clipx.function=tests.example_losses:soft")


@pytest.mark.parametrize(
    "overrides",
    [
        (*OWN_LOSS, f"{POLICY_LOSS}.loss_mode=vanilla"),
        ("+clipx=observe", f"{POLICY_LOSS}.loss_mode=clipx_somebody_s"),
    ],
)
def test_a_loss_of_ones_own_is_advised_with_the_group_that_it_has(overrides):
    (refusal,) = find_refusals(*overrides)
    text = f"{refusal.reason}. {refusal.advice}"
    assert set(re.findall(r"\+clipx=\w+", text)) == {"+clipx=custom", "+clipx=observe"}
    assert "clipx.method" not in text


PULLED = ("+clipx=grpo", "+clipx/pull=k2")


@pytest.mark.parametrize(
    ("overrides", "advice", "changed"),
    [
        (
            ("+clipx=observe", BYPASSED, TOKEN_WEIGHTS, *SEQUENCE_REJECTION),
            f"set {CORRECTION}.bypass_mode=False and set {CORRECTION}.rollout_is=null and set "
            f"{CORRECTION}.rollout_rs=null",
            ("+clipx=observe", f"{CORRECTION}.bypass_mode=False", f"{CORRECTION}.rollout_is=null"),
        ),
        (("+clipx=m2po",), "set clipx.behaviour=old", ("+clipx=m2po", "clipx.behaviour=old")),
        (
            ("+clipx=bapo", "clipx.weight=rollout", "+clipx/mask=icepop"),
            "set clipx.weight=old and leave out +clipx/mask=icepop",
            ("+clipx=bapo", "clipx.weight=old"),
        ),
        (
            (*PULLED, "clipx.pull.anchor=rollout"),
            "set clipx.pull.anchor=old",
            (*PULLED, "clipx.pull.anchor=old"),
        ),
        (
            ("+clipx=custom", "clipx.function=tests.example_losses:ToSampler"),
            "choose another method",
            ("+clipx=grpo",),
        ),
    ],
)
def test_without_log_probs_the_advice_names_all_that_has_to_change(overrides, advice, changed):
    (refusal,) = find_refusals(*overrides, f"{LOG_PROBS}=False")
    assert (refusal.key, refusal.advice) == (LOG_PROBS, f"Set it to True, or {advice}.")
    assert find_refusals(*changed, f"{LOG_PROBS}=False") == []


def test_every_refusal_of_the_table_is_met_above():
    refusal_tests = {row.refusal for row in ROWS.values() if row.refusal is not None}
    met = set()
    for _, overrides in REFUSED:
        groups = [word for word in overrides if word.startswith("+clipx")]
        if groups:
            config = merge(groups, parse(*(word for word in overrides if word not in groups)))
            values = read(config)
            node = instantiate(config.clipx)
            met |= {test for test in refusal_tests if [*test(values, node)]}
    assert [test.__name__ for test in refusal_tests - met] == []


def test_verls_local_is_refused_as_soon_as_verl_has_it(monkeypatch):
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "local", core_algos.POLICY_LOSS_REGISTRY["vanilla"])
    for group in ("+clipx=grpo", "+clipx=observe"):
        (refusal,) = find_refusals(group, f"{POLICY_LOSS}.loss_mode=local")
        assert (refusal.key, refusal.value) == (f"{POLICY_LOSS}.loss_mode", "local")
    assert {row_of(f"{POLICY_LOSS}.{key}").key for key in ("local_eta", "local_topk")} <= ROWS.keys()


def test_a_remote_backend_is_refused_however_verl_names_it():
    for config in (
        {"remote_backend": {"name": "arctic"}},
        {"trainer": {"remote_backend": "arctic", "v1": {"trainer_mode": "remote_backend"}}},
        {"trainer": {"remote_backend": "arctic", "v1": {"trainer_mode": "sync"}}},
    ):
        with_backend = OmegaConf.merge(merge(["+clipx=grpo"]), config)
        with pytest.raises(Refusal, match="runs in that backend") as error:
            resolve_into_config(with_backend)
        assert len(error.value.all) == 1


@pytest.mark.parametrize(("version", "are_recorded"), [("0.9.0", True), ("0.9.1", False), ("0.10.0.dev", True)])
def test_under_megatron_the_version_says_whether_an_extra_pass_records_routes(monkeypatch, version, are_recorded):
    monkeypatch.setattr(verl_version, "verl_version", lambda: version)
    keys = [
        refusal.key for refusal in find_refusals("+clipx=acpo", MEGATRON, f"+{ACTOR}.megatron.router_replay.mode=R2")
    ]
    assert keys == [f"{ACTOR}.megatron.router_replay.mode"] * are_recorded


@pytest.mark.parametrize("group", ["+clipx=acpo", "+clipx=grpo", "+clipx=observe"])
@pytest.mark.parametrize("mode", ["disabled", "R2", "R3"])
def test_which_recorded_routes_verl_replays_changes_no_run_of_ours(group, mode):
    key = f"{ACTOR}.router_replay.mode"
    row = row_of(key)
    assert row is not None and (row.key, row.fate, row.on_path) == (key, READ_BY_VERL, False)
    assert decide(group, f"+{key}={mode}")[1].record.line == decide(group)[1].record.line


SERVED = [
    ("+clipx=acpo", "+runtime.backend=ray"),
    ("+clipx=acpo", "+runtime.backend=null", "+trainer.remote_backend=null"),
    ("+clipx=acpo", f"+{POLICY_LOSS}.local_eta=5.0"),
    ("+clipx=acpo", ULYSSES, f"{ATTENTION}=flash_attention_3"),
    ("+clipx=acpo", f"{ATTENTION}=sdpa"),
    # Routes that are replayed in every pass, no pass before an update, and the key of another engine.
    ("+clipx=acpo", VEOMNI, f"+{ACTOR}.veomni.router_replay.mode=R3"),
    ("+clipx=grpo", VEOMNI, f"+{ACTOR}.veomni.router_replay.mode=R2"),
    ("+clipx=acpo", "clipx.scope=micro_batch", VEOMNI, f"+{ACTOR}.veomni.router_replay.mode=R2"),
    ("+clipx=observe", VEOMNI, f"+{ACTOR}.veomni.router_replay.mode=R2"),
    ("+clipx=acpo", FSDP2, f"+{ACTOR}.veomni.router_replay.mode=R2"),
    ("+clipx=grpo", FUSED_KERNELS, FSDP2, TIED_MODEL),
    ("+clipx=grpo", FUSED_KERNELS, UNTIED_MODEL),
    ("+clipx=grpo", FUSED_KERNELS, FSDP2, "actor_rollout_ref.model.path=hdfs://model"),
    ("+clipx=acpo", BYPASSED, *SEQUENCE_REJECTION),
    ("+clipx=grpo", BYPASSED, "+clipx/mask=opsm", "clipx.mask.delta=0.1"),
    ("+clipx=grpo", "+clipx/mask=icepop"),
    ("+clipx=cispo", *HOLD, "clipx.mask_high=1.3"),
    ("+clipx=m2po", "clipx.behaviour=old", TOKEN_WEIGHTS),
    ("+clipx=observe", BYPASSED, TOKEN_WEIGHTS, f"{CORRECTION}.loss_type=reinforce"),
    ("+clipx=acpo", DISTILLATION, "distillation.distillation_loss.clip_ratio_high=0.28"),
    ("+clipx=acpo", WITHOUT_TASK_REWARDS),
    ("+clipx=acpo", VLLM, TOP_P),
    ("+clipx=m2po", VLLM, TOP_P, RAW_LOG_PROBS),
    ("+clipx=m2po", VLLM, f"{ROLLOUT}.temperature=0.8", f"{ROLLOUT}.val_kwargs.top_p=0.7"),
    ("+clipx=observe", BYPASSED, VLLM, TOP_P),
    ("+clipx=grpo", f"{LOG_PROBS}=False"),
    ("+clipx=m2po_reference", f"{LOG_PROBS}=False"),
    ("+clipx=grpo", f"{CORRECTION}.rollout_is=sequence", f"{CORRECTION}.rollout_is_threshold=0.5_5.0"),
    # verl's own loss is verl's business, and what verl passes on to other code may have any name.
    ("+clipx=observe", f"{POLICY_LOSS}.loss_mode=dro", f"{POLICY_LOSS}.tau_neg=1.2"),
    ("+clipx=acpo", "reward.custom_reward_function.reward_kwargs.clip_ratio=0.3"),
]


@pytest.mark.parametrize("overrides", SERVED, ids=lambda value: None)
def test_the_nearest_run_that_is_served_is_not_refused(overrides):
    log_probs = [] if any(override.startswith(LOG_PROBS) for override in overrides) else [f"{LOG_PROBS}=True"]
    assert find_refusals(*overrides, *log_probs) == []


# --- The table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    ["dp", *(pytest.param(engine, marks=pytest.mark.slow) for engine in ("megatron", "veomni", "torchtitan"))],
)
def test_every_key_that_verl_composes_is_known(engine):
    keys = entries_by_key(OmegaConf.to_container(compose_by_hydra(f"model_engine={engine}"), resolve=False))
    # Keys, and whole subtrees, that nothing on the way to the loss reads under a name that it does not have elsewhere.
    known = {row.key for row in ROWS.values()} | {*OFF_THE_PATH.read_text().split()}
    at_or_below_known = {key for key in keys if any(f"{key}.".startswith(f"{part}.") for part in known)}
    above_known = {key for key in keys if any(part.startswith(f"{key}.") for part in known)}
    new = sorted(key for key in keys if key not in at_or_below_known | above_known)
    assert not new, (
        f"verl has keys that the plugin does not know: {', '.join(new)}. Give one that matters to the loss a row in "
        f"verl_clipx/run/keys.py, and each of the others, or the node around them, a line in "
        f"{OFF_THE_PATH.relative_to(REPOSITORY)}."
    )


def test_a_key_has_one_row_and_the_page_names_each_that_may_be_refused():
    with pytest.raises(ValueError, match="loss_mode has a row already"):
        declare(LOSS_MODE, READ_BY_VERL, "somebody else")
    assert row_of(f"{ACTOR}.clip_ratio_low").key == f"{ACTOR}.clip_ratio_low"
    assert row_of("critic.optim.lr").key == "critic" and row_of("data_of_mine") is None
    # A new key beside those of the path has none.
    for node in (ACTOR, POLICY_LOSS, "algorithm", CORRECTION, "distillation.distillation_loss"):
        assert any(row.key.rpartition(".")[0] == node for row in ROWS.values() if row.on_path)
        assert row_of(f"{node}.a_new_key") is None
    refusals = runpy.run_path(str(REPOSITORY / "scripts" / "key_tables.py"))["refusal_list"]()
    _, _, after = (REPOSITORY / "docs" / "support.md").read_text().partition("<!-- python scripts/key_tables.py -->")
    assert after.partition("<!-- end -->")[0].strip() == refusals
