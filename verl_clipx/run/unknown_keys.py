"""Suggests what was meant by a key that verl's configuration does not have."""

import re
from difflib import get_close_matches
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from verl_clipx.base.method import NODE
from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.run.keys import FACTS, paths

# The error of verl's dataclasses for a key that was added with +.
NO_FIELD = re.compile(r"unexpected keyword argument '(\w+)'.*full_key: (\S+)", re.DOTALL)

# If a name occurs in more places than this, it says little about which of them was meant.
MOST_PLACES = 3

# The folders of the plugin's groups, which are all added with +.
GROUPS = (NODE, "hardware", "recipe")


def absent(override: str, config: DictConfig) -> str:
    """The message for an override, KEY=VALUE, of a key that verl's configuration does not have."""
    key = override.partition("=")[0]
    hint = of_the_plugin(override) or nearest(key, config)
    hint = hint or f" If a part of verl reads it without a default, write +{override}."
    return f"{override}: verl's configuration has no such key.{hint}"


def of_the_plugin(override: str) -> str:
    """A sentence, after a space, for a group or a key of the plugin's without its + or without a method; else empty."""
    key, _, value = override.partition("=")
    folder = configs_folder() / key
    if folder.is_dir() and key.partition("/")[0] in GROUPS:
        names = [path.stem for path in folder.glob("*.yaml")]
        near = did_you_mean(value, names, f"+{key}=") if value not in names else ""
        return near or f" Did you mean +{key}={value}?"
    if key.startswith(f"{NODE}."):
        return f" Choose a method by its group, for example +{NODE}=grpo, which has the node {NODE}."
    return ""


def nearest(key: str, config: DictConfig) -> str:
    """A sentence, after a space, that names the keys nearest to one that does not exist; empty if none is near.

    A key of the same name at another place is nearer than one of a similar name.
    """
    node = OmegaConf.to_container(config, resolve=False)
    every = [path for path in values_in(node) if path != key and not path.startswith(FACTS)]
    places = [path for path in every if path.rpartition(".")[2] == key.rpartition(".")[2]]
    if 0 < len(places) <= MOST_PLACES:
        return f" Did you mean {' or '.join(get_close_matches(key, places, n=1, cutoff=0.9) or places)}?"
    name = key
    while isinstance(node.get(name.partition(".")[0]), dict):
        first, _, name = name.partition(".")
        node = node[first]
    return did_you_mean(name, (path for path in values_in(node) if path != name), key.removesuffix(name))


def values_in(node: dict[str, Any]) -> list[str]:
    """The full keys of the values in a nested configuration, which a user may set."""
    return [path for path, value in paths(node).items() if not isinstance(value, dict) and "_target_" not in path]


def refused_by_verl(error: InstantiationException, config: DictConfig) -> Exception:
    """The error to raise if verl cannot build a part of its configuration; it names the key if a key is the reason."""
    match = NO_FIELD.search(str(error))
    if match is None:
        return error
    key = f"{match[2]}.{match[1]}"
    return ValueError(f"+{key}: verl has no such key and refuses it.{nearest(key, config) or ' Remove it.'}")
