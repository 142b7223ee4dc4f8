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
def run():
    """As a recipe launches it on other hardware, with a seed, names and paths of its own."""
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


def test_a_run_of_the_preset_elsewhere_has_its_hash_also_when_it_was_written_and_read(preset, run, tmp_path):
    before, values = OmegaConf.to_yaml(run), significant_values(run)
    assert differences(preset, values) == [] and hash_of_json(values, str) == hash_of_json(preset, str)
    assert OmegaConf.to_yaml(run) == before
    OmegaConf.save(run, tmp_path / "config.yaml")
    assert differences(preset, significant_values(OmegaConf.load(tmp_path / "config.yaml"))) == []


LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"actor_rollout_ref.actor.optim.lr": 1e-4, "clipx.clip_high": 1.3},
            ["actor_rollout_ref.actor.optim.lr: preset 0.0003, run 0.0001", "clipx.clip_high: preset 1.2, run 1.3"],
        ),
        # What is read off another key follows it.
        (
            {"data.max_response_length": 32},
            [
                "actor_rollout_ref.rollout.response_length: preset 16, run 32",
                "data.max_response_length: preset 16, run 32",
            ],
        ),
        ({"clipx.update": {"eta": 0.5}}, ["clipx.update.eta: preset 'nothing', run 0.5"]),
        # Samples with seeds of their own are stock samples; those of tools are another run's.
        ({LOOP: "single_turn_agent"}, []),
        ({LOOP: "tool_agent"}, [f"{LOOP}: preset 'single_turn_agent', run 'tool_agent'"]),
    ],
)
def test_what_changes_the_run_is_named_with_both_values(preset, run, changes, named):
    config = run.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    assert set(named) <= set(differences(preset, significant_values(config)))
    assert named or differences(preset, significant_values(config)) == []


LEFT_OUT = (
    *("trainer.nnodes", "data.val_files", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
    *("actor_rollout_ref.actor.fsdp_config.seed", "actor_rollout_ref.rollout.name", "ray_kwargs.ray_init.num_cpus"),
    *("clipx.metrics", "actor_rollout_ref.actor.policy_loss.clipx.metrics", "clipx.trace", "clipx.trace.every"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size", "trainer.max_critic_ckpt_to_keep", "trainer.resume_from_path"),
    *("actor_rollout_ref.rollout.max_num_seqs", "actor_rollout_ref.actor.policy_loss.run.unused.x"),
    "actor_rollout_ref.actor._target_",
)
COUNTED = (
    *("data.train_batch_size", "data.max_response_length", "actor_rollout_ref.actor.ppo_mini_batch_size"),
    *("actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.temperature"),
    *("reward.custom_reward_function.path", "clipx.method", "clipx.scope"),
    *("trainer.total_training_steps", "trainer.test_freq"),
)


@pytest.mark.parametrize("key", LEFT_OUT + COUNTED)
def test_which_keys_count(key):
    assert is_left_out(key) == (key in LEFT_OUT)


def test_hardware_groups_set_nothing_that_the_losses_or_the_batches_are_made_of():
    assert "actor_rollout_ref.actor.strategy" in hardware_keys()
    of_losses = ("clipx.", "algorithm.", "actor_rollout_ref.actor.optim", "defaults")
    assert not [key for key in hardware_keys() if key.startswith(of_losses)]


def test_spellings_are_no_difference_and_what_the_preset_leaves_open_is_the_runs(monkeypatch):
    one, other = OmegaConf.create({"a": 1, "b": 1e-6}), OmegaConf.create({"a": 1.0, "b": 0.000001})
    assert hash_of_json(significant_values(one), str) == hash_of_json(significant_values(other), str)
    # What cannot be resolved here stays as written.
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    written = {"a": "${oc.env:NOT_SET_ANYWHERE}", "b": "${nobody_registered:1}", "c": ["${a}"]}
    assert significant_values(OmegaConf.create(written)) == {**written, "c": "['${a}']"}
    # A default that a log spells out.
    short = OmegaConf.create({"clipx": {"method": "acpo", "alpha": 2.0}})
    long = OmegaConf.create({"clipx": {"method": "acpo", "alpha": 2.0, "bins": 5, "scope": "mini_batch"}})
    assert differences(significant_values(short), significant_values(long)) == []
    long.clipx.bins = 6
    assert differences(significant_values(short), significant_values(long)) == ["clipx.bins: preset 5, run 6"]
    preset, run = {"clipx.clip_high": "???", "lr": 1, "open": "???"}, {"clipx.clip_high": 1.9, "lr": 2}
    given = filled_in(preset, run)
    assert given == {"clipx.clip_high": 1.9}
    assert differences({**preset, **given}, run) == ["lr: preset 1, run 2", "open: preset '???', run 'nothing'"]
