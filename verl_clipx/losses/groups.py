"""The files of configs/clipx: what each group sets in the clipx node. Importing this is cheap."""

import functools

from verl_clipx.losses.configs_folder import configs_folder

# The value of clipx.method that leaves verl's own loss as it is.
OBSERVE = "observe"

# Every group takes this override, and it changes nothing. Where a verl without the plugin composes the command, +clipx
# is a new key that nobody reads; an override without + is one of a key that does not exist, at which Hydra stops.
SWAP_GUARD = "clipx.receipt=auto"


def swap_by(group: str) -> str:
    """Return the overrides that choose a group in a command of verl's, and that verl without the plugin stops at."""
    return f"+clipx={group} {SWAP_GUARD}"


def group_settings(group: str) -> dict:
    """The values that a group of the plugin sets in the clipx node, those of its defaults and a method's name included.

    Raises:
        FileNotFoundError: there is no such group.
    """
    # Here, so that methods alone can be used where it is not installed.
    from omegaconf import MISSING

    return {key: value for key, value in node_of(group).items() if value != MISSING}


def own_settings(group: str) -> dict:
    """As `group_settings`; empty for a group of the user's own, which is held against the method's defaults."""
    return group_settings(group) if group in group_names() else {}


@functools.cache
def node_of(group: str) -> dict:
    """The clipx node of a group over those of its defaults; ??? stands for a value that has to be given.

    A group's file is read once. Callers must not change the node.
    """
    from omegaconf import MISSING, OmegaConf

    content = OmegaConf.load(configs_folder() / "clipx" / f"{group}.yaml")
    below = {}
    for default in content.get("defaults", []):
        if isinstance(default, str) and default != "_self_":
            below |= node_of(default)
    node = content.get("clipx", {})
    own = {key: MISSING if OmegaConf.is_missing(node, key) else node[key] for key in node if key != "_target_"}
    return below | own


def group_names(folder: str = "clipx") -> list[str]:
    """The groups in a folder of the plugin's configurations, in alphabetical order."""
    return sorted(path.stem for path in (configs_folder() / folder).glob("*.yaml"))


def groups_of(method: str) -> list[str]:
    """The groups that choose a method, beginning with the one of the method's name."""
    names = [name for name in group_names() if group_settings(name).get("method") == method]
    return sorted(names, key=lambda name: name != method)
