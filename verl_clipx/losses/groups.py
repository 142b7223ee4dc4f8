"""The files of configs/clipx: what each group sets in the clipx node. Importing this is cheap."""

import functools

from verl_clipx.losses.configs_folder import configs_folder

# The value of clipx.method that leaves verl's own loss as it is.
OBSERVE = "observe"

# Every group accepts this override, and it changes nothing. It stops verl without the plugin: there, +clipx adds a key
# that nobody reads, but an override without + is of a key that does not exist, and Hydra refuses it.
SWAP_GUARD = "clipx.receipt=auto"


def swap_by(group: str) -> str:
    """Return the overrides that choose a group in a command of verl's, and that verl without the plugin stops at."""
    return f"+clipx={group} {SWAP_GUARD}"


def group_settings(group: str) -> dict:
    """Return the values that a group of the plugin sets in the clipx node.

    Args:
        group: the name of a file in configs/clipx, such as "dapo".

    Returns:
        From key to value: the name of the method, and the values of the group and of the groups in its defaults. Keys
        whose value the user must give are left out.

    Raises:
        FileNotFoundError: there is no such group.
    """
    # Imported here, so that methods alone can be used where it is not installed.
    from omegaconf import MISSING

    return {key: value for key, value in read_node(group).items() if value != MISSING}


def own_settings(group: str) -> dict:
    """Return what `group_settings` returns for a group of the plugin, and nothing for a group of the user's own.

    A group of the user's own is compared with the method's defaults.
    """
    return group_settings(group) if group in group_names() else {}


@functools.cache
def read_node(group: str) -> dict:
    """Return the clipx node that a group's file and the groups in its defaults make together.

    A group's file is read once. Callers must not change the dictionary.

    Args:
        group: as for `group_settings`.

    Returns:
        From key to value. The group's own values take precedence over those of its defaults. "???" stands for a value
        that the user must give.

    Raises:
        FileNotFoundError: there is no such group.
        ModuleNotFoundError: OmegaConf is not installed.
    """
    from omegaconf import MISSING, OmegaConf

    content = OmegaConf.load(configs_folder() / "clipx" / f"{group}.yaml")
    of_defaults = {}
    for default in content.get("defaults", []):
        if isinstance(default, str) and default != "_self_":
            of_defaults |= read_node(default)
    node = content.get("clipx", {})
    own = {}
    for key in node:
        if key != "_target_":
            # Reading a missing value would raise an error.
            own[key] = MISSING if OmegaConf.is_missing(node, key) else node[key]
    return of_defaults | own


def group_names(folder: str = "clipx") -> list[str]:
    """Return the names of the groups in a folder of the plugin's configurations, in alphabetical order."""
    return sorted(path.stem for path in (configs_folder() / folder).glob("*.yaml"))


def groups_of(method: str) -> list[str]:
    """Return the groups that choose a method, beginning with the one of the method's name."""
    names = [name for name in group_names() if group_settings(name).get("method") == method]
    # False, for the method's own name, comes before True.
    return sorted(names, key=lambda name: name != method)
