"""The configuration of what goes on top of a method: token shaping, token selection, Lopti's update."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from verl_clipx.training.parameters import (
    Allowed,
    boolean,
    choice,
    number,
    optional,
    parameter,
    reject_unknown,
    validate,
)


@dataclass(frozen=True, kw_only=True)
class AdvantageReweightingConfig:
    """Advantage Reweighting: advantages times alpha * probability + 1 - alpha (AR-Lopti, Eq. 4)."""

    node: ClassVar[str] = "clipx.shaping"

    alpha: float = parameter(
        0.3, number(at_least=0, at_most=1), "how much a low probability shrinks a token's advantage"
    )
    probability: str = parameter(
        "old",
        choice("old", "current"),
        "the policy whose token probability it is: old (Algorithm 1, the release) or current (Eq. 4 as printed)",
    )

    def __post_init__(self):
        validate(self, self.node)


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Entropy selection: only the tokens of highest or lowest entropy of the current policy have a gradient."""

    node: ClassVar[str] = "clipx.select"

    keep: str = parameter(
        "highest", choice("highest", "lowest"), "the tokens that are kept: of highest or lowest entropy"
    )
    ratio: float = parameter(0.2, number(at_least=1e-6, at_most=1), "the share of the tokens that is kept")
    over: str = parameter(
        "sequence",
        choice("sequence", "mini_batch"),
        "where the share is taken: in each sequence, or over the optimizer mini-batch and all ranks (Wang et al.)",
    )
    normaliser: str = parameter(
        "selected",
        choice("selected", "all"),
        "the tokens that the loss is averaged over: the selected ones (release) or all",
    )

    def __post_init__(self):
        validate(self, self.node)


@dataclass(frozen=True, kw_only=True)
class LoptiConfig:
    """Lopti: two passes over the rollout batch, each updating on its own group of tokens (AR-Lopti, Algorithm 1)."""

    node: ClassVar[str] = "clipx.update"

    eta: float = parameter(
        0.5, number(at_least=1e-6, at_most=1), "tokens whose old probability is at most this are low-probability tokens"
    )
    equal: bool = parameter(True, boolean(), "whether a probability equal to eta is low (paper) or not (release)")
    order: str = parameter(
        "low_first", choice("low_first", "high_first"), "the group that is updated first (paper: low_first)"
    )
    quantile: float | None = parameter(
        None,
        optional(number(at_least=1e-6, at_most=1)),
        "eta is the probability below which this share of the rollout batch's tokens lies; null: eta as given",
    )

    def __post_init__(self):
        validate(self, self.node)

    @property
    def passes(self) -> tuple[str, str]:
        """The names of the passes in their order."""
        return ("low", "high") if self.order == "low_first" else ("high", "low")


def instance(kind: type) -> Allowed:
    """An instance of a modifier's configuration."""

    def convert(value: Any) -> Any:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return Allowed(f"the parameters of {kind.__name__} (choose them by a group under {kind.node})", convert)


MODIFIERS = {"shaping": AdvantageReweightingConfig, "select": SelectionConfig, "update": LoptiConfig}


def build_modifiers(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the modifiers among a clipx node's entries.

    Args:
        parameters: entries of the clipx node by name.

    Returns:
        The same entries, with the modifiers' nodes replaced by their configurations.

    Raises:
        ValueError: an unknown key or a bad value in a modifier's node; the message names it.
    """
    built = dict(parameters)
    for name, kind in MODIFIERS.items():
        node = built.get(name)
        if node is None or isinstance(node, kind):
            continue
        if not isinstance(node, Mapping):
            raise ValueError(f"{kind.node}={node!r}: choose a group, for example +{kind.node.replace('.', '/')}=...")
        reject_unknown(node, [field.name for field in fields(kind)], kind.node, kind.__name__)
        built[name] = kind(**node)
    return built
