"""The settings of losses that a command line of `clipx replay` lists: `+clipx=acpo clipx.alpha=1,2 +clipx=bapo …`."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.refusal import NO_VALUE, Refusal, did_you_mean
from verl_clipx.losses.configs_folder import configs_folder
from verl_clipx.losses.groups import group_names, group_settings, swap_by
from verl_clipx.losses.modifiers import MODIFIERS
from verl_clipx.run.config import Observe, Settings, build


@dataclass
class Candidate:
    """A method's group with the settings that the command line adds to it.

    Args:
        group: the name of the group that chooses the method.
        node: the group's clipx node.
        modifiers: the nodes of the modifiers' groups, by group as the command line writes it: clipx/mask=icepop.
        values: the values that the command line lists, often a single one, by key below the clipx node.
    """

    group: str
    node: dict[str, Any]
    modifiers: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[Any]] = field(default_factory=dict)

    def build_settings(self, chosen: Mapping[str, Any]) -> Settings:
        """Return the settings of the group and its modifiers, with one value for each key that the command line lists.

        Args:
            chosen: the value of each key below the clipx node. A key that is left out keeps the group's value.

        Raises:
            Refusal: a key is unknown, or a value is not allowed. The group `observe` is refused too, because it is no
                method, and so is Lopti, because its second pass cannot be computed from recorded tokens.
        """
        node = OmegaConf.create(self.node)
        for modifier in self.modifiers.values():
            node.merge_with(modifier)
        for key, value in chosen.items():
            # Even a misspelt key is added: `build` refuses it in a sentence.
            OmegaConf.update(node, key, value, force_add=True)
        settings_or_observe = build(**OmegaConf.to_container(node))
        if isinstance(settings_or_observe, Observe):
            raise Refusal(
                key=f"+{NODE}",
                value=self.group,
                reason="this group observes verl's own loss, so there is no method to compute",
                advice="Name the group of a method.",
            )
        settings = settings_or_observe
        if settings.update is not None:
            raise Refusal(
                key=f"+{NODE}/update",
                value="lopti",
                reason=(
                    "Lopti's second update pass starts from the weights that its first one leaves, which the traces of "
                    "another run do not have"
                ),
                advice="Leave Lopti out. In the traces of a run with Lopti, each pass is an update of its own.",
            )
        return settings

    def each(self) -> list[tuple[str, Settings]]:
        """Return the settings for every combination of the values, as pairs of a label and the settings.

        A label is the group followed by what the command line adds to it, such as "acpo alpha=2".

        Raises:
            Refusal: as for `build_settings`.
        """
        labelled_settings = []
        for values in itertools.product(*self.values.values()):
            chosen = dict(zip(self.values, values, strict=True))
            label_words = [self.group]
            label_words += [name.removeprefix(f"{NODE}/") for name in self.modifiers]
            label_words += [f"{key}={value}" for key, value in chosen.items()]
            labelled_settings.append((" ".join(label_words), self.build_settings(chosen)))
        return labelled_settings


def candidates_of(words: list[str]) -> list[Candidate]:
    """Return the candidates of a command line, in its order.

    Each `+clipx=<group>` begins a candidate, and the words after it add settings to this candidate. A key may have
    several values, separated by commas.

    Args:
        words: the command line's overrides, for example `+clipx=acpo` and `clipx.alpha=1,2`.

    Raises:
        ValueError: a word is no override of the clipx node, comes before any method, or names several methods or an
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
            groups = [str(value) for value in values]
            # An unknown group is refused before the number of groups is.
            nodes = [_read_group(group) for group in groups]
            if len(groups) > 1:
                raise Refusal(
                    key=word,
                    value=NO_VALUE,
                    reason="this word names several methods",
                    advice=f"Write a word for each: {swap_by('acpo')} {swap_by('bapo')}.",
                )
            candidates.append(Candidate(group=groups[0], node=nodes[0]))
            continue
        if not candidates:
            raise Refusal(
                key=word,
                value=NO_VALUE,
                reason="this setting comes before any method",
                advice=f"Name a method first, for example {swap_by('acpo')}.",
            )
        candidate = candidates[-1]
        if key.startswith(f"{NODE}/") and len(values) == 1:
            modifier = key.removeprefix(f"{NODE}/")
            candidate.modifiers[f"{key}={values[0]}"] = _read_group(f"{modifier}/{values[0]}")
        elif key.startswith(f"{NODE}."):
            candidate.values[key.removeprefix(f"{NODE}.")] = values
        else:
            raise Refusal(
                key=word,
                value=NO_VALUE,
                reason="this is not a setting of the plugin",
                advice=f"Write {swap_by('GROUP')}, +{NODE}/MODIFIER=GROUP or {NODE}.PARAMETER=VALUE.",
            )
    return candidates


def _read_group(name: str) -> dict[str, Any]:
    """Return the node of a group of the plugin.

    Args:
        name: the group's name below clipx, with the modifier's folder before it: acpo, or select/entropy.

    Raises:
        Refusal: there is no such group.
    """
    if (configs_folder() / NODE / f"{name}.yaml").is_file():
        return group_settings(name)
    folder, _, group = f"{NODE}/{name}".rpartition("/")
    if not (configs_folder() / folder).is_dir():
        hint = did_you_mean(folder, [f"{NODE}/{modifier}" for modifier in MODIFIERS], "+")
        raise Refusal(key=f"+{folder}", value=group, reason=f"there is no group {folder}", advice=hint.strip())
    hint = did_you_mean(group, group_names(folder), f"+{folder}=").strip()
    raise Refusal(
        key=f"+{folder}",
        value=group,
        reason="there is no such group",
        advice=hint or "`clipx methods` lists the methods' groups.",
    )
