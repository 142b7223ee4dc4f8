"""Finds where each value of a preset comes from, by the comment above it in the file or table that sets it last."""

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
from verl_clipx.run.presets import SELF, Entry, entry_at, file_of, settings_of

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
        comment: the comment above the value, without its label.
        file: the file or table that sets it, relative to the configs folder; for a default, the method's file.
    """

    key: str
    value: Any
    kind: str | None
    comment: str
    file: str


def read_origins(name: str) -> dict[str, Origin]:
    """Read what a preset sets, in the order in which Hydra merges its parts.

    Returns:
        The origin of the value that wins, by key. Values of verl's own configuration are not included.

    Raises:
        FileNotFoundError: a part that the preset names does not exist.
        ValueError: a file has a defaults list or a package that this reader does not support.
    """
    origins: dict[str, Origin] = {}
    for origin in _merged(f"recipe/{name}"):
        origins[origin.key] = origin
    return {origin.key: origin for origin in _of_class(origins)} | origins


def _of_class(origins: dict[str, Origin]) -> Iterator[Origin]:
    """The defaults of the preset's method: what its group leaves to the class."""
    chosen = origins.get("clipx.method")
    if chosen is None or chosen.value not in METHODS:
        return
    method = METHODS[chosen.value]
    for field in fields(method):
        source = field.metadata.get("source")
        if source:
            yield Origin(
                key=f"clipx.{field.name}",
                value=field.default,
                kind=source,
                comment=field.metadata["meaning"],
                file=_file_of(method),
            )


def _file_of(method: type[Method]) -> str:
    return f"{method.__module__.replace('.', '/')}.py"


def is_wiring(origin: Origin) -> bool:
    """Return whether a value does not affect training: a class, a copy of another key, or a fact for display only."""
    if origin.key.endswith((".paper_loss_agg_mode", ".run")):
        return True
    is_read_off = isinstance(origin.value, str) and origin.value.startswith("${")
    return origin.kind == "method" and (origin.key.endswith("_target_") or is_read_off)


def overridden(origin: Origin) -> Origin:
    """Return the origin of a value that the command line or another group has overridden."""
    return replace(origin, kind="override", comment=f"the preset: {origin.value} ({origin.comment})")


def groups_of(name: str) -> list[str]:
    """Return the groups of configs/clipx that a preset chooses, such as ["clipx=grpo", "clipx/update=lopti"].

    The method comes first.
    """
    groups = []
    for entry in _read(f"recipe/{name}")[0].defaults:
        if isinstance(entry, dict):
            groups += [f"{group.removeprefix('/')}={option}" for group, option in entry.items()]
    return groups


def title_of(name: str) -> str:
    """Return the first line of the comment above a preset, which names the table's row that it fills."""
    return _read(f"recipe/{name}")[0].title


def _merged(path: str) -> Iterator[Origin]:
    """Yield what a part of a preset sets, in the order in which Hydra merges it; a later value wins."""
    part, file = _read(path)
    for entry in part.defaults:
        if entry != SELF:
            yield from _merged(_path_of(entry, path))
            continue
        for setting in part.settings:
            kind, comment = _label(setting.comment, file)
            yield Origin(key=setting.key, value=setting.value, kind=kind, comment=comment, file=file)


def _path_of(entry: Any, path: str) -> str:
    """Return the path of what an entry in the defaults list of `path` names."""
    if isinstance(entry, dict) and len(entry) == 1:
        ((group, option),) = entry.items()
        entry = f"{group}/{option}"
    if not isinstance(entry, str) or " " in entry or "@" in entry:
        raise ValueError(f"{path}: defaults has {entry!r}; use a file, or group: option, without keywords or packages")
    return entry[1:] if entry.startswith("/") else f"{Path(path).parent}/{entry}"


@lru_cache(maxsize=1024)
def _read(path: str) -> tuple[Entry, str]:
    """Return a part of a preset, and the file or table that contains it, relative to the configs folder."""
    entry = entry_at(path)
    if entry is not None:
        return entry, file_of(path.split("/")[1])
    file = f"{path}.yaml"
    return _read_file(file), file


def _read_file(file: str) -> Entry:
    path = configs_folder() / file
    if not path.is_file():
        raise FileNotFoundError(f"{file} is not in {configs_folder()}.")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines or lines[0] != _GLOBAL:
        raise ValueError(f"{file}: its first line must be {_GLOBAL!r}.")
    values = OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}
    defaults = tuple(values.pop("defaults", [SELF]))
    if SELF not in defaults:
        raise ValueError(f"{file}: defaults needs {SELF}, so that the order of values is clear.")
    root = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
    head = lines[1].removeprefix("#").strip() if len(lines) > 1 else ""
    settings = tuple(settings_of(root, values, lines)) if values else ()
    return Entry(head, defaults, settings)


def _label(comment: str, file: str) -> tuple[str | None, str]:
    """Return the kind of origin that a comment names, and the comment without its label; see `Origin`."""
    match = _LABELLED.fullmatch(comment)
    if match:
        return match[1], match[2]
    kind = "method" if file.startswith("clipx/") else None
    return kind, comment
