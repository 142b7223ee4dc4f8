"""The Hydra groups: the published settings, what a file says beside them, how mistakes in values are reported, and the
listing of methods. Not covered: that each group composes and trains (tests/claims/test_groups.py), what the listing's
rows say, and the pages (tests/losses/methods/test_what_a_method_needs.py).
"""

import re

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from tests.claims.configuration import actor_of, decide, find_refusals, merge, parse
from tests.losses.methods.facts import facts
from verl_clipx.cli import app
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import group_names, group_settings, read_node
from verl_clipx.losses.methods import METHODS
from verl_clipx.losses.modifiers import AdvantageReweighting, EntropySelection, Lopti
from verl_clipx.run.config import parameters_of
from verl_clipx.run.listing import describe_methods

# Without those that choose no method of the plugin's; tests/training/worker/test_observe.py has observe.
GROUPS = sorted({*group_names()} - {"base", "custom", "observe"})
PUBLISHED = facts("PUBLISHED")


def settings_of(*overrides):
    """The clipx node that the actor gets from overrides, the groups first."""
    groups = [override for override in overrides if override.startswith("+")]
    return actor_of(merge(groups, parse(*overrides[len(groups) :]))).policy_loss.clipx


@pytest.mark.parametrize("group", PUBLISHED)
def test_group_reaches_the_actor_with_its_published_settings(group):
    policy_loss = actor_of(merge([f"+clipx={group}"])).policy_loss
    settings = policy_loss.clipx
    values = {**settings.method.parameters, **vars(settings)}
    for key, published in PUBLISHED[group].items():
        assert values[key] == published, key
    assert policy_loss.loss_mode == f"clipx_{settings.method.name}"


@pytest.mark.parametrize("group", GROUPS)
def test_group_states_only_its_method_and_what_deviates_from_the_class_or_its_parent(group):
    text = (configs_folder() / "clipx" / f"{group}.yaml").read_text()
    content = OmegaConf.create(text)
    parent, _ = content.defaults
    parameters = parameters_of(METHODS[group_settings(group)["method"]])
    for name in content.clipx.keys() - {"method"}:
        inherited = read_node(parent).get(name, parameters[name].default)
        assert OmegaConf.is_missing(content.clipx, name) or content.clipx[name] != inherited, name
        assert re.search(rf"\n  # .+\n  {name}:", text), f"{name} needs its reason above it"


MODIFIER_GROUPS = {
    "shaping=advantage_reweighting": AdvantageReweighting(alpha=0.3, probability="old"),
    "shaping=advantage_reweighting_literal": AdvantageReweighting(alpha=0.3, probability="current"),
    "select=high_entropy": EntropySelection(keep="highest", ratio=0.2, over="sequence", normaliser="selected"),
    "select=low_entropy": EntropySelection(keep="lowest", ratio=0.8, over="sequence", normaliser="selected"),
    "update=lopti": Lopti(eta=0.5, equal=True, order="low_first"),
    "update=lopti_reference": Lopti(eta=0.5, equal=False),
}


@pytest.mark.parametrize("group", MODIFIER_GROUPS)
def test_a_modifier_goes_on_top_of_a_method(group):
    assert getattr(settings_of(f"+clipx/{group}", "+clipx=acpo"), group.split("=")[0]) == MODIFIER_GROUPS[group]


@pytest.mark.parametrize(
    ("group", "values", "named"),
    [
        ("acpo", {"alpha": "nan"}, "a number"),
        ("acpo", {"alpha": "[1,2]"}, "a number"),
        ("acpo", {"bins": 2.5}, "a whole number"),
        ("acpo", {"scope": "batch"}, "one of mini_batch, lagged, micro_batch"),
        ("acpo", {"epsilon_min": 1, "epsilon_max": 0.5}, "clipx.epsilon_max=0.5"),
        ("grpo", {"compile": "fast"}, "auto, true or false"),
        ("dgpo", {"clip_low": "null"}, "Set one"),
        ("bapo", {"upper_start": 5}, "clipx.upper_stop=3"),
        ("bapo", {"upper_step": 0.001, "upper_stop": 20}, "10000 candidates"),
        ("topr", {"negative_low": 0.9, "negative_high": 0.8}, "clipx.negative_high=0.8"),
        ("grpo +clipx/update=lopti", {"update.eta": 2}, "a number"),
        ("grpo +clipx/shaping=advantage_reweighting", {"shaping.beta": 2}, "AdvantageReweighting"),
        ("grpo", {"select": "high"}, "+clipx/select=high_entropy"),
        ("observe", {"compile": False}, "not a parameter of observe"),
        ("observe", {"clip_high": 1.3}, "not a parameter of observe"),
        ("observe", {"method": "observe", "function": "a:b"}, "clipx.function=a:b"),
        # No method, or two.
        ("acpo", {"method": "acop"}, "no such method"),
        ("acpo", {"method": 3}, "no such method"),
        ("acpo", {"method": "''"}, "no such method"),
        ("acpo", {"method": "[acpo,bapo]"}, "no such method"),
        ("acpo", {"method": "{name:acpo}"}, "no such method"),
        ("base", {}, "+clipx=acpo"),
        ("acpo", {"method": "null"}, "+clipx=acpo"),
        ("acpo", {"method": "acpo", "function": "a:b"}, "clipx.function=a:b"),
    ],
)
def test_a_bad_value_stops_in_the_driver(group, values, named):
    (refusal,) = find_refusals(*f"+clipx={group}".split(), *(f"clipx.{key}={value}" for key, value in values.items()))
    # The first value is the bad one; without any, it is the method that is missing.
    bad_key = next(iter(values), "method")
    assert refusal.key == f"clipx.{bad_key}"
    assert named in f"{refusal.reason}. {refusal.advice}"
    if values:
        assert refusal.value == parse(f"x={values[bad_key]}")["x"]


@pytest.mark.parametrize("value", ["''", "5", "[a,b]", "{a:b}", "nowhere", "nowhere:loss"])
def test_a_loss_of_the_users_own_that_cannot_be_loaded_stops_in_the_driver(value):
    with pytest.raises(ValueError, match=r"clipx\.function="):
        decide("+clipx=custom", f"clipx.function={value}")


@pytest.mark.parametrize(("name", "method"), [("dapo", "grpo"), ("acpo_reference", "acpo"), ("clipx_acpo", "acpo")])
def test_a_group_is_described_by_its_method(name, method):
    (description,) = describe_methods(name)
    assert description["name"] == method


@pytest.mark.parametrize("name", ["base", "custom", ""])
def test_a_name_without_a_method_is_refused(name):
    with pytest.raises(Refusal) as refusal:
        describe_methods(name)
    assert refusal.value.value == name


def test_observe_is_described_with_its_parameters(monkeypatch):
    monkeypatch.setattr("verl_clipx.cli.console.width", 200)
    shown = CliRunner().invoke(app, ["methods", "observe"])
    assert shown.exit_code == 0, shown.output
    for words in ("observe: verl's own loss, our metrics", "+clipx=observe", "health", "one of warn, stop"):
        assert words in shown.output
