"""What `clipx methods` shows: methods, their groups and their parameters."""

import dataclasses
import functools

from omegaconf import DictConfig, OmegaConf

from verl_clipx.common.configs_folder import configs_folder
from verl_clipx.driver.config import AROUND, OBSERVE, Observe, parameters_of
from verl_clipx.methods import METHODS, method_named

OBSERVED = "verl's own loss, our metrics", "verl, any `loss_mode`"


def group_settings(group: str) -> dict:
    """The clipx node that a Hydra group of the plugin leads to, its defaults included.

    Args:
        group: file name under configs/clipx, without ending.

    Returns:
        Parameter name to value, `method` included; empty for a group that sets no method.
    """
    content = content_of(group)
    settings: dict = {}
    for default in content.get("defaults", []):
        if isinstance(default, str) and default != "_self_":
            settings.update(group_settings(default))
    node = content.get("clipx", {})
    settings.update({key: node[key] for key in node if key != "_target_" and not OmegaConf.is_missing(node, key)})
    return settings


def shadow_node(group: str) -> dict:
    """The method of a group and its own parameters, those that have to be given as ???: a node under clipx.shadow.

    Args:
        group: file name under configs/clipx, without ending.
    """
    content = content_of(group)
    found: dict = {}
    for default in content.get("defaults", []):
        if isinstance(default, str) and default != "_self_":
            found.update(shadow_node(default))
    node = content.get("clipx", {})
    given = {key: "???" if OmegaConf.is_missing(node, key) else node[key] for key in node}
    return found | {key: value for key, value in given.items() if key not in AROUND and key != "_target_"}


@functools.cache
def content_of(group: str) -> DictConfig:
    """A group's file, read once; not to be changed."""
    return OmegaConf.load(configs_folder() / "clipx" / f"{group}.yaml")


def groups_of(method: str) -> list[str]:
    """The groups that choose a method, the one of its own name first."""
    names = sorted(path.stem for path in (configs_folder() / "clipx").glob("*.yaml"))
    return sorted((name for name in names if group_settings(name).get("method") == method), key=lambda n: n != method)


def method_rows() -> list[tuple[str, str, str, str]]:
    """Name in verl's registry, summary, source and groups of every method; and those of observe, which adds no loss."""
    described = [described_by(name) for name in (*METHODS, OBSERVE)]
    return [
        ("" if name == OBSERVE else f"clipx_{name}", summary, source, ", ".join(groups))
        for name, summary, source, groups in described
    ]


def described_by(name: str) -> tuple[str, str, str, list[str]]:
    """Name, summary, source and groups of a method, or of observe, which leaves verl's loss alone.

    Args:
        name: with or without the prefix `clipx_`, or one of its groups.

    Raises:
        ValueError: there is no such method.
    """
    if name == OBSERVE:
        return OBSERVE, *OBSERVED, groups_of(OBSERVE)
    groups = {path.stem for path in (configs_folder() / "clipx").glob("*.yaml")}
    method = method_named(group_settings(name).get("method", name) if name in groups else name)
    return method.name, method.summary(), method.source, groups_of(method.name)


def parameter_rows(name: str, groups: list[str]) -> list[tuple[str, ...]]:
    """Name, value in each group, allowed values and meaning of the parameters of a method, or of observe."""
    fields = dataclasses.fields(Observe) if name == OBSERVE else parameters_of(METHODS[name]).values()
    settings = {group: group_settings(group) for group in groups}
    rows = []
    for field in fields:
        shown = [str(settings[group].get(field.name, field.default)) for group in groups]
        shown = ["null" if value == "None" else value for value in shown]
        rows.append((field.name, *shown, field.metadata["allowed"].description, field.metadata["meaning"]))
    return rows


def markdown_table() -> str:
    """The table of docs/methods.md, a row a method: its groups, what it does, source, file; and a row for none."""
    rows = ["| `+clipx=` | what it does | source | file |", "|---|---|---|---|"]
    for name, method in METHODS.items():
        if method.__module__.startswith("verl_clipx.methods."):
            groups = ", ".join(f"`{group}`" for group in groups_of(name))
            file = method.__module__.removeprefix("verl_clipx.").replace(".", "/") + ".py"
            rows.append(
                f"| {groups} | {method.summary().rstrip('.')} | {method.source} | [{file}](../verl_clipx/{file}) |"
            )
    return "\n".join([*rows, f"| `{OBSERVE}` | {' | '.join(OBSERVED)} | [metrics.md](metrics.md) |"])
