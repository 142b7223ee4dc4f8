"""Every parameter of every method and modifier at null, at both ends of its range and with each of its words trains, or
is refused in the driver, as values beyond the ends are; fields are found by their metadata. Not covered: values in
between, pairs of parameters at different ends, what the numbers are.
"""

import dataclasses
import math

import pytest
import torch

from tests.losses.methods.facts import fact, facts
from verl_clipx.losses.base.parameters import FLOAT32_LARGEST, next_float32, number, optional
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.contract.contract import finite_for_every_finite_input
from verl_clipx.losses.groups import group_names, group_settings
from verl_clipx.losses.methods import BUILT_IN, METHODS
from verl_clipx.losses.modifiers import MODIFIERS, AdvantageReweighting, EntropySelection, FutureInfluence, Lopti
from verl_clipx.run.config import AROUND, build, parameters_of
from verl_clipx.run.description import remark_on_unusual

from .configuration import actor_of, merge, refusals_in
from .first_call import train_once

# The group of each kind of modifier: its rule, where a node has several.
MODIFIER_GROUPS = {
    kind: f"+clipx/{node}={({'select': 'high_entropy', 'update': 'lopti', 'pull': 'k2'}).get(node) or kind.rule}"
    for node, kinds in MODIFIERS.items()
    for kind in kinds
    # Its parameters depend on each other and on the method (tests/losses/modifiers/test_hold.py).
    if node != "hold"
}

# Ends that contradict another parameter's value in the group: refused alone, with these they train.
VALUES_BESIDE_AN_END = {
    (method, *end): values for method in BUILT_IN for end, values in fact(method, "VALUES_BESIDE_AN_END", {}).items()
}
# Refused whatever the others are.
NEVER_VALID = {(method, *end) for method in BUILT_IN for end in fact(method, "NEVER_VALID", ())}
# The key that is named instead of a parameter of the same pair.
KEYS_REFUSED_INSTEAD = facts("REFUSED_INSTEAD")


def ends_of(fields):
    """The name of each number with its ends, and with null where it may be that."""
    ends = []
    for field in fields:
        allowed = field.metadata["allowed"]
        if allowed.ends:
            ends += [(field.name, end) for end in allowed.ends]
            if allowed.null:
                ends.append((field.name, None))
    return ends


def words_of(fields):
    return [(field.name, word) for field in fields for word in field.metadata["allowed"].choices]


FIELDS = {method: parameters_of(METHODS[method]).values() for method in BUILT_IN}
NUMBERS = {
    method: {field.name: field.metadata["allowed"] for field in fields if field.metadata["allowed"].ends}
    for method, fields in FIELDS.items()
}
CASES = [(method, *end) for method in BUILT_IN for end in ends_of(FIELDS[method])]
# Methods share parameters: the first that has one stands for all whose range is the same.
SAME_RANGE = {(name, allowed): method for method in reversed(BUILT_IN) for name, allowed in NUMBERS[method].items()}
# Those of every method with one of them; test_groups.py has every method under every scope.
WORDS = [
    (method, name, word)
    for method in BUILT_IN
    for name, word in words_of(FIELDS[method])
    if method == "acpo" or name not in AROUND
]
MODIFIER_CASES = [
    (kind, *case)
    for kind in MODIFIER_GROUPS
    for fields in [dataclasses.fields(kind)]
    for case in (*ends_of(fields), *words_of(fields))
    # A mask without its threshold is refused (tests/losses/modifiers/test_masks.py).
    if case != ("delta", None)
]


def build_actor(method, values, *modifiers):
    """verl's ActorConfig with a method, values of the clipx node and groups of modifiers."""
    return actor_of(merge([f"+clipx={method}", *modifiers], {f"clipx.{key}": value for key, value in values.items()}))


def assert_trains(actor_config):
    train_once(actor_config)
    settings = actor_config.policy_loss.clipx
    if not (settings.shaping or settings.mask or settings.select or settings.update):
        finite_for_every_finite_input(settings.method)


# 1,801 bounds to search take 6 s; the lower step's 301 are searched in every run.
LONG_SEARCH = ("bapo", "upper_step", 0.001)


def marks_of(method, name, value):
    """Every method has all its parameters at an end together, below."""
    stands_for_others = method == SAME_RANGE[name, NUMBERS[method][name]]
    if stands_for_others and (method, name, value) != LONG_SEARCH:
        return [pytest.mark.slow]
    return [pytest.mark.slow, pytest.mark.matrix]


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [*(pytest.param(*case, marks=marks_of(*case)) for case in CASES if case not in NEVER_VALID), *WORDS],
)
def test_a_parameter_at_an_end_or_with_a_word_trains(method, name, value):
    assert_trains(build_actor(method, {name: value, **VALUES_BESIDE_AN_END.get((method, name, value), {})}))


@pytest.mark.parametrize(("method", "name", "value"), sorted([*VALUES_BESIDE_AN_END, *NEVER_VALID], key=str))
def test_an_end_that_contradicts_another_parameter_is_refused_in_the_driver(method, name, value):
    assert (method, name, value) in CASES
    with pytest.raises(Exception) as raised:
        build_actor(method, {name: value})
    keys = [refusal.key.removeprefix("clipx.") for refusal in refusals_in(raised.value)]
    assert keys in ([name], KEYS_REFUSED_INSTEAD.get(name))


@pytest.mark.parametrize(("kind", "name", "value"), MODIFIER_CASES)
# cispo: the only token that is selected at the smallest share has a gradient, wherever its ratio is.
@pytest.mark.parametrize("method", ["cispo", pytest.param("acpo", marks=pytest.mark.matrix)])
def test_a_modifiers_parameter_at_an_end_or_with_a_word_trains(method, kind, name, value):
    key = f"{kind.node_key}.{name}".removeprefix("clipx.")
    values = {key: value}
    if kind is EntropySelection:
        for over in ("sequence", "mini_batch"):
            assert_trains(build_actor(method, {"select.over": over, **values}, MODIFIER_GROUPS[kind]))
    else:
        assert_trains(build_actor(method, values, MODIFIER_GROUPS[kind]))


# Written out, because ends that are read from the class move with it.
REFUSED = {
    AdvantageReweighting: dict(alpha=(-0.1, 1.1, math.nan), probability=("new",)),
    FutureInfluence: dict(half_life=(0.5,), low=(1.5,), high=(0.9,), safe_ratio=(0,)),
    EntropySelection: dict(keep=("top",), over=("batch",), ratio=(0.0, 1.5, -0.2, math.nan)),
    Lopti: dict(eta=(0.0, -0.5, 1.5, math.nan), order=("low",)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_modifier_refuses_a_wrong_value_with_its_key(kind):
    for name, values in REFUSED[kind].items():
        for value in values:
            with pytest.raises(Refusal) as raised:
                kind(**{name: value})
            assert raised.value.key == f"{kind.node_key}.{name}" and raised.value.value is value


@pytest.mark.parametrize(("method", "name"), [(method, name) for (name, _), method in SAME_RANGE.items()])
def test_a_value_beyond_an_end_is_refused_in_the_driver(method, name):
    ends = NUMBERS[method][name].ends
    for value in (ends[0] - 1e-6, ends[1] * (1 + 1e-6), -math.inf, math.inf, math.nan, 10**400, "1e3x", True, [1]):
        with pytest.raises(Refusal) as raised:
            build(method, **{name: value})
        assert raised.value.key == f"clipx.{name}" and raised.value.value is value
    with pytest.raises(Exception) as raised:
        build_actor(method, {name: 2 * ends[1] + 1})
    assert [refusal.key for refusal in refusals_in(raised.value)] == [f"clipx.{name}"]


@pytest.mark.parametrize(
    ("method", "values", "advice"),
    [
        # A width or a percentage in the place of a bound, a bound in the place of a width.
        ("grpo", dict(clip_high=28), ""),
        ("grpo", dict(clip_high=0.28), "Bounds are ratios: write 1.28 for 28 % above 1."),
        ("gspo", dict(clip_high=4e-4), "Bounds are ratios: write 1.0004 for 0.04 % above 1."),
        ("acpo", dict(epsilon_base=1.2), ""),
        ("acpo", dict(alpha=30), ""),
        ("dcpo", dict(epsilon_high=1.28), ""),
        ("dppo", dict(threshold_low=1.5), ""),
        ("m2po", dict(threshold=4), ""),
        ("aspo", dict(weight_high=0.33), ""),
        ("topr", dict(positive_high=0), ""),
        # What makes a method another one: no search, no decay, no gradient but at ratio 1.
        ("bapo", dict(target=0), ""),
        ("bapo", dict(target=40), "Change it, or set clipx.contribution=ratio or net."),
        ("bapo", dict(target=40, contribution="net"), ""),
        ("bapo", dict(upper_step=5), ""),
        (
            "bapo",
            dict(upper_step=0.5, upper_stop=1.5),
            "Set a smaller step or, if the bound is not to move, clipx.upper_stop=1.2.",
        ),
        ("bapo", dict(lower_step=0.4), "Set a smaller step or, if the bound is not to move, clipx.lower_stop=0.6."),
        ("dgpo", dict(n=1000), ""),
        ("dro", dict(beta=1000), ""),
        ("sapo", dict(tau_positive=1000), ""),
        ("grpo", dict(log_ratio_clamp=0.2), ""),
    ],
)
def test_what_cannot_be_meant_is_refused(method, values, advice):
    with pytest.raises(Refusal) as raised:
        build(method, **values)
    name, value = next(iter(values.items()))
    assert (raised.value.key, raised.value.value, raised.value.advice) == (f"clipx.{name}", value, advice)


def test_the_settings_of_every_group_are_usual():
    for group in group_names():
        settings = group_settings(group)
        for field in dataclasses.fields(METHODS[settings["method"]]) if settings.get("method") in METHODS else ():
            assert not remark_on_unusual(field, settings.get(field.name, field.default)), (group, field.name)


@pytest.mark.parametrize("method", BUILT_IN)
@pytest.mark.parametrize("end", [*(pytest.param(end, marks=pytest.mark.slow) for end in (0, 1)), None])
def test_all_parameters_at_one_end_or_at_null_together_train(method, end):
    if end is None:
        nulls = [name for name, allowed in NUMBERS[method].items() if allowed.null]
        assert_trains(build_actor(method, {name: None for name in nulls if (method, name, None) not in NEVER_VALID}))
    else:
        values = {name: allowed.ends[end] for name, allowed in NUMBERS[method].items()}
        assert_trains(build_actor(method, values | fact(method, "ALL_AT_AN_END", {}).get(end, {})))


def test_a_loss_without_its_bounds_trains():
    unbounded = {"clip_low": None, "clip_high": None}
    # 0 * inf must not get anywhere.
    assert_trains(build_actor("ce_gppo", {**unbounded, "beta_low": 0, "beta_high": 0}))
    assert_trains(build_actor("custom", {**unbounded, "function": "tests.example_losses:soft"}))


def test_every_number_has_ends_and_those_that_are_not_its_own_a_reason():
    kinds = [(method.__module__, parameters_of(method).values()) for method in METHODS.values()]
    kinds += [(kind.__module__, dataclasses.fields(kind)) for kind in MODIFIER_GROUPS]
    reasons = {}
    for module, fields in kinds:
        for field in fields:
            allowed, is_number = field.metadata["allowed"], "float" in str(field.type) or "int" in str(field.type)
            assert (allowed.ends is not None) == is_number, field.name
            if is_number:
                low, high = torch.tensor(allowed.ends, dtype=torch.float32)
                assert low.isfinite() and high.isfinite() and low < high, field.name
                # Where a range has no ends of its own, the user reads why.
                assert allowed.reason in allowed.description
                reasons[module, field.name] = allowed.reason
                assert bool(allowed.reason) == (FLOAT32_LARGEST in allowed.ends), field.name
    assert not [name for (module, name), reason in reasons.items() if reason and module.startswith("verl_clipx.")]


def test_a_range_without_an_end_needs_a_reason_and_an_open_end_is_the_nearest_float32():
    for ends in ({}, {"at_least": 0}, {"at_most": 1}, {"above": 0, "at_least": 0, "at_most": 1}):
        with pytest.raises(TypeError, match="or a reason why one is missing"):
            number(**ends)
    allowed = optional(number(at_least=0, reason="nobody knows"))
    assert allowed.ends == (0, FLOAT32_LARGEST) and allowed.null
    assert allowed.description == "a number (at least 0; nobody knows), or null"
    assert next_float32(1.0) == 1 + 2**-23 and next_float32(0.0) == 2.0**-149
    allowed = number(above=1, at_most=2)
    assert allowed.ends == (1 + 2**-23, 2) and allowed.description == "a number (above 1 and at most 2)"
    assert allowed.convert(1 + 2**-23) == 1 + 2**-23
    with pytest.raises(ValueError):
        allowed.convert(1)
