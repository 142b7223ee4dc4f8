"""The frequently polled replay buffers lose nothing that verl gives its own. Not covered: sampling itself."""

import functools
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.composition import composition
from verl_clipx.training.cpu.replay_buffer import frequent_polling


def build_replay_buffer(config, mode: str = "sync"):
    """The buffer that verl's trainer builds of a configuration."""
    trainer = SimpleNamespace(config=config, trainer_mode=mode, _add_prompts_to_generate=print)
    trainer._resolve_filter_groups_metric = functools.partial(PPOTrainer._resolve_filter_groups_metric, trainer)
    return PPOTrainer._build_replay_buffer(trainer)


def build_on_cpu(mode: str, key: str, value, **sampler):
    """The buffer of the configuration with hardware=cpu, a change, and one of its sampler."""
    config = composition("+hardware=cpu", "algorithm.filter_groups.metric=acc", "data.train_batch_size=16")
    for path, entry in {"algorithm.filter_groups.max_inflight_gen_batches": 5, key: value}.items():
        OmegaConf.update(config, path, entry, force_add=True)
    for name, node in sampler.items():
        config.trainer.v1.sampler[name] = node
    return build_replay_buffer(config, mode)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.gen_batch_size", None),
        ("algorithm.filter_groups.enable", True),
        ("trainer.v1.sampler.sync_refill_failed_groups", True),
        ("data.gen_batch_size", 4),
    ],
)
def test_the_buffer_is_verls_own_but_for_the_polling_interval(monkeypatch, mode, key, value):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    frequent = build_on_cpu(mode, key, value)
    of_verl = build_on_cpu(mode, key, value, custom_sampler=None)
    assert type(frequent) is type(of_verl)
    assert (frequent.poll_interval, of_verl.poll_interval) == (0.2, 2.0)
    assert vars(frequent) | {"poll_interval": 2.0} == vars(of_verl)


def test_filtering_without_a_metric_is_refused():
    filters = {"filter_groups": {"enable": True, "metric": None}}
    with pytest.raises(ValueError, match=r"algorithm\.filter_groups\.metric is empty"):
        frequent_polling(trainer_mode="sync", sampler_kwargs=filters)
