"""What `clipx methods` shows: methods, their groups and their parameters, without importing torch for it."""

import functools
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.common.files import read_json_object
from verl_clipx.common.suggestions import did_you_mean

# What the classes say, as facts.py writes it.
RECORDED = Path(__file__).with_name("methods.json")
METHODS_FOLDER = Path(__file__).parents[1] / "methods"

# The value of clipx.method that leaves verl's own loss as it is.
OBSERVE = "observe"
OBSERVED = "verl's own loss, our metrics", "verl, any `loss_mode`"


@functools.cache
def facts() -> dict[str, Any]:
    """What the classes say of the built-in methods; see `facts.facts_of_classes`. Not to be changed."""
    recorded = read_json_object(RECORDED)
    modules = {path.stem for path in METHODS_FOLDER.glob("*.py")} - {"__init__"}
    if modules == {one["module"].rpartition(".")[2] for one in recorded["methods"]}:
        return recorded
    # A method's file was added or taken away since the record was written.
    from verl_clipx.driver.facts import facts_of_classes

    return facts_of_classes()


def group_settings(group: str) -> dict:
    """The clipx node that a Hydra group of the plugin leads to, its defaults included.

    Args:
        group: file name under configs/clipx, without ending.

    Returns:
        Parameter name to value, `method` included; empty for a group that sets no method.
    """
    return {key: value for key, value in node_of(group).items() if value != MISSING}


def shadow_node(group: str) -> dict:
    """The method of a group and its own parameters, those that have to be given as ???: a node under clipx.shadow.

    Args:
        group: file name under configs/clipx, without ending.
    """
    around = {parameter["name"] for parameter in facts()["around"]}
    return {key: value for key, value in node_of(group).items() if key not in around}


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
    """A group's file, read once; not to be changed."""
    return OmegaConf.load(configs_folder() / "clipx" / f"{group}.yaml")


def group_names(folder: str = "clipx") -> list[str]:
    """The groups in a folder of the plugin's configurations, in alphabetical order."""
    return sorted(path.stem for path in (configs_folder() / folder).glob("*.yaml"))


def groups_of(method: str) -> list[str]:
    """The groups that choose a method, the one of its own name first."""
    return sorted(
        (name for name in group_names() if group_settings(name).get("method") == method), key=lambda n: n != method
    )


def listed(name: str | None = None) -> list[dict[str, Any]]:
    """What there is to know of every method, and of observe, which leaves verl's loss alone; or of one of them.

    Args:
        name: of a method, with or without the prefix `clipx_`, of one of its groups, or a loss of the user's own as
            `package.module:name`; None for all built-in ones.

    Returns:
        Of each its name, its loss_mode in verl, summary, source, the module of its class, group names, and parameters:
        name, default, value in each group, allowed values, meaning, and whether every method has it.

    Raises:
        ValueError: there is no such method; names the nearest.
    """
    if name is not None and ":" in name:
        from verl_clipx.driver.facts import facts_of
        from verl_clipx.loss.user_method import load_method

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
    """Name, value in each group (the default, where there is none), allowed values and meaning of a parameter."""
    values = list(parameter["in_groups"].values()) or [parameter["default"]]
    shown = ["null" if value is None else str(value) for value in values]
    return parameter["name"], *shown, parameter["allowed"], parameter["meaning"]


def markdown_table() -> str:
    """The table of docs/methods.md, a row a method: its groups, what it does, source, file; and a row for none."""
    rows = ["| `+clipx=` | what it does | source | file |", "|---|---|---|---|"]
    for method in listed():
        if method["module"] is None:
            continue
        groups = ", ".join(f"`{group}`" for group in method["groups"])
        file = method["module"].removeprefix("verl_clipx.").replace(".", "/") + ".py"
        summary = method["summary"].rstrip(".")
        rows.append(f"| {groups} | {summary} | {method['source']} | [{file}](../verl_clipx/{file}) |")
    return "\n".join([*rows, f"| `{OBSERVE}` | {' | '.join(OBSERVED)} | [metrics.md](metrics.md) |"])
