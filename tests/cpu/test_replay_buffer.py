"""The frequently polled replay buffers lose nothing that verl gives its own. Not covered: sampling itself."""

import functools
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_clipx.cpu.replay_buffer import frequent_polling

CUSTOM = {"path": "pkg://verl_clipx.cpu.replay_buffer", "name": "frequent_polling"}


def built(mode: str, *, custom: bool, filters: bool = False, refill_failed: bool = False, gen_batch_size=None):
    """The buffer that verl's trainer builds from the configuration, with and without configs/hardware/cpu.yaml."""
    config = OmegaConf.create(
        {
            "trainer": {
                "v1": {
                    mode: {"num_warmup_batches": 1},
                    "sampler": {
                        "max_off_policy_threshold": 3,
                        "max_off_policy_strategy": "drop",
                        "sync_refill_failed_groups": refill_failed,
                        "custom_sampler": CUSTOM if custom else None,
                        "sampler_kwargs": {
                            "poll_interval": 0.2,
                            "filter_groups": "${algorithm.filter_groups}",
                            "train_batch_size": "${data.train_batch_size}",
                            "gen_batch_size": "${data.gen_batch_size}",
                            "sync_refill_failed_groups": "${trainer.v1.sampler.sync_refill_failed_groups}",
                        },
                    },
                }
            },
            "algorithm": {
                "filter_groups": {
                    "enable": filters,
                    "metric": "acc",
                    "max_inflight_gen_batches": 5,
                    "max_num_gen_batches": 0,
                }
            },
            "data": {"train_batch_size": 16, "gen_batch_size": gen_batch_size},
            "reward": {"reward_model": {"enable": False, "enable_resource_pool": False}},
        }
    )
    trainer = SimpleNamespace(config=config, trainer_mode=mode, _add_prompts_to_generate=print)
    trainer._resolve_filter_groups_metric = functools.partial(PPOTrainer._resolve_filter_groups_metric, trainer)
    return PPOTrainer._build_replay_buffer(trainer)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize(
    "options",
    [{}, {"filters": True}, {"refill_failed": True}, {"gen_batch_size": 4}],
    ids=["plain", "filtering", "refilling", "gen_batch_size"],
)
def test_it_is_verls_own_buffer_but_for_the_polling_interval(mode, options):
    ours, theirs = built(mode, custom=True, **options), built(mode, custom=False, **options)
    assert type(ours) is type(theirs)
    assert (ours.poll_interval, theirs.poll_interval) == (0.2, 2.0)
    assert vars(ours) | {"poll_interval": 2.0} == vars(theirs)


def test_filtering_without_a_metric_is_refused():
    filters = {"filter_groups": {"enable": True, "metric": None}}
    with pytest.raises(ValueError, match=r"algorithm\.filter_groups\.metric is empty"):
        frequent_polling(trainer_mode="sync", sampler_kwargs=filters)
