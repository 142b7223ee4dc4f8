"""What `clipx methods` shows: methods, their groups and their parameters."""

import functools
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.suggestions import did_you_mean

# The value of clipx.method that leaves verl's own loss as it is.
OBSERVE = "observe"
OBSERVED = "verl's own loss, our metrics", "verl, any `loss_mode`"


def facts() -> dict[str, Any]:
    """The facts about the classes. Only what lists them imports the classes, which takes seconds."""
    from verl_clipx.run.facts import facts

    return facts()


def group_settings(group: str) -> dict:
    """The values that a Hydra group of the plugin sets in the clipx node, including those of its defaults.

    Args:
        group: the file's name under configs/clipx, without ending.

    Returns:
        From parameter name to value, including `method` if the group chooses one.

    Raises:
        FileNotFoundError: there is no such group.
    """
    return {key: value for key, value in node_of(group).items() if value != MISSING}


def node_of(group: str) -> dict:
    """The clipx node of a group over those of its defaults; ??? stands for a value that has to be given."""
    content = content_of(group)
    found: dict = {}
    for default in content.get("defaults", []):
        if isinstance(default, str) and default != "_self_":
            found |= node_of(default)
    node = content.get("clipx", {})
    given = {key: MISSING if OmegaConf.is_missing(node, key) else node[key] for key in node if key != "_target_"}
    return found | given


@functools.cache
def content_of(group: str) -> DictConfig:
    """A group's file, which is read once. Callers must not change it."""
    return OmegaConf.load(configs_folder() / "clipx" / f"{group}.yaml")


def group_names(folder: str = "clipx") -> list[str]:
    """The groups in a folder of the plugin's configurations, in alphabetical order."""
    return sorted(path.stem for path in (configs_folder() / folder).glob("*.yaml"))


def groups_of(method: str) -> list[str]:
    """The groups that choose a method, beginning with the one of the method's name."""
    return sorted(
        (name for name in group_names() if group_settings(name).get("method") == method), key=lambda n: n != method
    )


def listed(name: str | None = None) -> list[dict[str, Any]]:
    """The facts about every built-in method and about observe, which leaves verl's loss unchanged; or about one.

    Args:
        name: a method with or without the prefix `clipx_`, one of its groups, or a user's own loss as
            `package.module:name`; None for all built-in methods and observe.

    Returns:
        For each: name, loss_mode in verl, summary, source, module of the class, names of the groups, and parameters.
        For each parameter: name, default, value in each group, allowed values, meaning, source of the default, and
        whether every method has it.

    Raises:
        ValueError: there is no such method; names the nearest.
    """
    if name is not None and ":" in name:
        from verl_clipx.loss.user_method import load_method
        from verl_clipx.run.facts import facts_of

        return [_entry(facts_of(load_method(name)), [])]
    known = {one["name"]: one for one in facts()["methods"]}
    if name is None:
        return [*(_entry(one, groups_of(one["name"])) for one in known.values()), _observed()]
    method = group_settings(name).get("method", name) if name in group_names() else name.removeprefix("clipx_")
    if method == OBSERVE:
        return [_observed()]
    if method not in known:
        words = [*known, *group_names()]
        hint = did_you_mean(method, words)
        raise ValueError(
            f"{name!r} is no method, nor a group that chooses one.{hint} A method must be one of "
            f"{', '.join(known)}; a loss of your own is named as package.module:name."
        )
    return [_entry(known[method], groups_of(method))]


def _entry(method: dict[str, Any], groups: list[str]) -> dict[str, Any]:
    parameters = [*_with_groups(method["parameters"], groups, False), *_with_groups(facts()["around"], groups, True)]
    return {**method, "loss_mode": f"clipx_{method['name']}", "groups": groups, "parameters": parameters}


def _observed() -> dict[str, Any]:
    summary, source = OBSERVED
    found = {"name": OBSERVE, "summary": summary, "source": source, "module": None, "loss_mode": None}
    groups = groups_of(OBSERVE)
    return {**found, "groups": groups, "parameters": _with_groups(facts()["observe"], groups, False)}


def _with_groups(parameters: list[dict[str, Any]], groups: list[str], of_every_method: bool) -> list[dict[str, Any]]:
    settings = {group: OmegaConf.to_container(OmegaConf.create(group_settings(group))) for group in groups}
    return [
        {
            **parameter,
            "in_groups": {group: settings[group].get(parameter["name"], parameter["default"]) for group in groups},
            "of_every_method": of_every_method,
        }
        for parameter in parameters
    ]


def parameter_row(parameter: dict[str, Any]) -> tuple[str, ...]:
    """A parameter's name, value in each group (or its default, without groups), allowed values, meaning and source."""
    values = list(parameter["in_groups"].values()) or [parameter["default"]]
    shown = ["null" if value is None else str(value) for value in values]
    return parameter["name"], *shown, parameter["allowed"], parameter["meaning"], parameter["source"]


def markdown_table() -> str:
    """The table of docs/methods.md: groups, summary, source and file of each method, and a row for observe."""
    rows = ["| `+clipx=` | what it does | source | file |", "|---|---|---|---|"]
    for method in listed():
        if method["module"] is None:
            continue
        groups = ", ".join(f"`{group}`" for group in method["groups"])
        file = method["module"].removeprefix("verl_clipx.").replace(".", "/") + ".py"
        summary = method["summary"].rstrip(".")
        rows.append(f"| {groups} | {summary} | {method['source']} | [{file}](../verl_clipx/{file}) |")
    return "\n".join([*rows, f"| `{OBSERVE}` | {' | '.join(OBSERVED)} | [metrics.md](metrics.md) |"])
