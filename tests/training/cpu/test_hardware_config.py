"""The hardware groups' keys are verl's, and cpu.yaml composed onto verl's own main configuration. Not covered: a run
with them; what the GPU groups mean for memory.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig

from tests.composition import composition

CONFIGS = Path(__file__).parents[3] / "configs"
# Keys that verl's configuration leaves out although it reads them.
ADDED_KEYS = {
    "ray_kwargs.ray_init.num_gpus",
    "ray_kwargs.ray_init.object_store_memory",
    "ray_kwargs.ray_init.include_dashboard",
    "ray_kwargs.ray_init.runtime_env.env_vars",
    "actor_rollout_ref.model.override_config.attn_implementation",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "actor_rollout_ref.rollout.engine_kwargs.cpu",
    "critic.model.override_config.attn_implementation",
    "critic.fsdp.mixed_precision",
    "trainer.v1.sampler.sampler_kwargs",
}


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def test_verl_accepts_the_actor_the_reference_and_the_critic_in_float32():
    config = composition("+hardware=cpu")
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor, FSDPActorConfig)
    # The rest of the critic's node reads a checkpoint when it is built.
    for node, engine in (
        (config.actor_rollout_ref.actor, actor.engine),
        (config.actor_rollout_ref.ref, omega_conf_to_dataclass(config.actor_rollout_ref.ref.fsdp_config)),
        (config.critic, omega_conf_to_dataclass(config.critic.fsdp)),
    ):
        assert node.strategy == "fsdp2" and not node.get("use_torch_compile", False)
        assert engine.model_dtype == "fp32" and not engine.use_torch_compile
        assert dict(engine.mixed_precision) == dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")


def test_ray_gets_a_slot_a_rank_and_the_platform():
    ray_init = composition("+hardware=cpu", "trainer.n_gpus_per_node=8").ray_kwargs.ray_init
    assert ray_init.num_gpus == 8
    # Three CPUs a rank, and one each for the trainer, two service processes, the agent loop and the reward loop.
    assert ray_init.num_cpus >= 3 * 8 + 5
    # Environment variables are strings, or Ray refuses them.
    assert all(isinstance(value, str) for value in ray_init.runtime_env.env_vars.values())
    assert ray_init.runtime_env.env_vars.VERL_PLATFORM == "cpu"


def test_without_the_environment_variable_it_stops_with_the_command_to_run(monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM")
    with pytest.raises(Exception, match="VERL_PLATFORM=cpu python -m"):
        OmegaConf.to_container(composition("+hardware=cpu"), resolve=True)


@pytest.mark.parametrize("file", sorted((CONFIGS / "hardware").rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_key_is_one_that_verl_has(file):
    known = {*keys_in(OmegaConf.to_container(composition())), *ADDED_KEYS}
    keys = [key for key in keys_in(OmegaConf.to_container(OmegaConf.load(file))) if key != "defaults"]
    prefixes = tuple(f"{key}." for key in ADDED_KEYS)
    assert keys and [key for key in keys if key not in known and not key.startswith(prefixes)] == []


def keys_in(node: dict, prefix: str = "") -> Iterator[str]:
    """The key of every value and of every node of values."""
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from keys_in(value, f"{prefix}{key}.")
