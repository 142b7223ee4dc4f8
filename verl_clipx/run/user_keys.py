"""Which keys a user has set, even to verl's default: on the command line, or in a configuration file of the user's own.

The composed configuration does not tell who has set a value, so the files that it was composed from are read again.
"""

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from verl_clipx.run.verl_keys import FACTS, paths

# The files of these providers are Hydra's, and the plugin's (search_path.py).
PROVIDERS = ("hydra", "schema", "verl-clipx")


def keys_set_by_user() -> set[str]:
    """The full keys that the user of a hydra.main has set; empty outside a hydra.main, where nothing tells them."""
    if not HydraConfig.initialized():
        return set()
    hydra = HydraConfig.get()
    overrides = [*hydra.overrides.task, *hydra.overrides.hydra]
    return named_keys(hydra.overrides.task) | keys_in_files(hydra.job.config_name, overrides)


def named_keys(overrides: Collection[str]) -> set[str]:
    """The keys that a command line's overrides name, for example clipx.alpha for `+clipx.alpha=2`."""
    return {override.lstrip("+~").split("=")[0] for override in overrides}


def keys_in_files(config_name: str | None, overrides: Sequence[str]) -> set[str]:
    """The full keys in those files of a composed configuration that are neither verl's, Hydra's nor the plugin's.

    The facts about the run are left out: each is compared with the run itself (`resolve.set_facts`).

    Args:
        config_name: the primary configuration's name.
        overrides: all overrides, Hydra's own too.
    """
    if not GlobalHydra.instance().is_initialized():
        return set()
    loader = GlobalHydra.instance().config_loader()
    # Hydra's public calls compose, but do not tell from which files.
    _, repository = loader._parse_overrides_and_create_caching_repo(config_name, list(overrides))
    keys: set[str] = set()
    if not any(is_users(source.provider, source.full_path()) for source in repository.get_sources()):
        return keys
    for default in loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults:
        if default.config_path is None:
            continue
        loaded = loader._load_single_config(default, repository)
        if is_users(loaded.provider, loaded.path):
            keys |= set(paths(OmegaConf.to_container(loaded.config, resolve=False)))
    return {key for key in keys if not key.startswith(FACTS)}


def is_users(provider: str, location: str) -> bool:
    """Whether a source of configuration files belongs to the user.

    Args:
        provider: who has added it to Hydra's search path.
        location: the folder or the package, such as file:///home/me/configs or pkg://verl.trainer.config.
    """
    scheme, _, path = location.partition("://")
    if provider in PROVIDERS or not path:
        return False
    if scheme == "pkg":
        return path.partition(".")[0] not in ("verl", "hydra")
    return not Path(path).resolve().is_relative_to(Path(find_spec("verl").origin).resolve().parent)
