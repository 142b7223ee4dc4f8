"""What makes two runs runs of one setting: their configurations, without the keys that cannot change results."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import PurePosixPath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.run.keys import (
    ACTOR,
    AGENT_LOOP,
    CRITIC_MODEL_PATH,
    LEFT_OUT,
    MODEL_PATH,
    TRAINING_FILES,
    flat,
    nested,
)

# These keys are left out because places of files differ between machines. But which model and which data they name is a
# part of a run's setting.
MODELS = (MODEL_PATH, CRITIC_MODEL_PATH)
DATA = (TRAINING_FILES,)
# These keys of the actor are left out too. But under clipx.scope=micro_batch they decide what bounds are computed from.
MICRO_BATCHES = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")

# The plugin's agent loop is verl's own with a seed for each sample, so that these two make no different settings.
_SEEDED_LOOP = "clipx_seeded_single_turn"
_STOCK_LOOP = "single_turn_agent"


def significant_values(config: DictConfig) -> dict[str, Any]:
    """Returns the values that define a run, by dotted key: `resolved_values` without keys that can't change results.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
    """
    values = resolved_values(config, is_left_out)
    if values.get(AGENT_LOOP) == _SEEDED_LOOP:
        values[AGENT_LOOP] = _STOCK_LOOP
    return values


def resolved_values(config: DictConfig, leave_out: Callable[[str], bool]) -> dict[str, Any]:
    """Returns a configuration's values by dotted key, resolved, so that those of two runs can be compared.

    The method's defaults are added where the clipx node leaves them out. A value that cannot be resolved here, such as
    an environment variable without a default, stays as written.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
        leave_out: whether a key is left out. A value that refers to such a key has "(left out)" in the place of the
            key's value, so that it doesn't tell two runs apart either.
    """
    completed_config = config.copy()
    # Without this, OmegaConf refuses keys that the configuration does not have yet.
    OmegaConf.set_struct(completed_config, False)
    _add_method_defaults(completed_config)
    written_values = flat(OmegaConf.to_container(completed_config))
    for key in written_values:
        if leave_out(key):
            OmegaConf.update(completed_config, key, "(left out)")
    resolved: dict[str, Any] = {}
    for key, written_value in written_values.items():
        if not leave_out(key):
            resolved[key] = _resolve_for_comparison(completed_config, key, written_value)
    return resolved


def _add_method_defaults(config: DictConfig) -> None:
    """Writes the defaults of the method's parameters into the clipx node, in place.

    The groups of configurations leave them out, while the logs of earlier versions of the plugin spell them out. A
    configuration without a clipx node, or with one that refers to another place, stays as it is.
    """
    # This import takes long: it imports torch.
    from verl_clipx.run.config import NODES, completed

    if OmegaConf.is_interpolation(config, "clipx"):
        return
    node = config.get("clipx")
    if not isinstance(node, DictConfig):
        return
    method = None if OmegaConf.is_missing(node, "method") else node.get("method")
    for parameter, default in completed({"method": method}).items():
        # The nodes of modifiers have no defaults: without one, the modifier is off.
        is_modifier = parameter in NODES
        if not is_modifier and parameter not in node:
            node[parameter] = default


def setting_of_run(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what makes up the setting of a run, by dotted key.

    That is `significant_values`, with the names of its models and data files and, where bounds are computed from
    micro-batches, how these are cut.

    Args:
        configuration: dotted key to value, as a run wrote it down.
    """
    values = significant_values(parsed(configuration))
    added: dict[str, Any] = {}
    for key in MODELS:
        added[key] = name_of_model(configuration.get(key))
    for key in DATA:
        added[key] = names_of_data(configuration.get(key))
    if values.get("clipx.scope") == "micro_batch":
        for name in MICRO_BATCHES:
            added[f"{ACTOR}.{name}"] = configuration.get(f"{ACTOR}.{name}")
    given = {key: value for key, value in added.items() if value not in ("", None)}
    return {**values, **given}


def parsed(configuration: Mapping[str, Any]) -> DictConfig:
    """Returns a run's configuration as Hydra's tools read it; an interpolation that is never closed is plain text.

    Args:
        configuration: dotted key to value, as a run wrote it down.
    """
    return OmegaConf.create(nested({key: _readable(value) for key, value in configuration.items()}))


def _readable(value: Any) -> Any:
    """Returns a value that OmegaConf can read: `${` that begins no interpolation is escaped."""
    if isinstance(value, list | tuple):
        return [_readable(part) for part in value]
    if not isinstance(value, str):
        return value
    try:
        OmegaConf.create([value])
    except GrammarParseError:
        return value.replace("${", "\\${")
    return value


def name_of_model(path: Any) -> str:
    """Returns what a model is called, wherever it is kept; empty for none."""
    return PurePosixPath(str(path)).name if path else ""


def names_of_data(files: Any) -> str:
    """Returns what data files are called, wherever they are kept; empty for none.

    Each is named with the folder that it is in, since the files of many data sets are called train.parquet.

    Args:
        files: a path, a list of paths, or None.
    """
    if isinstance(files, str):
        files = [files]
    paths = [PurePosixPath(str(path)) for path in files or []]
    return " and ".join("/".join(path.parts[-2:]).lstrip("/") for path in paths)


@cache
def is_left_out(key: str) -> bool:
    """Returns whether two runs of one setting may differ in a key."""
    return key in hardware_keys() or any(fnmatchcase(key, pattern) for pattern in LEFT_OUT)


@cache
def hardware_keys() -> frozenset[str]:
    """Returns every key that a group in configs/hardware sets."""
    groups = map(OmegaConf.load, (configs_folder() / "hardware").rglob("*.yaml"))
    return frozenset(key for config in groups for key in flat(OmegaConf.to_container(config)) if key != "defaults")


def resolve_value(config: DictConfig, key: str, written_value: Any) -> Any:
    """Returns the value of a key, or what is written there if it does not resolve here but only in verl's processes.

    Args:
        config: the whole configuration, to whose other keys the value may refer.
        key: the dotted key.
        written_value: what is written at the key.
    """
    is_interpolation = "${" in str(written_value)
    if not is_interpolation:
        return written_value
    try:
        value = OmegaConf.select(config, key, default=written_value)
        if isinstance(value, ListConfig):
            return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:
        return str(written_value) if isinstance(written_value, list) else written_value
    return value


def _resolve_for_comparison(config: DictConfig, key: str, written_value: Any) -> Any:
    """Returns the value of a key so that two spellings of a value are equal; arguments as for `resolve_value`."""
    value = resolve_value(config, key, written_value)
    if isinstance(value, DictConfig):
        # The key refers to a whole node, whose values are compared under their own keys.
        return written_value
    # A number is the same with and without a decimal point.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
