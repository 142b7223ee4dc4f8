"""What a user has set, even to verl's default: on the command line, or in a configuration file of the user's own.

The composed configuration does not tell who has set a value, so the files that it was composed from are read again.
"""

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from verl_clipx.base.method import NODE
from verl_clipx.run.keys import paths

# The files of these providers are Hydra's, and the plugin's (search_path.py).
PROVIDERS = ("hydra", "schema", "verl-clipx")


def chosen_group() -> str | None:
    """The group that +clipx= names; None outside a hydra.main, where nothing tells it."""
    return HydraConfig.get().runtime.choices.get(NODE) if HydraConfig.initialized() else None


def keys_set_by_user() -> dict[str, Any]:
    """The full keys that the user of a hydra.main has set, with their values; empty elsewhere: nothing tells them.

    The values are those that were written, even if another file or the command line replaces them.
    """
    if not HydraConfig.initialized():
        return {}
    hydra = HydraConfig.get()
    overrides = [*hydra.overrides.task, *hydra.overrides.hydra]
    return {**keys_in_files(hydra.job.config_name, overrides), **named_keys(hydra.overrides.task)}


def named_keys(overrides: Collection[str]) -> dict[str, str]:
    """The keys that a command line's overrides name, with their text: `+clipx.alpha=2` names clipx.alpha."""
    words = (override.lstrip("+~").partition("=") for override in overrides)
    return {key: text for key, _, text in words}


def keys_in_files(config_name: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys in those files of a composed configuration that are neither verl's, Hydra's nor the plugin's."""
    if not GlobalHydra.instance().is_initialized():
        return {}
    loader = GlobalHydra.instance().config_loader()
    # Hydra's public calls compose, but do not tell from which files.
    _, repository = loader._parse_overrides_and_create_caching_repo(config_name, list(overrides))
    keys: dict[str, Any] = {}
    if not any(is_users(source.provider, source.full_path()) for source in repository.get_sources()):
        return keys
    for default in loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults:
        if default.config_path is None:
            continue
        loaded = loader._load_single_config(default, repository)
        if is_users(loaded.provider, loaded.path):
            keys |= paths(OmegaConf.to_container(loaded.config, resolve=False))
    return keys


def is_users(provider: str, location: str) -> bool:
    """Whether a source of configuration files is the user's, by who added it to Hydra's search path, and where."""
    scheme, _, path = location.partition("://")
    if provider in PROVIDERS or not path:
        return False
    if scheme == "pkg":
        return path.partition(".")[0] not in ("verl", "hydra")
    return not Path(path).resolve().is_relative_to(Path(find_spec("verl").origin).resolve().parent)
