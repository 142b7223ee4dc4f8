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

# `significant_values` leaves out the keys of paths, because places of files differ between machines. But which models
# and which data these keys name is a part of a run's setting.
MODELS = (MODEL_PATH, CRITIC_MODEL_PATH)
DATA = (TRAINING_FILES,)
# It leaves out these keys of the actor too. But under clipx.scope=micro_batch they decide from which tokens bounds are
# computed.
MICRO_BATCHES = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")

# The plugin's agent loop is verl's own, with a seed for each sample. So the two make no different settings.
_SEEDED_LOOP = "clipx_seeded_single_turn"
_STOCK_LOOP = "single_turn_agent"


def significant_values(config: DictConfig) -> dict[str, Any]:
    """Return the values that define a run, by dotted key: `resolved_values` without keys that can't change results.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
    """
    values = resolved_values(config, is_left_out)
    if values.get(AGENT_LOOP) == _SEEDED_LOOP:
        values[AGENT_LOOP] = _STOCK_LOOP
    return values


def resolved_values(config: DictConfig, leave_out: Callable[[str], bool]) -> dict[str, Any]:
    """Return a configuration's values by dotted key, resolved, so that those of two runs can be compared.

    The method's defaults are added where the clipx node leaves them out. A value that cannot be resolved here is as in
    `resolve_value`.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
        leave_out: returns whether a key is left out. A value that refers to such a key has "(left out)" in the place
            of that key's value, so that it doesn't tell two runs apart either.
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
    """Write the defaults of the method's parameters into the clipx node, in place.

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
    """Return what makes up the setting of a run, by dotted key.

    These are `significant_values` with the names of its models and data files. If bounds are computed from
    micro-batches, the keys that say how these are cut are added.

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
    """Return a run's configuration as a DictConfig; a value with `${` that begins no interpolation is plain text.

    Args:
        configuration: dotted key to value, as a run wrote it down.
    """
    readable = {key: _readable(value) for key, value in configuration.items()}
    return OmegaConf.create(nested(readable))


def _readable(value: Any) -> Any:
    """Return a value that OmegaConf can read: `${` that begins no interpolation is escaped."""
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
    """Return the name of a model: the last part of its path; empty for none."""
    return PurePosixPath(str(path)).name if path else ""


def names_of_data(files: Any) -> str:
    """Return the names of data files, in one text; empty for none.

    A name is the last two parts of the path, since the files of many data sets are called train.parquet.

    Args:
        files: a path, a list of paths, or None.
    """
    if isinstance(files, str):
        files = [files]
    paths = [PurePosixPath(str(path)) for path in files or []]
    return " and ".join("/".join(path.parts[-2:]).lstrip("/") for path in paths)


@cache
def is_left_out(key: str) -> bool:
    """Return whether two runs of one setting may differ in a key."""
    return key in hardware_keys() or any(fnmatchcase(key, pattern) for pattern in LEFT_OUT)


@cache
def hardware_keys() -> frozenset[str]:
    """Return every key that a group in configs/hardware sets."""
    set_keys: set[str] = set()
    for path in (configs_folder() / "hardware").rglob("*.yaml"):
        set_keys.update(flat(OmegaConf.to_container(OmegaConf.load(path))))
    # That names other groups and is no key of the configuration.
    set_keys.discard("defaults")
    return frozenset(set_keys)


def resolve_value(config: DictConfig, key: str, written_value: Any) -> Any:
    """Return a key's resolved value, if it can be resolved on this machine.

    Some values can be resolved only in verl's processes, such as an environment variable that is set there alone. They
    are returned as they are written, a list as text.

    Args:
        config: the whole configuration, to whose other keys the value may refer.
        key: the dotted key.
        written_value: what is written at the key.

    Returns:
        A value of Python's own types, or a DictConfig if the key refers to a whole node.
    """
    contains_interpolation = "${" in str(written_value)
    if not contains_interpolation:
        return written_value
    try:
        # A key whose own name has a dot in it is not found. It gets the default.
        value = OmegaConf.select(config, key, default=written_value)
        if isinstance(value, ListConfig):
            return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException:
        # A list as text cannot be taken for one that is resolved.
        return str(written_value) if isinstance(written_value, list) else written_value
    return value


def _resolve_for_comparison(config: DictConfig, key: str, written_value: Any) -> Any:
    """Return the value of a key in a form in which two spellings of one value are equal.

    Args:
        config, key, written_value: as for `resolve_value`.
    """
    value = resolve_value(config, key, written_value)
    if isinstance(value, DictConfig):
        # The key refers to a whole node, whose values are compared under their own keys.
        return written_value
    # 1 and 1.0 are spellings of one number.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
