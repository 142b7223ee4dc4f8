"""The loss settings that a command line lists: `+clipx=acpo clipx.alpha=1,2 +clipx=bapo …`."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.refusal import ABSENT, Refusal, did_you_mean
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import group_names, group_settings, swap_by
from verl_clipx.losses.modifiers import MODIFIERS
from verl_clipx.run.config import Observe, Settings, build


@dataclass
class Candidate:
    """A method's group with the settings that the command line adds to it.

    Args:
        group, node: the group that chose the method, and its clipx node.
        modifiers: from the modifiers' groups, as the command line writes them, to their nodes.
        values: from keys under the node to the values that the command line lists for them, often a single one.
    """

    group: str
    node: dict[str, Any]
    modifiers: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def settings(self, chosen: Mapping[str, Any]) -> Settings:
        """The settings with one value for each key.

        Raises:
            ValueError: an unknown key, a bad value, `observe`, or Lopti, which no single pass over tokens can show.
        """
        node = OmegaConf.create(self.node)
        for modifier in self.modifiers.values():
            node.merge_with(modifier)
        for key, value in chosen.items():
            OmegaConf.update(node, key, value, force_add=True)
        built = build(**OmegaConf.to_container(node))
        if isinstance(built, Observe):
            raise Refusal(f"+{NODE}", self.group, "observes verl's own loss and is not a method", "Name a method.")
        if built.update is not None:
            reason = "its second pass sees the weights after the first one, which a trace of another run cannot know"
            advice = "Leave it out; in the traces of a run with Lopti, each pass is an update by itself."
            raise Refusal(f"+{NODE}/update", "lopti", reason, advice)
        return built

    def each(self) -> list[tuple[str, Settings]]:
        """Returns the settings for every combination of the values, each behind its label.

        A label is the group followed by what is added to it. Raises ValueError as `settings` does.
        """
        before = [self.group, *(name.removeprefix(f"{NODE}/") for name in self.modifiers)]
        labelled = []
        for values in itertools.product(*self.values.values()):
            chosen = dict(zip(self.values, values, strict=True))
            added = [f"{key}={value}" for key, value in chosen.items()]
            labelled.append((" ".join([*before, *added]), self.settings(chosen)))
        return labelled


def candidates_of(words: list[str]) -> list[Candidate]:
    """The candidates of a command line. Each `+clipx=<group>` begins one, to which the following words add settings.

    Several values of a key, separated by commas, are swept.

    Raises:
        ValueError: a word is not an override of the clipx node, comes before any method, names several methods or an
            unknown group.
    """
    candidates: list[Candidate] = []
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise ValueError(f"{' '.join(words)}: {error}") from None
    for word, override in zip(words, overrides, strict=True):
        key = override.key_or_group
        values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
        if key == NODE:
            candidates += [Candidate(str(value), _group(str(value))) for value in values]
            if len(values) > 1:
                raise Refusal(word, ABSENT, "names several methods", f"Write {swap_by('acpo')} {swap_by('bapo')}.")
            continue
        if not candidates:
            raise Refusal(
                word, ABSENT, "comes before any method", f"Name a method first, for example {swap_by('acpo')}."
            )
        if key.startswith(f"{NODE}/") and len(values) == 1:
            name = f"{key.removeprefix(f'{NODE}/')}/{values[0]}"
            candidates[-1].modifiers[f"{key}={values[0]}"] = _group(name)
        elif key.startswith(f"{NODE}."):
            candidates[-1].values[key.removeprefix(f"{NODE}.")] = values
        else:
            advice = f"Write {swap_by('GROUP')}, +{NODE}/MODIFIER=GROUP or {NODE}.PARAMETER=VALUE."
            raise Refusal(word, ABSENT, "is not a setting of the plugin", advice)
    return candidates


def _group(name: str) -> dict[str, Any]:
    if (configs_folder() / NODE / f"{name}.yaml").is_file():
        return group_settings(name)
    folder, _, last = f"{NODE}/{name}".rpartition("/")
    if not (configs_folder() / folder).is_dir():
        hint = did_you_mean(folder, [f"{NODE}/{node}" for node in MODIFIERS], "+")
        raise Refusal(f"+{folder}", last, f"there is no group {folder}", hint.strip())
    hint = did_you_mean(last, group_names(folder), f"+{folder}=").strip()
    raise Refusal(f"+{folder}", last, "there is no such group", hint or "`clipx methods` lists the methods' groups.")
