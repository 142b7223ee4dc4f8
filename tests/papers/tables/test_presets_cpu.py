"""The presets of the small policies on verl's real configuration: verl's own checks accept them, the numbers of updates
are as the table's headings say, and methods differ in the method alone. Not covered: that they learn.
"""

import functools

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import validate_config

from tests.claims.first_call import first_call_of
from verl_clipx.papers.tables.against_preset import differences
from verl_clipx.papers.tables.definition import load_table
from verl_clipx.papers.tables.origins import read_origins
from verl_clipx.papers.tables.presets import preset_names, updates_per_rollout
from verl_clipx.run.config import completed
from verl_clipx.runs.sameness import significant_values

NAMES = [name for name in preset_names() if name.startswith("cpu/")]
# The others run in the matrix only.
FIRST = (
    "cpu/countdown_grpo_near",
    "cpu/countdown_acpo_near",
    "cpu/countdown_lopti_off",
    "cpu/kk_grpo",
    "cpu/kk_ar_lopti",
)
SOME = [pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix) for name in NAMES]
METHODS = ("grpo", "dapo", "cispo", "gppo", "ce_gppo", "aspo", "dgpo", "acpo", "bapo", "ar", "lopti")


@functools.cache
def verl_s_own():
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    return config


@functools.cache
def alone(name: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(None, [f"+recipe={name}"])
    OmegaConf.set_struct(config, False)
    return config


@functools.cache
def composed(name: str):
    # A preset is merged last, so merging its own parts onto verl's configuration gives what Hydra gives for both.
    return OmegaConf.merge(verl_s_own(), alone(name))


def test_the_table_names_every_preset():
    named = {source.preset for source, _ in load_table("cpu_small").sources() if source.preset}
    countdown = {f"cpu/countdown_{method}_{regime}" for method in METHODS for regime in ("near", "off")}
    puzzles = {f"cpu/kk_{method}" for method in ("grpo", "ar", "lopti", "ar_lopti")}
    assert set(NAMES) == named == countdown | puzzles


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_verl_accepts_it_with_the_updates_of_its_column(name):
    config = composed(name)
    validate_config(config, use_reference_policy=False, use_critic=False)
    passes = 2 if "lopti" in name else 1
    assert updates_per_rollout(config) == passes * (16 if name.endswith("_off") else 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_its_first_optimizer_step_is_finite(name):
    first_call_of(composed(name).actor_rollout_ref.actor)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
def test_only_the_method_differs_from_grpo(name):
    task = name.split("_")[0]
    grpo = f"{task}_grpo" + name[-len("_near") :] * name.endswith("_near") + "_off" * name.endswith("_off")
    lines = differences(significant_values(composed(grpo)), significant_values(composed(name)))
    keys = {line.split(":")[0] for line in lines}
    assert all(key.startswith(("clipx.", "actor_rollout_ref.actor.policy_loss.loss_mode")) for key in keys), keys
    assert bool(keys) == (name != grpo)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_an_origin(name):
    origins = read_origins(name).values()
    assert origins
    assert not [one.key for one in origins if one.kind is None or not one.comment]


@pytest.mark.parametrize("name", NAMES)
def test_origins_are_those_of_the_values_that_hydra_takes(name):
    for origin in read_origins(name).values():
        node, _, key = origin.key.rpartition(".")
        plain = OmegaConf.to_container(OmegaConf.select(alone(name), node))
        # What its group leaves to the class of its method stands in the method's file.
        plain = completed(plain) if origin.file.endswith(".py") else plain
        assert plain[key] == origin.value
