"""Every Hydra group of configs/clipx, alone, with a quarter of the modifiers and under every scope, trains two steps
through the composed configuration and verl's ppo_loss, or says in the driver why it does not; with `-m matrix` it meets
every modifier; +clipx=observe with verl's losses. Not covered: what the numbers are (tests/losses/methods,
tests/training/worker), the engine and several ranks (tests/end_to_end).
"""

import dataclasses
from itertools import product

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from tests.composition import MICRO_BATCH, by_hydra, composition
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import groups_of
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.losses.methods import METHODS as CLASSES
from verl_clipx.training.worker.registry import is_ours

from .configuration import ACTOR, actor_of, build_by_verl, compose_by_hydra, merge, parse, refusals_in
from .first_call import train_once

METHODS = sorted(f"+clipx={path.stem}" for path in (configs_folder() / "clipx").glob("*.yaml"))
# Those that go on top of a method.
MODIFIERS = sorted(f"+clipx/{path.parent.name}={path.stem}" for path in (configs_folder() / "clipx").glob("*/*.yaml"))
LOSSES_OF_VERL = sorted(name for name, function in POLICY_LOSS_REGISTRY.items() if not is_ours(function))
SCOPES = ["mini_batch", "lagged", "micro_batch"]


def keys_refused(config):
    """Return the plugin's keys that the driver refuses. An error that is no refusal is raised as it is."""
    # verl and Hydra raise errors of their own from the plugin's refusal.
    with pytest.raises(Exception) as raised:
        actor_of(config)
    refusals = refusals_in(raised.value)
    if not refusals:
        raise raised.value
    return [refusal.key for refusal in refusals]


def test_an_error_that_is_no_refusal_is_not_taken_for_one(monkeypatch):
    monkeypatch.setitem(keys_refused.__globals__, "actor_of", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        keys_refused(None)


# The value that a group needs which cannot train as it is: a loss of the user's own.
NEEDED_VALUES = {"+clipx=custom": {"clipx.function": "tests.example_losses:soft"}}
# The keys that they refuse.
REFUSED = {"+clipx=base": ["clipx.method"], **{group: [*values] for group, values in NEEDED_VALUES.items()}}
# The values that a modifier needs from the user.
VALUES_OF_MODIFIERS = {
    "+clipx/mask=opsm": {"clipx.mask.delta": 0.5},
    "+clipx/hold=clip_fraction": {"clipx.hold.value": 0.1},
    "+clipx/hold=second_moment": {"clipx.hold.value": 0.05},
}
# The methods' groups that can hold a second moment, and those that can hold a clip fraction.
HOLD_SECOND_MOMENT = {"+clipx=grpo", "+clipx=dapo", "+clipx=two_sided"}
HOLD_CLIP_FRACTION = {
    *HOLD_SECOND_MOMENT,
    "+clipx=gppo",
    "+clipx=ce_gppo",
    "+clipx=ce_gppo_reference",
    "+clipx=cispo",
    "+clipx=cispo_acpo",
    "+clipx=cispo_minimax",
    "+clipx=dgpo",
    "+clipx=dgpo_reference",
    "+clipx=dppo",
    "+clipx=dppo_reference",
    "+clipx=ipo",
    "+clipx=ipo_reference",
    "+clipx=gspo",
}
GROUPS_THAT_CAN_HOLD = {
    "+clipx/hold=second_moment": HOLD_SECOND_MOMENT,
    "+clipx/hold=clip_fraction": HOLD_CLIP_FRACTION,
}
# The methods' groups that have a pull of their own.
GROUPS_WITH_THEIR_OWN_PULL = {"+clipx=dro", "+clipx=kl_cov", "+clipx=kpop", "+clipx=p3o"}
TRAINABLE = [group for group in METHODS if group != "+clipx=base"]
# The one that trains verl's own loss: nothing that is about the plugin's losses goes with it.
OBSERVE = "+clipx=observe"
WITH_OPTIONS = [group for group in TRAINABLE if group != OBSERVE]
# Their statistics are in two stages, which cannot be those of another rollout batch.
TWO_STAGES = [
    f"+clipx={group}" for name in BUILT_IN if CLASSES[name]().second_statistics_size for group in groups_of(name)
]


def test_there_are_groups_of_every_kind():
    assert len(METHODS) >= 20 and {*REFUSED} <= {*METHODS}
    kinds = {modifier.removeprefix("+clipx/").split("=")[0] for modifier in MODIFIERS}
    assert kinds == {"shaping", "mask", "select", "update", "hold", "pull", "rollout", "trace"}


@pytest.mark.parametrize("scope", ["lagged", "micro_batch"])
def test_the_steps_have_tokens_in_every_region(scope):
    for group, values in (("grpo", {}), ("bapo", {}), ("acpo", {"clipx.epsilon_max": 0.5})):
        steps = train_once(actor_of(merge([f"+clipx={group}"], {**values, "clipx.scope": scope})))
        assert len(steps) == (2 if scope == "lagged" else 1)
        for metrics in steps:
            assert all(metrics[f"clipx/gradient_mass/{region}"] > 0 for region in ("LP", "HN", "M"))
            assert metrics["clipx/clip_fraction_low"] > 0 and metrics["clipx/clip_fraction_high"] > 0


@pytest.mark.parametrize("group", METHODS)
def test_a_group_trains_or_says_in_the_driver_what_it_needs(group):
    assert group not in REFUSED or keys_refused(merge([group])) == REFUSED[group]
    if group in TRAINABLE:
        train_once(actor_of(merge([group], NEEDED_VALUES.get(group, {}))))


def is_drawn(group, modifier):
    """Whether a pair is in every run: of a method's own group a quarter, in turn, so that each modifier meets a quarter
    of the methods. Other groups have other numbers alone; which of them can hold a target is a matter of the group.
    """
    in_turn = (WITH_OPTIONS.index(group) + MODIFIERS.index(modifier)) % 4 == 0
    return modifier in GROUPS_THAT_CAN_HOLD or (in_turn and group.partition("=")[2] in (*BUILT_IN, "custom"))


def refused_key(group, modifier):
    """Return the key of a modifier that a group refuses; None if they fit."""
    if modifier in GROUPS_THAT_CAN_HOLD and group not in GROUPS_THAT_CAN_HOLD[modifier]:
        can_hold_another_target = group in HOLD_CLIP_FRACTION
        return "clipx.hold.target" if can_hold_another_target else "clipx.hold"
    if "/pull=" in modifier and group in GROUPS_WITH_THEIR_OWN_PULL:
        return "clipx.pull"
    return None


def select_pairs(*, fit):
    """Return the pairs of a group and a modifier that fit, or those that don't, as parameters of a test."""
    pairs = []
    for group, modifier in product(WITH_OPTIONS, MODIFIERS):
        if (refused_key(group, modifier) is None) == fit:
            marks = [] if is_drawn(group, modifier) else [pytest.mark.matrix]
            pairs.append(pytest.param(group, modifier, marks=marks))
    return pairs


def merge_pair(group, modifier):
    """Return verl's configuration with a group, a modifier and the values that they need."""
    return merge([group, modifier], NEEDED_VALUES.get(group, {}) | VALUES_OF_MODIFIERS.get(modifier, {}))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "modifier"), select_pairs(fit=True))
def test_a_group_trains_with_a_modifier_that_fits(group, modifier):
    train_once(actor_of(merge_pair(group, modifier)))


@pytest.mark.slow
@pytest.mark.parametrize(("group", "modifier"), select_pairs(fit=False))
def test_a_modifier_that_does_not_fit_a_group_is_refused_by_its_key(group, modifier):
    assert keys_refused(merge_pair(group, modifier)) == [refused_key(group, modifier)]


@pytest.mark.slow
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("group", WITH_OPTIONS)
def test_a_group_trains_under_a_scope(group, scope):
    # +clipx.scope where the group does not have it: fixed bounds have no statistics that a scope could be about.
    config = merge([group], {**NEEDED_VALUES.get(group, {}), "clipx.scope": scope})
    if scope == "lagged" and group in TWO_STAGES:
        assert keys_refused(config) == ["clipx.scope"]
    else:
        train_once(actor_of(config))


@pytest.mark.parametrize("loss_mode", LOSSES_OF_VERL)
def test_every_loss_of_verls_trains_with_observe(loss_mode):
    values = {f"{ACTOR}.policy_loss.loss_mode": loss_mode}
    if loss_mode == "dro":
        values[f"{ACTOR}.policy_loss.dro_beta"] = 0.1
    (metrics,) = train_once(actor_of(merge([OBSERVE], values)))
    assert metrics["clipx/gradient_mass/M"] > 0


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_modifier_goes_neither_alone_nor_with_observe_unless_it_is_about_no_loss(modifier):
    if modifier.startswith(("+clipx/rollout", "+clipx/trace")):
        train_once(actor_of(merge([OBSERVE, modifier])))
    else:
        key = modifier.partition("=")[0].removeprefix("+").replace("/", ".")
        assert keys_refused(merge([OBSERVE, modifier])) == [key]
    if modifier.startswith("+clipx/rollout"):
        assert actor_of(merge([modifier])).policy_loss.loss_mode == "vanilla"
    else:
        assert keys_refused(merge([modifier])) == ["clipx"]


def test_observe_has_no_scope():
    assert all(keys_refused(merge([OBSERVE], {"clipx.scope": scope})) == ["clipx.scope"] for scope in SCOPES)


# The parts of a run's record that the shortcut's part of verl's configuration decides. It leaves out data, model and
# machines.
DECIDED_BY_LOSS = (
    "line",
    "loss",
    "trainer",
    "batch",
    "schedule",
    "estimator",
    "aggregation",
    "scale_factor",
    "correction",
    "sampling",
    "untested",
    "identity",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "values"),
    [
        (["+clipx=acpo", "+clipx/update=lopti"], ["clipx.scope=lagged", "clipx.alpha=1e1"]),
        (["+clipx=cispo_acpo", "+clipx/select=low_entropy"], ["clipx.clip_high=null", "clipx.select.ratio=1e-06"]),
        (["+clipx/shaping=advantage_reweighting_literal", "+clipx=bapo"], ["clipx.upper_stop=20", "clipx.first=lower"]),
        (["+recipe=acpo/countdown_3b_acpo_off", "+hardware=h100x8"], ["clipx.alpha=2"]),
        *(
            pytest.param(
                [group],
                [f"{key}={value}" for key, value in NEEDED_VALUES.get(group, {}).items()],
                marks=pytest.mark.matrix,
            )
            for group in TRAINABLE
        ),
    ],
)
def test_the_shortcuts_of_these_tests_give_what_hydra_gives(groups, values):
    config_of_hydra = compose_by_hydra(*groups, *values)
    config_of_shortcut = merge(groups, parse(*values))
    assert OmegaConf.to_container(config_of_shortcut.clipx) == OmegaConf.to_container(config_of_hydra.clipx)
    expected = build_by_verl(config_of_hydra).policy_loss
    actual = actor_of(config_of_shortcut).policy_loss
    assert dataclasses.replace(actual, run=expected.run) == expected
    for part in DECIDED_BY_LOSS:
        assert getattr(actual.run.record, part) == getattr(expected.run.record, part), part
    more_values = (*values, "+a.new.key=[1]", "~trainer.device", "++data.shuffle=false")
    assert composition(*more_values, *groups) == by_hydra("ppo_trainer", *MICRO_BATCH, *more_values, *groups)
