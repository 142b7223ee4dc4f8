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
from verl_clipx.run.config import AROUND, OBSERVED, parameters_of

# The row of +clipx=observe, which has no class that could state it.
SUMMARY_OF_OBSERVE = "verl's own loss, our metrics"
SOURCE_OF_OBSERVE = "verl, any `loss_mode`"


def describe_methods(name: str | None = None) -> list[dict[str, Any]]:
    """Return the facts about each built-in method and about observe, which leaves verl's loss unchanged; or about one.

    The facts are the keys of `_describe_method` and `_describe_observe`.

    Args:
        name: a method with or without the prefix `clipx_`, one of its groups, or a user's own loss as
            `package.module:name`; None for all built-in methods and observe.

    Raises:
        Refusal: there is no such method; the message names the nearest.
        ValueError: the user's own loss cannot be loaded.
    """
    if name is None:
        methods = [_describe_method(METHODS[built_in], groups_of(built_in)) for built_in in BUILT_IN]
        return [*methods, _describe_observe()]
    if ":" in name:
        return [_describe_method(load_method(name), [])]
    method = name.removeprefix("clipx_")
    if name in group_names():
        method = group_settings(name).get("method", name)
    if method == OBSERVE:
        return [_describe_observe()]
    if method not in BUILT_IN:
        hint = did_you_mean(method, {*BUILT_IN, *group_names()} - {method}).strip()
        other = "`clipx methods` lists them; a loss of your own is named as package.module:name."
        raise Refusal("clipx methods", name, "there is no such method, nor a group that chooses one", hint or other)
    return [_describe_method(METHODS[method], groups_of(method))]


def _describe_method(method: type[Method], groups: list[str]) -> dict[str, Any]:
    own = [field for name, field in parameters_of(method).items() if name not in AROUND]
    return {
        "name": method.name,
        "summary": method.summary(),
        "source": method.source,
        "module": method.__module__,
        "loss_mode": f"clipx_{method.name}",
        "groups": groups,
        "parameters": [
            *_describe_parameters(own, groups, of_every_method=False),
            *_describe_parameters(AROUND.values(), groups, of_every_method=True),
        ],
    }


def _describe_observe() -> dict[str, Any]:
    groups = groups_of(OBSERVE)
    return {
        "name": OBSERVE,
        "summary": SUMMARY_OF_OBSERVE,
        "source": SOURCE_OF_OBSERVE,
        "module": None,
        "loss_mode": None,
        "groups": groups,
        "parameters": _describe_parameters(OBSERVED.values(), groups, of_every_method=False),
    }


def _describe_parameters(
    fields: Iterable[dataclasses.Field], groups: list[str], *, of_every_method: bool
) -> list[dict[str, Any]]:
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
    """Return the cells of a parameter's row: name, value in each group, allowed values, meaning and source.

    Args:
        parameter: one of the `parameters` of `describe_methods`. If the method has no group, its default is shown.
    """
    values = list(parameter["in_groups"].values()) or [parameter["default"]]
    shown = ["null" if value is None else str(value) for value in values]
    return parameter["name"], *shown, parameter["allowed"], parameter["meaning"], parameter["source"]


def markdown_table() -> str:
    """Return the table of methods.md on the site: groups, summary, source and file of each method, and of observe."""
    rows = ["| `+clipx=` | what it does | source | file |", "|---|---|---|---|"]
    for method in describe_methods():
        if method["module"] is None:
            continue
        groups = ", ".join(f"`{group}`" for group in method["groups"])
        file = method["module"].removeprefix("verl_clipx.").replace(".", "/") + ".py"
        summary = method["summary"].rstrip(".")
        rows.append(f"| {groups} | {summary} | {method['source']} | [{file}](../verl_clipx/{file}) |")
    rows.append(f"| `{OBSERVE}` | {SUMMARY_OF_OBSERVE} | {SOURCE_OF_OBSERVE} | [metrics.md](metrics.md) |")
    return "\n".join(rows)
