"""What the keys of verl's own losses are to each method: taken over as its parameters, or refused by name.

Covers: by overrides on verl's configuration, as the driver decides and as driver and workers then build it: what each
key becomes, when it counts, what is refused, that deciding twice changes nothing; GRPO and SAPO with verl's keys
against verl's own losses. Not covered: that no key is missing which verl's losses read (test_verl_contract.py of the
worker), verl's example scripts (tests/claims/test_verl_examples.py), the start of a run (test_start.py).
"""

import inspect
import math

import pytest
import torch
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.workers.config.actor import ActorConfig, PolicyLossConfig
from verl_clipx.run.clip_keys import ACTOR, OF_OTHER_LOSSES, VERL_DEFAULTS, meanings

from tests.claims.configuration import actor_of, built, hydra_s, merged
from tests.golden.runs import registered_loss
from verl_clipx.methods import BUILT_IN, METHODS
from verl_clipx.run.config import completed
from verl_clipx.run.start import decide
from verl_clipx.run.user_keys import named_keys


def decided(group, *overrides):
    """The configuration of a run with these overrides once the driver has decided, and its decision."""
    values = {}
    for override in overrides:
        key, _, value = override.partition("=")
        values[key] = OmegaConf.from_dotlist([f"value={value}"]).value
    config = merged([group], values)
    return config, decide(config, named=named_keys(overrides))


def of_verl(**keys):
    return [f"{ACTOR}.{key}={value}" for key, value in keys.items()]


def test_the_defaults_are_those_of_verl():
    actor = hydra_s().actor_rollout_ref.actor
    for key, value in VERL_DEFAULTS.items():
        assert actor[key] == ActorConfig.__dataclass_fields__[key].default == value


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
        ("gspo", dict(clip_ratio_low=4e-4, clip_ratio_high=6e-4), dict(clip_low=0.9996, clip_high=1.0006)),
        ("gspo", dict(clip_ratio_low=3e-4, clip_ratio_high=4e-4), dict(clip_low=0.9997, clip_high=1.0004)),
        # Divergences, and the truncation, as in verl's dppo losses.
        (
            "dppo",
            dict(clip_ratio_low=0.15, clip_ratio_high=0.1, clip_ratio_c=20),
            dict(threshold_low=0.15, threshold_high=0.1, weight_high=20.0),
        ),
        ("acpo", dict(clip_ratio_c=10), dict(dual_clip=10.0, epsilon_base=0.2)),
        # verl's defaults, written out, mean nothing to bounds that adapt, and are no loss either.
        ("acpo", dict(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2), dict(epsilon_base=0.2, dual_clip=None)),
        ("gspo", dict(clip_ratio_low=1e-2), dict(clip_low=0.99, clip_high=1.0004)),
        # SAPO's temperatures: verl reads the actor's, its scripts write them under policy_loss.
        ("sapo", dict(tau_pos=2.0, tau_neg=4), dict(tau_positive=2.0, tau_negative=4.0)),
        ("sapo", {"policy_loss.tau_neg": 1.2}, dict(tau_positive=1.0, tau_negative=1.2)),
        ("sapo", {"tau_pos": 2.0, "policy_loss.tau_pos": 2.0}, dict(tau_positive=2.0)),
        ("sapo", {"tau_pos": 1.0, "policy_loss.tau_neg": 1.05}, dict(tau_positive=1.0, tau_negative=1.05)),
        # null: no dual clip, which is all that a method without one has.
        ("grpo", dict(clip_ratio_c="null"), dict(dual_clip=None, clip_high=1.2)),
        ("acpo", dict(clip_ratio_c="null"), dict(dual_clip=None)),
        ("dppo", dict(clip_ratio_c="null"), dict(weight_high=None)),
        ("gspo", dict(clip_ratio_c="null"), dict(clip_high=1.0004)),
        ("sapo", dict(clip_ratio_c="null"), dict(tau_positive=1.0)),
        # The defaults of keys that other losses read ask for nothing.
        (
            "acpo",
            {
                "tau_pos": 1.0,
                "policy_loss.tau_neg": 1.05,
                "policy_loss.ppo_kl_coef": 0.1,
                "policy_loss.dro_beta": "null",
            },
            dict(epsilon_base=0.2),
        ),
    ],
)
def test_verls_key_becomes_the_methods(group, keys, expected):
    config, decision = decided(f"+clipx={group}", *of_verl(**keys))
    # Written down for verl's own print of the configuration, and for the workers, who know no command line.
    assert {name: value for name, value in completed(config.clipx).items() if name in expected} == expected
    method = actor_of(config).policy_loss.clipx.method
    assert {name: getattr(method, name) for name in expected} == expected
    assert decide(config).taken == {}
    for parameter, taken in decision.taken.items():
        assert getattr(method, parameter) == taken.value and taken.key in keys


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_method_takes_widths_over_or_says_which_parameters_are_in_their_place(name):
    method = METHODS[name]()
    assert bool(method.instead_of_bounds) != ("clip_ratio_high" in meanings(method))
    assert set(method.instead_of_bounds) <= method.parameters.keys()


def test_a_configuration_that_no_run_started_with_takes_over_and_refuses_the_same():
    actor = actor_of(merged(["+clipx=grpo"], {f"{ACTOR}.clip_ratio_high": 0.28, f"{ACTOR}.clip_ratio_c": None}))
    assert actor.policy_loss.clipx.method.clip_high == 1.28
    assert actor.policy_loss.clipx.method.dual_clip is None
    actor = actor_of(merged(["+clipx=sapo"], {f"{ACTOR}.tau_neg": 4}))
    assert actor.policy_loss.clipx.method.tau_negative == 4
    assert actor_of(merged(["+clipx=dro"], {f"{ACTOR}.policy_loss.dro_beta": 0.5})).policy_loss.clipx.method.beta == 0.5
    with pytest.raises(InstantiationException, match=r"policy_loss\.dro_beta=0\.5 with \+clipx=sapo"):
        actor_of(merged(["+clipx=sapo"], {f"{ACTOR}.policy_loss.dro_beta": 0.5}))


def test_the_loss_that_reads_a_key_is_the_one_that_is_named():
    for key, (default, loss) in OF_OTHER_LOSSES.items():
        assert PolicyLossConfig.__dataclass_fields__[key].default == default
        function = core_algos.POLICY_LOSS_REGISTRY[loss]
        assert f"config.policy_loss.{key}" in inspect.getsource(inspect.unwrap(function))


def test_a_tokens_width_on_a_sequences_ratio_is_taken_where_ours_says_so_too():
    config, _ = decided("+clipx=gspo", "clipx.clip_high=1.28", *of_verl(clip_ratio_high=0.28))
    assert actor_of(config).policy_loss.clipx.method.clip_high == 1.28


def test_without_verls_keys_nothing_is_taken_over():
    for name in METHODS:
        if (group := f"+clipx={name}") != "+clipx=custom" and METHODS[name].__module__.startswith("verl_clipx."):
            assert decided(group)[1].taken == {}


@pytest.mark.parametrize(
    ("group", "overrides", "message"),
    [
        # Ours is set too: by the user, even to its default, or by the group.
        (
            "grpo",
            ["clipx.clip_high=1.3", *of_verl(clip_ratio_high=0.28)],
            r"actor\.clip_ratio_high=0\.28 would be clipx\.clip_high=1\.28, but .* says clipx\.clip_high=1\.3\. Remove",
        ),
        (
            "grpo",
            ["clipx.clip_high=1.2", *of_verl(clip_ratio_high=0.28)],
            r"clip_high=1\.28, but .*clip_high=1\.2\. Rem",
        ),
        (
            "grpo",
            ["clipx.dual_clip=null", *of_verl(clip_ratio_c=10)],
            r"dual_clip=10, but .*clipx\.dual_clip=null\. Rem",
        ),
        (
            "dapo",
            of_verl(clip_ratio_high=0.3),
            r"clipx\.clip_high=1\.3, but .* says clipx\.clip_high=1\.28\. Remove one",
        ),
        (
            "grpo",
            ["clipx.clip_low=0.7", *of_verl(clip_ratio=0.2)],
            r"actor\.clip_ratio=0\.2 would be clipx\.clip_low=0\.8",
        ),
        # It cannot mean this.
        (
            "grpo",
            of_verl(clip_ratio_low=1),
            r"clip_ratio_low=1 would be clipx\.clip_low=0, which is not a bound on any ratio\. Remove",
        ),
        (
            "cispo",
            of_verl(clip_ratio_low=10),
            r"clip_ratio_low=10 would be clipx\.clip_low=-9, which is not a bound on any ratio",
        ),
        (
            "grpo",
            of_verl(clip_ratio_low=3e-4),
            r"clip_ratio_low=0\.0003 .*clip_low=0\.9997: a width under 0\.01 is meant for",
        ),
        (
            "dapo",
            of_verl(clip_ratio_low=3e-4),
            r"clip_low=0\.9997: a width under 0\.01 .* grpo bounds the ratio of a token",
        ),
        ("grpo", of_verl(clip_ratio_high=0), r"clip_ratio_high=0 would be clipx\.clip_high=1: a width under"),
        ("grpo", of_verl(clip_ratio_high=-0.1), r"clip_ratio_high=-0\.1 would be clipx\.clip_high=0\.9"),
        (
            "grpo",
            of_verl(clip_ratio_c=1),
            r"clip_ratio_c=1 would be clipx\.dual_clip=1, which must be .*\(above 1.* Change it, or remove it to",
        ),
        (
            "gspo",
            of_verl(clip_ratio_high=0.28),
            r"clip_ratio_high=0\.28 would be clipx\.clip_high=1\.28: a width over 0\.01 is meant for the ratio of a "
            r"token, but gspo bounds the ratio of a sequence.* Set .*actor\.clip_ratio_high to .*4e-4.* "
            r"or also set clipx\.clip_high=1\.28 if you mean it",
        ),
        ("gspo", of_verl(clip_ratio_low=0.2), r"clip_ratio_low=0\.2 would be clipx\.clip_low=0\.8: a width over 0\.01"),
        (
            "gspo",
            of_verl(clip_ratio_low=-0.1),
            r"clip_ratio_low=-0\.1 would be clipx\.clip_low=1\.1, which must be .*at most 1",
        ),
        # A percentage.
        (
            "dapo",
            of_verl(clip_ratio_high=28),
            r"clip_high=29, which must be .*at most 20.*\. For 28 %, write 0\.28, or remove it to .*clip_high=1\.28",
        ),
        (
            "gmpo",
            of_verl(clip_ratio_low=28),
            r"clip_low=6\.9144e-13, which must be .* For 28 %, write 0\.28",
        ),
        (
            "dppo",
            of_verl(clip_ratio_low=20),
            r"threshold_low=20, which must be .* write 0\.2, .*threshold_low=0\.2",
        ),
        ("grpo", of_verl(clip_ratio_high="high"), r"actor\.clip_ratio_high=high: must be a number"),
        # It would be ignored.
        (
            "acpo",
            of_verl(clip_ratio_high=0.28),
            r"clip_ratio_high=0\.28 with \+clipx=acpo, which has no fixed bound .* set clipx\.epsilon_base or",
        ),
        ("bapo", of_verl(clip_ratio=0.1), r"clip_ratio=0\.1 with \+clipx=bapo.*\. Remove .*actor\.clip_ratio\. "),
        ("sapo", of_verl(clip_ratio_low=0.1), r"clip_ratio_low=0\.1 with \+clipx=sapo, which has no fixed bound"),
        ("gspo", of_verl(clip_ratio_c=10), r"clip_ratio_c=10 with \+clipx=gspo, which has no dual clip"),
        ("acpo_reference", of_verl(clip_ratio_c=10), r"clipx\.dual_clip=10, but .* says clipx\.dual_clip=3\. Remove"),
        (
            "acpo_reference",
            of_verl(clip_ratio_c="null"),
            r"clip_ratio_c=null would be clipx\.dual_clip=null, but .* says clipx\.dual_clip=3\. Remove",
        ),
        ("sapo", of_verl(tau_pos=0), r"actor\.tau_pos=0 would be clipx\.tau_positive=0, which must be a number"),
        ("sapo", of_verl(tau_neg="null"), r"tau_neg=null would be clipx\.tau_negative=null, which must be a number"),
        (
            "sapo",
            ["clipx.tau_positive=3", *of_verl(tau_pos=2)],
            r"tau_pos=2 would be clipx\.tau_positive=2, but .* says clipx\.tau_positive=3\. Remove",
        ),
        (
            "sapo",
            of_verl(**{"tau_pos": 2, "policy_loss.tau_pos": 3}),
            r"actor\.policy_loss\.tau_pos=3 but actor_rollout_ref\.actor\.tau_pos=2: they contradict .* Remove one",
        ),
        (
            "grpo",
            of_verl(tau_pos=2),
            r"tau_pos=2 with \+clipx=grpo, which has no temperature and would ignore it",
        ),
        (
            "acpo",
            of_verl(**{"policy_loss.tau_neg": 2}),
            r"actor\.policy_loss\.tau_neg=2 with \+clipx=acpo, which has no temperature",
        ),
        (
            "acpo",
            of_verl(**{"policy_loss.dro_beta": 0.5}),
            r"policy_loss\.dro_beta=0\.5 with \+clipx=acpo, which has no penalty and would ignore it\. Remove",
        ),
        (
            "dro",
            ["clipx.beta=0.1", *of_verl(**{"policy_loss.dro_beta": 0.5})],
            r"policy_loss\.dro_beta=0\.5 would be clipx\.beta=0\.5, but .* says clipx\.beta=0\.1\. Remove one",
        ),
        ("dro", of_verl(**{"policy_loss.dro_beta": 0}), r"dro_beta=0 would be clipx\.beta=0, which must be a number"),
        # Only another of verl's losses reads it.
        *(
            (
                "acpo",
                of_verl(**{f"policy_loss.{key}": value}),
                rf"actor\.policy_loss\.{key}={value} with \+clipx=acpo: only verl's own loss {loss} reads it, .*"
                rf"Remove actor_rollout_ref\.actor\.policy_loss\.{key}\.",
            )
            for key, value, loss in (
                *(("clip_cov_ratio", 0.01, "clip_cov"), ("clip_cov_lb", 2, "clip_cov"), ("clip_cov_ub", 4, "clip_cov")),
                *(("kl_cov_ratio", 0.01, "kl_cov"), ("ppo_kl_coef", 1, "kl_cov")),
            )
        ),
        (
            "grpo",
            of_verl(**{"policy_loss.rollout_correction.rollout_is": "token"}),
            r"policy_loss\.rollout_correction\.rollout_is=token with .*bypass_mode reads it.*algorithm\.rollout_corr",
        ),
        (
            "grpo",
            of_verl(**{"policy_loss.rollout_correction.loss_type": "reinforce"}),
            r"policy_loss\.rollout_correction\.loss_type=reinforce with \+clipx=grpo: only verl's own loss",
        ),
        # Its value is verl's default, but nobody else would have written it there.
        (
            "grpo",
            of_verl(**{"policy_loss.rollout_correction.rollout_is": "sequence"}),
            r"policy_loss\.rollout_correction\.rollout_is=sequence with",
        ),
        # All that is wrong at once.
        (
            "acpo",
            of_verl(**{"clip_ratio_high": 0.28, "policy_loss.kl_cov_ratio": 0.1}),
            r"(?s)(?=.*clip_ratio_high=0\.28 with)(?=.*kl_cov_ratio=0\.1 with)",
        ),
    ],
)
def test_what_cannot_be_taken_over_stops_with_both_keys(group, overrides, message):
    with pytest.raises(ValueError, match=message):
        decided(f"+clipx={group}", *overrides)


def test_a_narrow_bound_stands_where_ours_says_it_too():
    config, _ = decided("+clipx=grpo", "clipx.clip_low=0.9997", *of_verl(clip_ratio_low=3e-4))
    assert config.clipx.clip_low == 0.9997


def test_observe_leaves_verls_keys_alone():
    other_losses = {"tau_pos": 2, "policy_loss.kl_cov_ratio": 0.1, "policy_loss.rollout_correction.loss_type": "x"}
    keys = dict(clip_ratio_low=10, clip_ratio_high=3e-4, clip_ratio_c=1, **other_losses)
    config, decision = decided("+clipx=observe", *of_verl(**keys))
    assert decision.taken == {} and "clip_low" not in config.clipx
    assert config.actor_rollout_ref.actor.policy_loss.kl_cov_ratio == 0.1


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
    verl = registered_loss(built(hydra_s(*keys, f"{ACTOR}.policy_loss.loss_mode=sapo")), tensors)
    torch.testing.assert_close(ours[:2], verl[:2])
