"""Reads the presets, configs/recipe/<paper>/presets.yaml: the values that they and their parts set.

Any Hydra application may import this module through the plugin's configuration source, so it uses only YAML and
OmegaConf.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from verl_clipx.losses.configs_folder import configs_folder

SELF = "_self_"
FILE = "presets.yaml"
"""Name of the file with a paper's presets."""

# The sections of such a file.
_EVERY = "every_preset"
_PARTS = "parts"
_PRESETS = "presets"
# In every_preset, this stands for the preset's name.
_NAME = "<name>"


class PresetSetting(NamedTuple):
    """A value of a preset, and the comment above it.

    Attributes:
        key: the dotted key, such as data.train_batch_size.
        value: the value as it is written, with interpolations unresolved.
        comment: the comment lines directly above the value, as one text.
    """

    key: str
    value: Any
    comment: str


class PresetEntry(NamedTuple):
    """A preset, or a part of which presets are made. Hydra could read the same from a YAML file of its own.

    Attributes:
        title: the first line of the comment above the entry. A preset's title names the row of a paper's table that it
            trains.
        defaults: the entry's parts as a Hydra defaults list. Its last item, `SELF`, stands for the entry's own values.
        settings: the entry's own values.
    """

    title: str
    defaults: tuple[str | dict[str, str], ...]
    settings: tuple[PresetSetting, ...]


class Presets(NamedTuple):
    """The presets of a paper, and the parts of which they are made.

    Attributes:
        presets: the presets by name, such as countdown_3b_acpo_near.
        parts: the parts by name, such as method/dapo.
    """

    presets: Mapping[str, PresetEntry]
    parts: Mapping[str, PresetEntry]


def papers() -> list[str]:
    """Return the folders of configs/recipe with presets, in alphabetical order."""
    return sorted(path.parent.name for path in (configs_folder() / "recipe").glob(f"*/{FILE}"))


def preset_names() -> list[str]:
    """Return the names of all presets, such as acpo/countdown_3b_acpo_near, in alphabetical order."""
    return sorted(f"{paper}/{name}" for paper in papers() for name in read_presets(paper).presets)


def file_of(paper: str) -> str:
    """Return the path of the file with a paper's presets, relative to the configs folder."""
    return f"recipe/{paper}/{FILE}"


def read_presets(paper: str) -> Presets:
    """Read a paper's presets.

    Raises:
        FileNotFoundError: the folder has no such file.
        ValueError: an entry has a wrong form; the message names file and entry.
    """
    return _read(configs_folder() / file_of(paper), paper)


def entry_at(path: str) -> PresetEntry | None:
    """Return the preset or the part at a path of Hydra's, such as recipe/acpo/method/dapo; None if there is none."""
    group, _, rest = path.partition("/")
    paper, _, name = rest.partition("/")
    if group != "recipe" or not name or not (configs_folder() / file_of(paper)).is_file():
        return None
    of_paper = read_presets(paper)
    return of_paper.presets.get(name) or of_paper.parts.get(name)


def settings_of(
    node: yaml.MappingNode, values: Mapping[str, Any], lines: list[str], prefix: str = ""
) -> Iterator[PresetSetting]:
    """Yield the values in a mapping of a YAML file, each with the comment above it.

    Args:
        node: the mapping as a node of YAML's, which knows the line of each key.
        values: the same mapping as Hydra's loader reads it, because plain YAML would read 1e-6 as text. Keys that are
            not in `values` are left out.
        lines: the file's lines, which have the comments.
        prefix: what stands before each key, with a dot at its end; empty for the whole configuration.
    """
    for key, value in node.value:
        if key.value not in values:
            continue
        path = f"{prefix}{key.value}"
        content = values[key.value]
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from settings_of(value, content, lines, f"{path}.")
        else:
            yield PresetSetting(path, content, " ".join(_comment_lines(lines, key)))


def _comment_lines(lines: list[str], key: yaml.Node) -> list[str]:
    """Return the comment lines directly above a key, without their marks."""
    line_of_key = key.start_mark.line
    first_line = line_of_key
    while first_line > 0 and lines[first_line - 1].lstrip().startswith("#"):
        first_line -= 1
    return [line.strip().removeprefix("#").strip() for line in lines[first_line:line_of_key]]


class _File(NamedTuple):
    """The content of a file of presets.

    Attributes:
        path: the path of the file.
        paper: the name of the file's folder.
        values: the sections by name, as Hydra's loader reads them.
        sections: the sections by name, as nodes of YAML's, which know the line of each key.
        lines: the file's lines, which have the comments.
    """

    path: Path
    paper: str
    values: Mapping[str, Any]
    sections: Mapping[str, yaml.MappingNode]
    lines: list[str]

    def check_sections(self) -> None:
        """Raise a ValueError if a section is unknown or has a wrong form, or if there are no presets."""
        unknown = [str(name) for name in self.values if name not in (_EVERY, _PARTS, _PRESETS)]
        if unknown:
            raise ValueError(f"{self.path}: {', '.join(unknown)}: use {_EVERY}, {_PARTS} and {_PRESETS}.")
        if _PRESETS not in self.values:
            raise ValueError(f"{self.path}: it has no {_PRESETS}.")
        for name in self.values:
            content = self.values[name]
            if not isinstance(content, dict):
                raise ValueError(f"{self.path}: {name}: must be a mapping.")
            for key in content:
                if not isinstance(key, str):
                    raise ValueError(f"{self.path}: {name}: {key}: must be a text. Put it in quotation marks.")

    def read_part(self, key: yaml.ScalarNode, node: yaml.Node) -> PresetEntry:
        """Read an entry of `parts`.

        Args:
            key, node: the entry's name and its content as nodes of YAML's, which know the lines of its comments.
        """
        content = self.values[_PARTS][key.value]
        where = f"{self.path}: {_PARTS}: {key.value}"
        if not isinstance(content, dict):
            raise ValueError(f"{where}: must be a mapping of keys to values.")
        self.check_no_file(where, key.value)
        return PresetEntry(self.read_title(key), (SELF,), tuple(settings_of(node, content, self.lines)))

    def read_preset(self, key: yaml.ScalarNode, node: yaml.Node) -> PresetEntry:
        """Read an entry of `presets`; the arguments are those of `read_part`."""
        items = self.values[_PRESETS][key.value]
        where = f"{self.path}: {_PRESETS}: {key.value}"
        if not isinstance(items, list):
            raise ValueError(f"{where}: must be a list of parts.")
        self.check_no_file(where, key.value)
        settings = self.settings_of_every_preset(key.value)
        inherited_count = len(settings)
        defaults: list[str | dict[str, str]] = []
        for item, item_node in zip(items, node.value, strict=True):
            if isinstance(item, dict):
                settings += settings_of(item_node, item, self.lines)
            elif not isinstance(item, str):
                raise ValueError(f"{where}: {item}: must be a part or a value.")
            elif len(settings) > inherited_count:
                raise ValueError(
                    f"{where}: {item} comes after a value. Values must come last, because Hydra merges them last."
                )
            else:
                defaults.append(self.default_of(item))
        return PresetEntry(self.read_title(key), (*defaults, SELF), tuple(settings))

    def check_no_file(self, where: str, name: str) -> None:
        """Raise a ValueError if the folder also has a YAML file with the name of an entry.

        Args:
            where: the file and the entry, with which the message begins.
            name: the name of the entry.
        """
        if (self.path.parent / f"{name}.yaml").is_file():
            raise ValueError(f"{where}: the folder has a file {name}.yaml too. Keep one of the two.")

    def read_title(self, key: yaml.ScalarNode) -> str:
        """Return the first line of the comment above an entry; empty if there is no comment."""
        return next(iter(_comment_lines(self.lines, key)), "")

    def settings_of_every_preset(self, name: str) -> list[PresetSetting]:
        """Return the values of the section `every_preset`, with a preset's name in place of <name>."""
        if _EVERY not in self.values:
            return []
        settings = settings_of(self.sections[_EVERY], self.values[_EVERY], self.lines)
        return [setting._replace(value=name) if setting.value == _NAME else setting for setting in settings]

    def default_of(self, item: str) -> str | dict[str, str]:
        """Return a part of a preset, such as clipx=acpo or task/countdown_3b, as an item of a Hydra defaults list."""
        if "=" in item:
            group, _, option = item.partition("=")
            return {f"/{group}": option}
        if item.startswith("/"):
            return item
        return f"/recipe/{self.paper}/{item}"


@lru_cache(maxsize=32)
def _read(path: Path, paper: str) -> Presets:
    text = path.read_text(encoding="utf-8")
    file = _File(
        path=path,
        paper=paper,
        values=OmegaConf.to_container(OmegaConf.create(text), resolve=False),
        sections={key.value: node for key, node in yaml.compose(text, Loader=yaml.CSafeLoader).value},
        lines=text.splitlines(),
    )
    file.check_sections()
    parts = file.sections[_PARTS].value if _PARTS in file.sections else ()
    return Presets(
        presets={key.value: file.read_preset(key, node) for key, node in file.sections[_PRESETS].value},
        parts={key.value: file.read_part(key, node) for key, node in parts},
    )
