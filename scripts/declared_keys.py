"""Writes verl_clipx/run/declared_keys.json: the keys that verl and the plugin declare, and the texts that each takes.

    python scripts/declared_keys.py

A run's record keeps the numbers of declared keys, and the texts that are listed here; of other texts it keeps a hash.
Sources are verl's composed configurations with their defaults, the dataclasses that these name, verl's registries and
enumerations, `keys.CHOICES`, and the groups and parameters of the plugin. Keys of an earlier file stay: an older verl
has them.
"""

import dataclasses
import importlib
import json
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_clipx.analysis.runs.sameness import resolve_value
from verl_clipx.losses.base.parameters import NODE
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.methods import METHODS
from verl_clipx.run import keys
from verl_clipx.run.config import AROUND, NODES, OBSERVED, parameters_of
from verl_clipx.run.kept_values import TABLE

Declared = tuple[set[str], dict[str, set[str]]]
"""The keys that take numbers, and from every declared key to the texts that it takes."""

# Of a mandatory value.
OPEN = "???"
# The default of a text that has none.
TEXT = ""


def declared() -> Declared:
    """Returns what the installed verl and the plugin declare."""
    numbers: set[str] = set()
    texts: dict[str, set[str]] = defaultdict(set)
    for key, default in every_default():
        values = [value for value in (default if isinstance(default, list) else [default]) if not is_open(value)]
        words = {value for value in values if isinstance(value, str)}
        texts[key] |= words
        if not words:
            numbers.add(key)
    for key, choices in registries().items():
        texts[key] |= choices
    for key in spelled():
        texts.setdefault(key, set())
        # The installed verl may lack the key, and with it the dataclass that says that it takes texts alone.
        if not any(fnmatchcase(key, pattern) for pattern in keys.CHOICES):
            numbers.add(key)
    # By its dataclass, such a key takes texts alone, although its default is null, or a row of `run/keys.py` names it.
    numbers -= {key for key, words in texts.items() if TEXT in words}
    for pattern, choices in keys.CHOICES.items():
        known = [key for key in texts if fnmatchcase(key, pattern)]
        for key in known or [pattern]:
            texts[key] |= {*choices}
    return numbers, texts


def is_open(value: Any) -> bool:
    """Returns whether a default says nothing: it is mandatory, or refers to what is not in its file."""
    return isinstance(value, str) and (value == OPEN or "${" in value)


def every_default() -> Iterator[tuple[str, Any]]:
    """Yields the keys of verl's configurations, of their dataclasses, and of the plugin's groups, with defaults."""
    folder = Path(find_spec("verl").origin).parent
    files = [
        *sorted(folder.glob("trainer/config/_generated_ppo_*.yaml")),
        folder / "trainer/config/legacy_reward_impl.yaml",
        *sorted(folder.glob("experimental/*/config/*.yaml")),
        *sorted((configs_folder() / "clipx").rglob("*.yaml")),
        *sorted((configs_folder() / "hardware").rglob("*.yaml")),
    ]
    for file in files:
        config = OmegaConf.load(file)
        for name in ("hydra", "defaults"):
            config.pop(name, None)
        yield from defaults_in(config)
    yield from parameters()


def defaults_in(config: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a configuration with their values, and the fields of the dataclasses that it names."""
    leaves = keys.flat(OmegaConf.to_container(config))
    for key, text in leaves.items():
        if key.startswith(keys.OF_THE_PLUGIN):
            continue
        value = resolve_value(config, key, text)
        if OmegaConf.is_dict(value):
            # Of a node that is a copy of another one.
            parts = keys.flat(OmegaConf.to_container(value))
            yield from ((f"{key}.{part}", resolve_value(value, part, default)) for part, default in parts.items())
        elif not OmegaConf.is_config(value):
            yield key, value
        if key.endswith("._target_") and str(text).startswith("verl."):
            module, _, name = str(text).rpartition(".")
            yield from fields_of(getattr(importlib.import_module(module), name), key.removesuffix("._target_"))


def fields_of(kind: type, node: str) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a dataclass that are plain values, and those of its nodes, with defaults and literals."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key, hint = f"{node}.{field.name}", hints[field.name]
        if field.name == "_target_":
            continue
        parts = [hint, *typing.get_args(hint)]
        nested = next((part for part in parts if dataclasses.is_dataclass(part)), None)
        if nested is not None:
            yield from fields_of(nested, key)
            continue
        if any(part is dict or typing.get_origin(part) is dict for part in parts):
            continue
        for part in parts:
            if typing.get_origin(part) is typing.Literal:
                yield from ((key, choice) for choice in typing.get_args(part))
        if str in parts and not {int, float, bool} & {*parts}:
            yield key, TEXT
        default = field.default
        if default is None or isinstance(default, bool | int | float | str):
            yield key, default


def parameters() -> Iterator[tuple[str, Any]]:
    """Yields the keys of the clipx node with their defaults and choices."""
    fields = [(NODE, field) for method in METHODS.values() for field in parameters_of(method).values()]
    fields += [(NODE, field) for field in (*AROUND.values(), *OBSERVED.values())]
    for name, kinds in NODES.items():
        fields += [(f"{NODE}.{name}", field) for kind in kinds for field in dataclasses.fields(kind)]
        if len(kinds) > 1:
            yield f"{NODE}.{name}.rule", [kind.rule for kind in kinds]
    for node, field in fields:
        allowed = field.metadata.get("allowed")
        if node == NODE and field.name in NODES:
            continue
        yield f"{node}.{field.name}", field.default
        if allowed is not None and allowed.choices:
            yield f"{node}.{field.name}", [*allowed.choices]


def registries() -> dict[str, set[str]]:
    """Returns from keys to the names in verl's registries and enumerations."""
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
    from verl.utils.tracking import Tracking

    return {
        keys.ESTIMATOR: {estimator.value for estimator in AdvantageEstimator},
        keys.DISTILLATION_LOSS: {*DISTILLATION_LOSS_REGISTRY},
        keys.ROLLOUT_RS: {*SUPPORTED_ROLLOUT_RS_OPTIONS},
        keys.LOGGERS: {*Tracking.supported_backend},
    }


def spelled() -> Iterator[str]:
    """Yields the keys that `run/keys.py` gives a name or a row, without those of nodes and of paths."""
    for key in keys.ROWS:
        if not any(other.startswith(f"{key}.") for other in keys.ROWS):
            yield key
    yield keys.SYNC_STEP


def content(numbers: set[str], texts: Mapping[str, set[str]]) -> str:
    """Returns the table as its file has it: a key a line."""
    lines = []
    for key in sorted(texts):
        entry: dict[str, Any] = {"numbers": True} if key in numbers else {}
        words = sorted(texts[key] - {TEXT})
        if words:
            entry["texts"] = words
        lines.append(f"{json.dumps(key)}: {json.dumps(entry)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Writes the table, with what an earlier one has."""
    numbers, texts = declared()
    if TABLE.exists():
        for key, entry in json.loads(TABLE.read_text(encoding="utf-8")).items():
            texts[key] |= {*entry.get("texts", ())}
            if entry.get("numbers"):
                numbers.add(key)
    TABLE.write_text(content(numbers, texts), encoding="utf-8")


if __name__ == "__main__":
    main()
