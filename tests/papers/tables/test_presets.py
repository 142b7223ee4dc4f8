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

from tests.claims.first_call import first_call
from tests.composition import composition, group_s_own
from tests.papers.tables.compositions import PAPERS, on_a_machine
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
EVERY = preset_names()
NAMES = [name for name in EVERY if name.split("/")[0] in PAPERS]
SMALL = [name for name in EVERY if name not in NAMES]


def kinds_of(name: str) -> tuple[tuple, tuple]:
    """A preset's paper, whether it is the release's, and of the small policies' GRPO the regime; and its groups."""
    regime = name.rpartition("_")[2] if name in SMALL and "/grpo_" in name.replace("countdown_", "") else ""
    return (name.split("/")[0], name.endswith("_script"), regime), tuple(groups_of(name))


def one_of_each_kind(names, *marks) -> list:
    """All presets; those that are the first of neither kind run in the matrix only."""
    firsts = {kind: name for name in reversed(names) for kind in kinds_of(name)}
    matrix = [pytest.mark.slow, pytest.mark.matrix]
    return [pytest.param(name, marks=[*marks] if name in firsts.values() else matrix) for name in names]


def leaves(node, prefix=""):
    for key, value in node.items():
        path = f"{prefix}{key}"
        yield from leaves(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]


@pytest.mark.parametrize("name", one_of_each_kind(EVERY, pytest.mark.slow))
def test_verl_accepts_it_and_its_first_optimizer_step_is_finite(name):
    config = on_a_machine(name)
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"clipx_{config.clipx.method}"
    assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert algorithm.adv_estimator == ("reinforce_plus_plus" if "reinforce" in name else "grpo")
    # Builds the actor's dataclass, and with it the plugin's.
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    assert not need_critic(config) and need_reference_policy(config) == name.startswith("ar_lopti/")
    if name.startswith("reversal/"):
        assert config.clipx_rollout.versions_old == (3 if name.endswith("_stale") else 0)
    first_call(omega_conf_to_dataclass(config.actor_rollout_ref.actor))


def test_every_key_is_one_that_verl_has():
    own = OmegaConf.to_container(composition(HARDWARE))
    for path in {path for name in NAMES for path in read_origins(name)}:
        if path.startswith(("clipx.", "actor_rollout_ref.actor.policy_loss.")):
            continue
        node = own
        for part in path.split("."):
            assert part in node, f"{path} is no key of verl's"
            node = node[part]


@pytest.mark.parametrize("name", one_of_each_kind(EVERY))
def test_origins_are_those_of_the_values_that_hydra_takes(name):
    alone = OmegaConf.to_container(group_s_own(f"+recipe={name}"))
    found, of_hydra = read_origins(name), dict(leaves(alone))
    assert {key: found[key].value for key in of_hydra} == of_hydra
    # What its group leaves to the class of its method.
    defaults = completed(alone["clipx"])
    rest = {key: origin for key, origin in found.items() if key not in of_hydra}
    assert all(origin.file.startswith("verl_clipx/losses/methods/") for origin in rest.values())
    assert {key: origin.value for key, origin in rest.items()} == {key: defaults[key[6:]] for key in rest}


@pytest.mark.parametrize(("name", "expected"), BY_HAND["batches"].items())
def test_batches_updates_and_learning_rates_by_hand(name, expected):
    config = values_of(name)
    actor = config.actor_rollout_ref.actor
    batches = [config.data.train_batch_size, actor.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n]
    assert [*batches, updates_a_step(config), actor.optim.lr] == expected


@pytest.mark.parametrize(("name", "expected"), BY_HAND["parameters"].items())
def test_the_methods_parameters_by_hand(name, expected):
    clipx = OmegaConf.create(completed(OmegaConf.to_container(values_of(name).clipx, resolve=True)))
    assert {key: OmegaConf.select(clipx, key) for key in expected} == expected


def test_files_templates_rewards_and_names_are_this_projects(monkeypatch):
    monkeypatch.setenv("CLIPX_DATA", "/data")
    for name in NAMES:
        config = values_of(name)
        assert config.trainer.experiment_name == name.split("/")[1] and name.removesuffix("_script") in NAMES
        validation = config.data.val_files
        for file in [config.data.train_files, *([validation] if isinstance(validation, str) else validation)]:
            _, folder, dataset, split = file.split("/")
            assert folder == "data" and split.removesuffix(".parquet") in definition_named(dataset).splits
        template = OmegaConf.select(config, "actor_rollout_ref.model.custom_chat_template")
        assert template in (None, PLAIN_TEXT_CHAT_TEMPLATE, QWEN_CHAT_TEMPLATE_WITH_THINK)
        function = config.reward.custom_reward_function
        assert callable(getattr(import_module(function.path.removeprefix("pkg://")), function.name))


def test_overrides_win_the_machine_does_not_and_an_unknown_preset_names_its_neighbours():
    config = compose_preset("acpo/orz_7b_acpo_near_script", ["data.train_batch_size=64", HARDWARE])
    assert config.data.train_batch_size == 64
    # The machine's micro-batches by tokens would change over what the released ACPO takes its statistics.
    assert composition(HARDWARE).actor_rollout_ref.actor.use_dynamic_bsz
    assert not config.actor_rollout_ref.actor.use_dynamic_bsz
    with pytest.raises(ValueError, match="acpo/countdown_3b_acpo_near"):
        compose_preset("acpo/countdown_3b_acpo_neer")


def test_summaries_by_hand(monkeypatch):
    monkeypatch.delenv("MODEL_PATH", raising=False)
    name, row = "ar_lopti/kk_7b_grpo_ar_lopti", "Knights and Knaves, Qwen2.5-7B-Instruct-1M, GRPO + Reweight + Lopti"
    method = "grpo shaping=advantage_reweighting update=lopti"
    model, data = "Qwen2.5-7B-Instruct-1M", "knights_and_knaves"
    title = f"AR-Lopti Figure 4: {row}"
    assert summarise(name) == PresetSummary(name, method, model, data, updates="4", title=title)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_of_each_kind(SMALL))
def test_only_the_method_differs_from_grpo(name):
    paper, run = name.split("/")
    task, regime = run.partition("_")[0], run.rpartition("_")[2]
    if paper == "reversal":
        grpo = f"reversal/grpo_{regime}"
    else:
        grpo = f"cpu/{task}_grpo" + f"_{regime}" * (task == "countdown")
    lines = differences(*(significant_values(on_a_machine(one)) for one in (grpo, name)))
    keys = {line.split(":")[0] for line in lines}
    assert all(key.startswith(("clipx.", "actor_rollout_ref.actor.policy_loss.")) for key in keys), keys
    assert bool(keys) == (name != grpo)
