"""The presets on verl's real configuration: verl's own checks accept each, it says what the papers say, by hand, and
its loss and gradient are finite. Not covered: a run; the model, which verl's own dataclass would fetch.

What every preset sets is read without Hydra; that Hydra takes the same is tested on one preset of each kind, and on the
others in the matrix.
"""

from importlib import import_module
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import RolloutConfig

from tests.claims.first_call import train_once
from tests.composition import composition, content_of_group
from tests.papers.tables.compositions import PAPERS, compose_on_machine
from verl_clipx.analysis.runs.sameness import significant_values
from verl_clipx.papers.tables.against_preset import differences
from verl_clipx.papers.tables.origins import groups_of, read_origins
from verl_clipx.papers.tables.presets import compose_preset, preset_names, updates_a_step, values_of
from verl_clipx.papers.tables.recipe_commands import PresetSummary, summarise
from verl_clipx.papers.tasks.catalog import definition_named
from verl_clipx.papers.tasks.knights_and_knaves.prompt import QWEN_CHAT_TEMPLATE_WITH_THINK
from verl_clipx.papers.tasks.templates import PLAIN_TEXT_CHAT_TEMPLATE
from verl_clipx.run.config import completed

HARDWARE = "+hardware=a100x8"
BY_HAND = yaml.safe_load(Path(__file__).with_name("by_hand.yaml").read_text())
ALL_PRESETS = preset_names()
PAPERS_PRESETS = [name for name in ALL_PRESETS if name.split("/")[0] in PAPERS]
SMALL_PRESETS = [name for name in ALL_PRESETS if name not in PAPERS_PRESETS]


def list_kinds(name: str) -> tuple[tuple, tuple]:
    """Return a preset's paper, whether it is the release's, and of the small policies' GRPO the regime; its groups."""
    paper, _, run = name.partition("/")
    regime = ""
    if name in SMALL_PRESETS and run.removeprefix("countdown_").startswith("grpo_"):
        _, _, regime = run.rpartition("_")
    return (paper, name.endswith("_script"), regime), tuple(groups_of(name))


def mark_one_of_each_kind(names, *marks) -> list:
    """Return all presets; those that are the first of neither kind run in the matrix only."""
    firsts = {}
    for name in names:
        for kind in list_kinds(name):
            firsts.setdefault(kind, name)
    matrix = [pytest.mark.slow, pytest.mark.matrix]
    return [pytest.param(name, marks=[*marks] if name in firsts.values() else matrix) for name in names]


def list_leaves(node, prefix=""):
    """Yield path and value of everything in a mapping that is no mapping with entries."""
    for key, value in node.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from list_leaves(value, f"{path}.")
        else:
            yield path, value


@pytest.mark.parametrize("name", mark_one_of_each_kind(ALL_PRESETS, pytest.mark.slow))
def test_verl_accepts_it_and_its_first_optimizer_step_is_finite(name):
    config = compose_on_machine(name)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"clipx_{config.clipx.method}"
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert algorithm.adv_estimator == ("reinforce_plus_plus" if "reinforce" in name else "grpo")
    # Builds the actor's dataclass, and with it the plugin's.
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert not need_critic(config)
    assert need_reference_policy(config) == name.startswith("ar_lopti/")
    if name.startswith("reversal/"):
        assert config.clipx_rollout.versions_old == (3 if name.endswith("_stale") else 0)
    train_once(omega_conf_to_dataclass(config.actor_rollout_ref.actor))


def test_every_key_is_one_that_verl_has():
    verls_config = OmegaConf.to_container(composition(HARDWARE))
    for path in {path for name in PAPERS_PRESETS for path in read_origins(name)}:
        if path.startswith(("clipx.", "actor_rollout_ref.actor.policy_loss.")):
            continue
        node = verls_config
        for part in path.split("."):
            assert part in node, f"{path} is no key of verl's"
            node = node[part]


@pytest.mark.parametrize("name", mark_one_of_each_kind(ALL_PRESETS))
def test_origins_are_those_of_the_values_that_hydra_takes(name):
    preset_alone = OmegaConf.to_container(content_of_group(f"+recipe={name}"))
    hydras_values = dict(list_leaves(preset_alone))
    origins = read_origins(name)
    assert {key: origins[key].value for key in hydras_values} == hydras_values
    # What its group leaves to the class of its method.
    defaults = completed(preset_alone["clipx"])
    for key, origin in origins.items():
        if key not in hydras_values:
            assert origin.file.startswith("verl_clipx/losses/methods/"), key
            assert origin.value == defaults[key.removeprefix("clipx.")], key


@pytest.mark.parametrize(("name", "expected"), BY_HAND["batches"].items())
def test_batches_updates_and_learning_rates_by_hand(name, expected):
    config = values_of(name)
    assert expected == {
        "rollout_batch": config.data.train_batch_size,
        "mini_batch": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        "responses": config.actor_rollout_ref.rollout.n,
        "updates": updates_a_step(config),
        "learning_rate": config.actor_rollout_ref.actor.optim.lr,
    }


@pytest.mark.parametrize(("name", "expected"), BY_HAND["parameters"].items())
def test_the_methods_parameters_by_hand(name, expected):
    clipx = OmegaConf.create(completed(OmegaConf.to_container(values_of(name).clipx, resolve=True)))
    assert {key: OmegaConf.select(clipx, key) for key in expected} == expected


@pytest.mark.parametrize("name", PAPERS_PRESETS)
def test_files_templates_rewards_and_names_are_this_projects(name, monkeypatch):
    monkeypatch.setenv("CLIPX_DATA", "/data")
    config = values_of(name)
    assert config.trainer.experiment_name == name.split("/")[1]
    assert name.removesuffix("_script") in PAPERS_PRESETS
    validation_files = config.data.val_files
    if isinstance(validation_files, str):
        validation_files = [validation_files]
    for file in (config.data.train_files, *validation_files):
        _, folder, dataset, split = file.split("/")
        assert folder == "data"
        assert split.removesuffix(".parquet") in definition_named(dataset).splits
    template = OmegaConf.select(config, "actor_rollout_ref.model.custom_chat_template")
    assert template in (None, PLAIN_TEXT_CHAT_TEMPLATE, QWEN_CHAT_TEMPLATE_WITH_THINK)
    function = config.reward.custom_reward_function
    assert callable(getattr(import_module(function.path.removeprefix("pkg://")), function.name))


def test_a_users_override_wins_over_the_preset():
    config = compose_preset("acpo/orz_7b_acpo_near_script", ["data.train_batch_size=64", HARDWARE])
    assert config.data.train_batch_size == 64


def test_the_machine_does_not_win_over_the_preset():
    config = compose_preset("acpo/orz_7b_acpo_near_script", [HARDWARE])
    # The machine's micro-batches by tokens would change over what the released ACPO takes its statistics.
    assert composition(HARDWARE).actor_rollout_ref.actor.use_dynamic_bsz
    assert not config.actor_rollout_ref.actor.use_dynamic_bsz


def test_an_unknown_preset_is_refused_with_its_neighbours():
    with pytest.raises(ValueError, match="acpo/countdown_3b_acpo_near"):
        compose_preset("acpo/countdown_3b_acpo_neer")


def test_summaries_by_hand(monkeypatch):
    monkeypatch.delenv("MODEL_PATH", raising=False)
    assert summarise("ar_lopti/kk_7b_grpo_ar_lopti") == PresetSummary(
        name="ar_lopti/kk_7b_grpo_ar_lopti",
        method="grpo shaping=advantage_reweighting update=lopti",
        model="Qwen2.5-7B-Instruct-1M",
        data="knights_and_knaves",
        updates="4",
        title="AR-Lopti Figure 4: Knights and Knaves, Qwen2.5-7B-Instruct-1M, GRPO + Reweight + Lopti",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_one_of_each_kind(SMALL_PRESETS))
def test_only_the_method_differs_from_grpo(name):
    grpo = find_grpo(name)
    lines = differences(significant_values(compose_on_machine(grpo)), significant_values(compose_on_machine(name)))
    keys = {line.split(":")[0] for line in lines}
    assert all(key.startswith(("clipx.", "actor_rollout_ref.actor.policy_loss.")) for key in keys), keys
    assert bool(keys) == (name != grpo)


def find_grpo(name: str) -> str:
    """Return the preset of GRPO on the task and in the regime of a small policy's preset."""
    paper, run = name.split("/")
    task = run.partition("_")[0]
    regime = run.rpartition("_")[2]
    if paper == "reversal":
        return f"reversal/grpo_{regime}"
    if task == "countdown":
        return f"cpu/countdown_grpo_{regime}"
    return f"cpu/{task}_grpo"
