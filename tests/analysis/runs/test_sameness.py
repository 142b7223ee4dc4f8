"""Which configurations count as the same run, on verl's real configuration composed by Hydra: paths, logs, seeds and
the machine do not matter, everything else does and is named with both values.
"""

import pytest
from omegaconf import OmegaConf

from verl_clipx.analysis.runs.sameness import hardware_keys, is_left_out, significant_values
from verl_clipx.common.files import hash_of_json
from verl_clipx.papers.tables.against_preset import differences, filled_in
from verl_clipx.papers.tables.presets import compose_preset

PRESET = "cpu/countdown_grpo_near"


@pytest.fixture(scope="module")
def preset():
    return significant_values(compose_preset(PRESET))


@pytest.fixture(scope="module")
def run_elsewhere():
    """The preset as a recipe launches it on other hardware, with a seed, names and paths of its own."""
    return compose_preset(
        PRESET,
        [
            "+hardware=cpu",
            "trainer.nnodes=4",
            "data.seed=3",
            "actor_rollout_ref.rollout.seed=3",
            "actor_rollout_ref.actor.data_loader_seed=3",
            "data.train_files=/elsewhere/train.parquet",
            "actor_rollout_ref.model.path=/elsewhere/model",
            "trainer.experiment_name=mine",
            "trainer.logger=[file]",
            "trainer.default_local_dir=/elsewhere/checkpoints",
            "trainer.resume_mode=auto",
            "+ray_kwargs.ray_init.runtime_env.env_vars.CLIPX_DATA=/elsewhere",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        ],
    )


def test_a_run_of_the_preset_elsewhere_has_its_hash(preset, run_elsewhere):
    before = OmegaConf.to_yaml(run_elsewhere)
    values = significant_values(run_elsewhere)
    assert differences(preset, values) == []
    assert hash_of_json(values, str) == hash_of_json(preset, str)
    assert OmegaConf.to_yaml(run_elsewhere) == before


def test_a_run_of_the_preset_elsewhere_is_the_same_when_it_was_written_and_read(preset, run_elsewhere, tmp_path):
    OmegaConf.save(run_elsewhere, tmp_path / "config.yaml")
    assert differences(preset, significant_values(OmegaConf.load(tmp_path / "config.yaml"))) == []


AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


@pytest.mark.parametrize(
    ("changes", "among_differences"),
    [
        pytest.param(
            {"actor_rollout_ref.actor.optim.lr": 1e-4, "clipx.clip_high": 1.3},
            ["actor_rollout_ref.actor.optim.lr: preset 0.0003, run 0.0001", "clipx.clip_high: preset 1.2, run 1.3"],
            id="learning rate and bound",
        ),
        pytest.param(
            {"data.max_response_length": 32},
            [
                "actor_rollout_ref.rollout.response_length: preset 16, run 32",
                "data.max_response_length: preset 16, run 32",
            ],
            id="a key that another one follows",
        ),
        pytest.param({"clipx.update": {"eta": 0.5}}, ["clipx.update.eta: preset 'nothing', run 0.5"], id="a new node"),
        pytest.param(
            {AGENT_LOOP: "tool_agent"},
            [f"{AGENT_LOOP}: preset 'single_turn_agent', run 'tool_agent'"],
            id="samples with tools",
        ),
    ],
)
def test_what_changes_the_run_is_named_with_both_values(preset, run_elsewhere, changes, among_differences):
    config = run_elsewhere.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    assert set(among_differences) <= set(differences(preset, significant_values(config)))


def test_samples_with_seeds_of_their_own_are_stock_samples(preset, run_elsewhere):
    config = run_elsewhere.copy()
    OmegaConf.update(config, AGENT_LOOP, "single_turn_agent", force_add=True)
    assert differences(preset, significant_values(config)) == []


@pytest.mark.parametrize(
    "key",
    [
        "trainer.nnodes",
        "data.val_files",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.fsdp_config.seed",
        "actor_rollout_ref.rollout.name",
        "ray_kwargs.ray_init.num_cpus",
        "clipx.metrics",
        "actor_rollout_ref.actor.policy_loss.clipx.metrics",
        "clipx.trace",
        "clipx.trace.every",
        "actor_rollout_ref.actor.ppo_micro_batch_size",
        "trainer.max_critic_ckpt_to_keep",
        "trainer.resume_from_path",
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.actor.policy_loss.run.unused.x",
        "actor_rollout_ref.actor._target_",
    ],
)
def test_keys_of_machine_files_and_logs_are_left_out(key):
    assert is_left_out(key)


@pytest.mark.parametrize(
    "key",
    [
        "data.train_batch_size",
        "data.max_response_length",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.temperature",
        "reward.custom_reward_function.path",
        "clipx.method",
        "clipx.scope",
        "trainer.total_training_steps",
        "trainer.test_freq",
    ],
)
def test_keys_of_the_training_count(key):
    assert not is_left_out(key)


def test_hardware_groups_set_nothing_that_the_losses_or_the_batches_are_made_of():
    assert "actor_rollout_ref.actor.strategy" in hardware_keys()
    of_losses = ("clipx.", "algorithm.", "actor_rollout_ref.actor.optim", "defaults")
    assert not [key for key in hardware_keys() if key.startswith(of_losses)]


def test_two_spellings_of_a_number_are_no_difference():
    first = significant_values(OmegaConf.create({"a": 1, "b": 1e-6}))
    second = significant_values(OmegaConf.create({"a": 1.0, "b": 0.000001}))
    assert hash_of_json(first, str) == hash_of_json(second, str)


def test_what_cannot_be_resolved_here_stays_as_written(monkeypatch):
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    config = {"a": "${oc.env:NOT_SET_ANYWHERE}", "b": "${nobody_registered:1}", "c": ["${a}"]}
    assert significant_values(OmegaConf.create(config)) == config | {"c": "['${a}']"}


def test_a_default_that_a_log_spells_out_is_no_difference_and_another_value_is():
    short = OmegaConf.create({"clipx": {"method": "acpo", "alpha": 2.0}})
    long = OmegaConf.create({"clipx": {"method": "acpo", "alpha": 2.0, "bins": 5, "scope": "mini_batch"}})
    assert differences(significant_values(short), significant_values(long)) == []
    long.clipx.bins = 6
    assert differences(significant_values(short), significant_values(long)) == ["clipx.bins: preset 5, run 6"]


def test_a_bound_that_the_preset_leaves_open_is_the_run_s():
    preset = {"clipx.clip_high": "???", "lr": 1, "open": "???"}
    run = {"clipx.clip_high": 1.9, "lr": 2}
    filled = filled_in(preset, run)
    assert filled == {"clipx.clip_high": 1.9}
    assert differences(preset | filled, run) == ["lr: preset 1, run 2", "open: preset '???', run 'nothing'"]
