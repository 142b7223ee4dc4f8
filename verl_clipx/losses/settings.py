"""The settings of a loss: a method, and the modifiers that go on top of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from verl_clipx.losses.base.method import NODE
from verl_clipx.losses.base.parameters import Parameters, only, optional, parameter, reject_unknown
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.groups import group_names
from verl_clipx.losses.methods import Method
from verl_clipx.losses.modifiers import MODIFIERS, EntropySelection, Hold, Lopti, Mask, Pull, Shaping
from verl_clipx.losses.modifiers.hold import HeldBounds, held
from verl_clipx.losses.modifiers.pull import PulledMethod, pulled


def node_parameter(key: str, kinds: tuple[type[Parameters], ...], meaning: str) -> Any:
    """Return a parameter that is a node, which its own group fills; null without that group.

    Args:
        key: the node's key under the clipx node.
        kinds: the classes of which the node may be.
        meaning: as for `parameter`.
    """
    names = " or ".join(kind.__name__ for kind in kinds)
    description = f"the parameters of {names} (choose them by a group under {NODE}/{key})"
    return parameter(None, optional(only(description, lambda value: isinstance(value, kinds))), meaning)


@dataclass(frozen=True, kw_only=True)
class LossSettings(Parameters):
    """What a loss is: a method and its modifiers.

    Raises:
        ValueError: when built with a value outside a parameter's range, or with modifiers that don't fit the method.
    """

    node: ClassVar[str] = NODE

    method: Method
    shaping: Shaping | None = node_parameter(
        "shaping", MODIFIERS["shaping"], "+clipx/shaping=advantage_reweighting or fipo"
    )
    mask: Mask | None = node_parameter(
        "mask", MODIFIERS["mask"], "+clipx/mask=opsm or icepop: takes tokens out of the objective"
    )
    select: EntropySelection | None = node_parameter(
        "select", MODIFIERS["select"], "+clipx/select=high_entropy or low_entropy"
    )
    update: Lopti | None = node_parameter("update", MODIFIERS["update"], "+clipx/update=lopti")
    hold: Hold | None = node_parameter(
        "hold",
        MODIFIERS["hold"],
        "+clipx/hold=clip_fraction or second_moment: the width of the bounds holds a target",
    )
    pull: Pull | None = node_parameter(
        "pull", MODIFIERS["pull"], "+clipx/pull=k2, k3 or k1: pulls every token to the old policy or sampler"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hold is not None and not isinstance(self.method, HeldBounds):
            object.__setattr__(self, "method", held(self.method, self.hold))
        if self.pull is not None and not isinstance(self.method, PulledMethod):
            object.__setattr__(self, "method", pulled(self.method, self.pull))

    @property
    def asks_for(self) -> tuple[str, ...]:
        """Those of `tokens.OPTIONAL` that the method or the mask needs."""
        of_mask = () if self.mask is None or "rollout_log_prob" in self.method.asks_for else ("rollout_log_prob",)
        return (*self.method.asks_for, *of_mask)

    @property
    def adaptive(self) -> bool:
        """Returns whether the bounds depend on statistics."""
        return self.method.statistics_size > 0

    @property
    def needs_entropy(self) -> bool:
        """Returns whether the loss needs the current policy's entropy."""
        return self.select is not None or "entropy" in self.method.asks_for

    @property
    def selects_over_mini_batch(self) -> bool:
        """Returns whether entropy selection needs a threshold over the mini-batch."""
        return self.select is not None and self.select.over == "mini_batch"


def built_node(node: Any, kinds: tuple[type[Parameters], ...]) -> Any:
    """Return a node as an instance of its class; null, and what is built already, as they are.

    Args:
        node: the node's values by key; where there are several classes, `rule` names one, the first without it.
        kinds: the classes of which the node may be.

    Raises:
        Refusal: the node is no node, or names another rule or parameter.
    """
    if node is None or isinstance(node, kinds):
        return node
    kind = kinds[0]
    if not isinstance(node, Mapping):
        group = kind.node.replace(".", "/")
        raise Refusal(kind.node, node, "it has a group of its own", f"Choose +{group}={', '.join(group_names(group))}.")
    given = dict(node)
    if len(kinds) > 1:
        rules = {known.rule: known for known in kinds}
        rule = given.pop("rule", kind.rule)
        if rule not in rules:
            raise Refusal(f"{kind.node}.rule", rule, f"must be one of {', '.join(rules)}")
        kind = rules[rule]
    reject_unknown(given, [field.name for field in dataclasses.fields(kind)], kind.node, kind.__name__)
    return kind(**given)
