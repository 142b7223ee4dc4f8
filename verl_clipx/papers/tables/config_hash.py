"""Decides whether a run matches a preset, by comparing their configurations without keys that cannot change results."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.run.config import NODES, completed

# Keys in which two runs of one preset may differ; `.*` covers everything below a key.
# Keys of the groups in configs/hardware are ignored too.
LEFT_OUT = (
    # locations of files
    "data.train_files",
    "data.val_files",
    "*.model.path",
    "*.model.hf_config_path",
    "*.model.tokenizer_path",
    "*.model.use_shm",
    "trainer.default_local_dir",
    "trainer.default_hdfs_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "skip.*",
    # logs, names, intermediate checkpoints
    "trainer.logger",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.log_val_generations",
    "trainer.val_before_train",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep",
    "trainer.del_local_ckpt_after_load",
    "trainer.esi_redundant_time",
    "*.checkpoint.*",
    "*.profiler.*",
    "*.prometheus.*",
    "global_profiler.*",
    # the machine
    "trainer.device",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.ray_wait_register_center_timeout",
    "ray_kwargs.*",
    "transfer_queue.*",
    "data.*num_workers",
    "data.filter_overlong_prompts_workers",
    "reward.num_workers",
    "actor_rollout_ref.nccl_timeout",
    "*.rollout.agent.num_workers",
    "*micro_batch_size_per_gpu",
    "*micro_batch_size",
    "*max_token_len_per_gpu",
    "*use_dynamic_bsz",
    "*.ulysses_sequence_parallel_size",
    "*.entropy_from_logits*",
    "*.fsdp_config.fsdp_size",
    "*.fsdp_config.param_offload",
    "*.fsdp_config.optimizer_offload",
    "*.fsdp_config.offload_policy",
    "*.fsdp_config.reshard_after_forward",
    "*.fsdp_config.forward_prefetch",
    "*.model.enable_gradient_checkpointing",
    "*.model.use_remove_padding",
    "*.rollout.tensor_model_parallel_size",
    "*.rollout.gpu_memory_utilization",
    "*.rollout.max_num_batched_tokens",
    "*.rollout.max_num_seqs",
    "*.rollout.enforce_eager",
    "*.rollout.free_cache_engine",
    # seeds, and what makes samples a function of them
    "*.seed",
    "*.data_loader_seed",
    "clipx_rollout.sampler.*",
    "clipx_rollout.cpu_dtype",
    # what is recorded about a run
    "clipx.trace.*",
    "*.clipx.trace.*",
    "clipx.metrics",
    "*.clipx.metrics",
    "clipx.receipt",
    "*.clipx.receipt",
    "clipx.health*",
    "*.clipx.health*",
    "clipx.log",
    "*.clipx.log",
    "trainer.v1.sampler.custom_sampler.*",
    "trainer.v1.sampler.sampler_kwargs.*",
    # derived from other keys
    "actor_rollout_ref.actor.policy_loss.run",
    "actor_rollout_ref.actor.policy_loss.run.*",
    # changes the words of a line
    "clipx.paper_loss_agg_mode",
    "*.clipx.paper_loss_agg_mode",
)

_AGENT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
# The plugin's loop is verl's with a seed for each sample; any other loop is another run.
_SEEDED_LOOP, _STOCK_LOOP = "clipx_seeded_single_turn", "single_turn_agent"

_PLACEHOLDER = "(left out)"

OPEN = "???"
"""Hydra's marker for a mandatory value that is not yet set."""


def significant_values(config: DictConfig) -> dict[str, Any]:
    """Return the values that define a run, resolved, by dotted key.

    A value that cannot be resolved here, such as an environment variable without a default, stays as written.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
    """
    config = config.copy()
    OmegaConf.set_struct(config, False)
    for node in ("clipx", "actor_rollout_ref.actor.policy_loss.clipx"):
        complete(config, node)
    kept = []
    for key, parent, name in _leaves(config):
        if is_left_out(key):
            # A value derived from an ignored key must be ignored too.
            parent[name] = _PLACEHOLDER
        else:
            kept.append((key, parent, name))
    values = {key: _value(parent, name) for key, parent, name in kept}
    if values.get(_AGENT_LOOP) == _SEEDED_LOOP:
        values[_AGENT_LOOP] = _STOCK_LOOP
    return values


def complete(config: DictConfig, key: str) -> None:
    """Write the method's defaults into a clipx node, which groups leave out, and logs of earlier versions do not."""
    parent, _, name = key.rpartition(".")
    owner = OmegaConf.select(config, parent) if parent else config
    if owner is None or OmegaConf.is_interpolation(owner, name) or not isinstance(owner.get(name), DictConfig):
        return
    node = owner[name]
    method = None if OmegaConf.is_missing(node, "method") else node.get("method")
    for parameter, default in completed({"method": method}).items():
        if parameter not in node and parameter not in NODES:
            node[parameter] = default


def as_written(config: DictConfig, key: str) -> str:
    """Return a value as written; resolved, it would be a path on one particular machine."""
    parent, _, name = key.rpartition(".")
    return str(OmegaConf.select(config, parent)._get_node(name))


def is_left_out(key: str) -> bool:
    """Return whether two runs of one preset may differ in a key."""
    return key in hardware_keys() or any(fnmatchcase(key, pattern) for pattern in LEFT_OUT)


@lru_cache(maxsize=1)
def hardware_keys() -> frozenset[str]:
    """Return every key that a group in configs/hardware sets."""
    found = set()
    for path in sorted((configs_folder() / "hardware").rglob("*.yaml")):
        config = OmegaConf.load(path)
        if isinstance(config, DictConfig):
            config.pop("defaults", None)
            found.update(key for key, _, _ in _leaves(config))
    return frozenset(found)


def filled_in(preset: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's values for the keys that the preset leaves open (`???`), such as measured clip bounds."""
    return {key: run[key] for key, value in preset.items() if value == OPEN and run.get(key, OPEN) != OPEN}


def differences(preset: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """Describe the differences between a preset and a run.

    Args:
        preset, run: from `significant_values`; apply `filled_in` first.
    """
    nothing = "nothing"
    return [
        f"{key}: preset {preset.get(key, nothing)!r}, run {run.get(key, nothing)!r}"
        for key in sorted(preset.keys() | run.keys())
        if preset.get(key, nothing) != run.get(key, nothing)
    ]


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, DictConfig, str]]:
    for name in list(config):
        key = f"{prefix}{name}"
        is_plain = not OmegaConf.is_missing(config, name) and not OmegaConf.is_interpolation(config, name)
        if is_plain and isinstance(config[name], DictConfig):
            yield from _leaves(config[name], f"{key}.")
        else:
            yield key, config, name


def _value(parent: DictConfig, name: str) -> Any:
    node = parent._get_node(name)
    try:
        value = parent[name]
        # If a node refers to another node by interpolation, the values of the other node count.
        if isinstance(value, DictConfig):
            return node._value()
        value = OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
    except OmegaConfBaseException:
        value = node._value()
        value = str(value) if isinstance(value, list) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value
