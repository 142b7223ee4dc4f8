"""What makes two runs runs of one setting: their configurations without the keys that cannot change results."""

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

# Left out as places of files, but what they name is a part of the setting of a run.
MODELS = (MODEL_PATH, CRITIC_MODEL_PATH)
DATA = (TRAINING_FILES,)
# Under clipx.scope=micro_batch these decide what the bounds are computed from.
MICRO_BATCHES = ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")

# The plugin's loop is verl's with a seed for each sample; any other loop is another run.
_SEEDED_LOOP = "clipx_seeded_single_turn"
_STOCK_LOOP = "single_turn_agent"


def significant_values(config: DictConfig) -> dict[str, Any]:
    """Returns the values that define a run, resolved, by dotted key.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
    """
    values = resolved_values(config, is_left_out)
    if values.get(AGENT_LOOP) == _SEEDED_LOOP:
        values[AGENT_LOOP] = _STOCK_LOOP
    return values


def resolved_values(config: DictConfig, leave_out: Callable[[str], bool]) -> dict[str, Any]:
    """Returns a configuration's values, resolved, by dotted key.

    A value that cannot be resolved here, such as an environment variable without a default, stays as written.

    Args:
        config: the unresolved configuration as Hydra composed it; it is not modified.
        leave_out: whether a key is left out. What refers to such a key then names it instead of its value.
    """
    config = config.copy()
    OmegaConf.set_struct(config, False)
    _complete(config)
    written = flat(OmegaConf.to_container(config))
    for key in filter(leave_out, written):
        # A value derived from an ignored key must be ignored too.
        OmegaConf.update(config, key, "(left out)")
    return {key: _comparable(config, key, text) for key, text in written.items() if not leave_out(key)}


def _complete(config: DictConfig) -> None:
    """Writes the method's defaults into the clipx node: groups leave them out, and logs of earlier versions don't."""
    # Imports torch.
    from verl_clipx.run.config import NODES, completed

    node = None if OmegaConf.is_interpolation(config, "clipx") else config.get("clipx")
    if isinstance(node, DictConfig):
        method = None if OmegaConf.is_missing(node, "method") else node.get("method")
        for parameter, default in completed({"method": method}).items():
            if parameter not in node and parameter not in NODES:
                node[parameter] = default


def setting_of_run(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what makes up the setting of a run: `significant_values`, and the names of its model and data.

    Args:
        configuration: dotted key to value, as a run wrote it down.
    """
    values = significant_values(parsed(configuration))
    named = {key: name_of_model(configuration.get(key)) for key in MODELS}
    named |= {key: names_of_data(configuration.get(key)) for key in DATA}
    if values.get("clipx.scope") == "micro_batch":
        named |= {f"{ACTOR}.{key}": configuration.get(f"{ACTOR}.{key}") for key in MICRO_BATCHES}
    return values | {key: name for key, name in named.items() if name not in ("", None)}


def parsed(configuration: Mapping[str, Any]) -> DictConfig:
    """Returns a run's configuration as Hydra's tools read it; an interpolation that is never closed is plain text.

    Args:
        configuration: dotted key to value, as a run wrote it down.
    """
    return OmegaConf.create(nested({key: _readable(value) for key, value in configuration.items()}))


def _readable(value: Any) -> Any:
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
    """Names data files with the folder that each is in, as every data set's may be train.parquet."""
    paths = [PurePosixPath(str(path)) for path in ([files] if isinstance(files, str) else files or [])]
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


def value_of(config: DictConfig, key: str, text: Any) -> Any:
    """Returns the value of a key; its text where that does not resolve here, but only in verl's processes."""
    try:
        value = OmegaConf.select(config, key, default=text) if "${" in str(text) else text
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, ListConfig) else value
    except OmegaConfBaseException:
        return str(text) if isinstance(text, list) else text


def _comparable(config: DictConfig, key: str, text: Any) -> Any:
    value = value_of(config, key, text)
    if isinstance(value, DictConfig):
        # The values of the other node count, to which an interpolation refers.
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value
