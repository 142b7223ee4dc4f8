"""Finds where each value of a preset comes from, by the comment above it in the file that sets it last."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from verl_clipx.losses.base.method import Method
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.methods import METHODS
from verl_clipx.run.presets import SELF, PresetEntry, entry_at, file_of, settings_of

LABELS = {
    "paper": "the paper",
    "script": "the released script or code",
    "choice": "our choice, because neither the paper nor the release says",
    "method": "what connects a group of configs/clipx with verl",
    "override": "the command line, or another group on it",
}
"""Meaning of each kind of origin."""

_LABELLED = re.compile(r"\[(paper|script|choice)\] *(.+)")
_GLOBAL = "# @package _global_"


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Args:
        key: path of the value, such as data.train_batch_size.
        value: the value as written, with interpolations unresolved.
        kind: a key of LABELS; None for a value of a recipe's file whose comment has no label.
        comment: the comment above the value, without its label; for a default, the meaning of the parameter.
        file: the file that sets it, relative to the configs folder; for a default, the method's file.
    """

    key: str
    value: Any
    kind: str | None
    comment: str
    file: str


def read_origins(name: str) -> dict[str, Origin]:
    """Read where each value of a preset comes from: what its parts set, and the defaults of its method.

    Returns:
        For each key the origin of its final value. The defaults come first, then what the parts set, in the order in
        which Hydra merges them. Values of verl's own configuration are not included.

    Raises:
        FileNotFoundError: a part that the preset names does not exist.
        ValueError: a file has a defaults list or a package that this reader does not support.
    """
    origins: dict[str, Origin] = {}
    for origin in _merge_origins(f"recipe/{name}"):
        origins[origin.key] = origin
    defaults = {origin.key: origin for origin in _read_class_defaults(origins)}
    return {**defaults, **origins}


def _read_class_defaults(origins: dict[str, Origin]) -> Iterator[Origin]:
    """Yield the defaults of the preset's method, as far as its class says where they come from.

    Nothing is yielded if the preset names no method, or one that is not built in.

    Args:
        origins: what the preset sets, by key. The value of clipx.method is the method's name.
    """
    origin_of_method = origins.get("clipx.method")
    if origin_of_method is None or origin_of_method.value not in METHODS:
        return
    method = METHODS[origin_of_method.value]
    for field in fields(method):
        source = field.metadata.get("source")
        if source:
            yield Origin(
                key=f"clipx.{field.name}",
                value=field.default,
                # The sources of parameters are among the kinds of LABELS.
                kind=source,
                comment=field.metadata["meaning"],
                file=_path_of_module(method),
            )


def _path_of_module(method: type[Method]) -> str:
    """Return the path of a method's file below the folder that contains the package."""
    return f"{method.__module__.replace('.', '/')}.py"


def is_wiring(origin: Origin) -> bool:
    """Return whether a value does not affect training: a class, a copy of another key, or a fact for display only."""
    if origin.key.endswith((".paper_loss_agg_mode", ".run")):
        return True
    is_class = origin.key.endswith("_target_")
    is_copy = isinstance(origin.value, str) and origin.value.startswith("${")
    return origin.kind == "method" and (is_class or is_copy)


def mark_overridden(origin: Origin) -> Origin:
    """Return the origin of a value that the command line or another group has overridden."""
    return replace(origin, kind="override", comment=f"the preset: {origin.value} ({origin.comment})")


def groups_of(name: str) -> list[str]:
    """Return the groups of configs/clipx that a preset chooses, such as ["clipx=grpo", "clipx/update=lopti"].

    They are in the order of the preset's file.
    """
    preset, _ = _read_part(f"recipe/{name}")
    groups = []
    for entry in preset.defaults:
        if isinstance(entry, dict):
            groups += [f"{group.removeprefix('/')}={option}" for group, option in entry.items()]
    return groups


def title_of(name: str) -> str:
    """Return the first line of the comment above a preset, which names the table's row that it fills."""
    preset, _ = _read_part(f"recipe/{name}")
    return preset.title


def _merge_origins(path: str) -> Iterator[Origin]:
    """Yield what a part of a preset sets, in the order in which Hydra merges it; a later value wins."""
    part, file = _read_part(path)
    for entry in part.defaults:
        if entry != SELF:
            yield from _merge_origins(_path_of(entry, path))
            continue
        for setting in part.settings:
            kind, comment = _label(setting.comment, file)
            yield Origin(key=setting.key, value=setting.value, kind=kind, comment=comment, file=file)


def _path_of(entry: Any, path: str) -> str:
    """Return the path of the part that an entry of a defaults list names.

    Args:
        entry: from the defaults list of the part at `path`.

    Raises:
        ValueError: the entry uses a feature of Hydra that this reader does not support.
    """
    if isinstance(entry, dict) and len(entry) == 1:
        ((group, option),) = entry.items()
        entry = f"{group}/{option}"
    if not isinstance(entry, str) or " " in entry or "@" in entry:
        raise ValueError(
            f"{path}: defaults has {entry!r}; an entry must be a path or `group: option`, without Hydra's keywords "
            "(override, optional) and without @package"
        )
    return entry[1:] if entry.startswith("/") else f"{Path(path).parent}/{entry}"


@lru_cache(maxsize=1024)
def _read_part(path: str) -> tuple[PresetEntry, str]:
    """Return a part of a preset and the file that contains it: a paper's presets.yaml, or the part's own YAML file.

    Args:
        path: Hydra's path of the part, without .yaml, such as recipe/acpo/method/dapo or clipx/grpo.

    Returns:
        The part, and the file relative to the configs folder.

    Raises:
        FileNotFoundError: there is no such part.
        ValueError: the file has a wrong form; see `_read_file` and `read_presets`.
    """
    entry = entry_at(path)
    if entry is not None:
        # `entry_at` found it, so the path is recipe/<paper>/...
        _, paper, *_ = path.split("/")
        return entry, file_of(paper)
    file = f"{path}.yaml"
    return _read_file(file), file


def _read_file(file: str) -> PresetEntry:
    """Return the part of a preset that a YAML file of Hydra holds.

    Args:
        file: relative to the configs folder.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another package than _global_, or a defaults list without _self_.
    """
    path = configs_folder() / file
    if not path.is_file():
        raise FileNotFoundError(f"{file} is not in {configs_folder()}.")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != _GLOBAL:
        raise ValueError(f"{file}: its first line must be {_GLOBAL!r}.")
    # OmegaConf gives the values, as Hydra reads them. The YAML nodes give the lines of the keys, above which the
    # comments stand.
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}
    defaults = tuple(values.pop("defaults", [SELF]))
    if SELF not in defaults:
        raise ValueError(
            f"{file}: the defaults list must contain {SELF}, which says where the file's own values come in."
        )
    settings = ()
    if values:
        root = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
        settings = tuple(settings_of(root, values, lines))
    # The title is the comment on the line below the package.
    title = ""
    if len(lines) > 1 and lines[1].startswith("#"):
        title = lines[1].removeprefix("#").strip()
    return PresetEntry(title=title, defaults=defaults, settings=settings)


def _label(comment: str, file: str) -> tuple[str | None, str]:
    """Return the kind of origin that a comment names, and the comment without its label; see `Origin`."""
    match = _LABELLED.fullmatch(comment)
    if match:
        return match[1], match[2]
    kind = "method" if file.startswith("clipx/") else None
    return kind, comment
