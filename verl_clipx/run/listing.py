"""The content of `clipx methods`: methods, their groups and their parameters, as the classes state them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from verl_clipx.losses.applying.user_method import load_method
from verl_clipx.losses.base.method import METHODS, Method
from verl_clipx.losses.base.refusal import Refusal, did_you_mean
from verl_clipx.losses.groups import OBSERVE, group_names, group_settings, groups_of
from verl_clipx.losses.methods import BUILT_IN
from verl_clipx.run.config import AROUND, parameters_of
from verl_clipx.run.config import OBSERVED as NODE_OF_OBSERVE

OBSERVED = "verl's own loss, our metrics", "verl, any `loss_mode`"


def describe_methods(name: str | None = None) -> list[dict[str, Any]]:
    """The facts about every built-in method and about observe, which leaves verl's loss unchanged; or about one.

    Args:
        name: a method with or without the prefix `clipx_`, one of its groups, or a user's own loss as
            `package.module:name`; None for all built-in methods and observe.

    Raises:
        Refusal: there is no such method; names the nearest.
        ValueError: the user's own loss cannot be loaded.
    """
    if name is None:
        return [*(_of_method(METHODS[built_in], groups_of(built_in)) for built_in in BUILT_IN), _of_observe()]
    if ":" in name:
        return [_of_method(load_method(name), [])]
    method = group_settings(name).get("method", name) if name in group_names() else name.removeprefix("clipx_")
    if method == OBSERVE:
        return [_of_observe()]
    if method not in BUILT_IN:
        hint = did_you_mean(method, {*BUILT_IN, *group_names()} - {method}).strip()
        other = "`clipx methods` lists them; a loss of your own is named as package.module:name."
        raise Refusal("clipx methods", name, "there is no such method, nor a group that chooses one", hint or other)
    return [_of_method(METHODS[method], groups_of(method))]


def _of_method(method: type[Method], groups: list[str]) -> dict[str, Any]:
    own = [field for name, field in parameters_of(method).items() if name not in AROUND]
    return {
        "name": method.name,
        "summary": method.summary(),
        "source": method.source,
        "module": method.__module__,
        "loss_mode": f"clipx_{method.name}",
        "groups": groups,
        "parameters": [*_parameters(own, groups, False), *_parameters(AROUND.values(), groups, True)],
    }


def _of_observe() -> dict[str, Any]:
    summary, source = OBSERVED
    groups = groups_of(OBSERVE)
    facts = {"name": OBSERVE, "summary": summary, "source": source, "module": None, "loss_mode": None}
    return {**facts, "groups": groups, "parameters": _parameters(NODE_OF_OBSERVE.values(), groups, False)}


def _parameters(fields: Iterable[dataclasses.Field], groups: list[str], of_every_method: bool) -> list[dict[str, Any]]:
    settings = {group: OmegaConf.to_container(OmegaConf.create(group_settings(group))) for group in groups}
    return [
        {
            "name": field.name,
            "default": field.default,
            "allowed": field.metadata["allowed"].description,
            "meaning": field.metadata["meaning"],
            "source": field.metadata["source"],
            "in_groups": {group: settings[group].get(field.name, field.default) for group in groups},
            "of_every_method": of_every_method,
        }
        for field in fields
    ]


def parameter_row(parameter: dict[str, Any]) -> tuple[str, ...]:
    """A parameter's name, value in each group (or its default, without groups), allowed values, meaning and source."""
    values = list(parameter["in_groups"].values()) or [parameter["default"]]
    shown = ["null" if value is None else str(value) for value in values]
    return parameter["name"], *shown, parameter["allowed"], parameter["meaning"], parameter["source"]


def markdown_table() -> str:
    """Groups, summary, source and file of each method, and a row for observe, as a table of the site's methods.md."""
    rows = ["| `+clipx=` | what it does | source | file |", "|---|---|---|---|"]
    for method in describe_methods():
        if method["module"] is None:
            continue
        groups = ", ".join(f"`{group}`" for group in method["groups"])
        file = method["module"].removeprefix("verl_clipx.").replace(".", "/") + ".py"
        summary = method["summary"].rstrip(".")
        rows.append(f"| {groups} | {summary} | {method['source']} | [{file}](../verl_clipx/{file}) |")
    return "\n".join([*rows, f"| `{OBSERVE}` | {' | '.join(OBSERVED)} | [metrics.md](metrics.md) |"])
