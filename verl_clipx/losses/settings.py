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


def node_parameter(key: str, classes: tuple[type[Parameters], ...], meaning: str) -> Any:
    """Return a parameter whose value is a node of its own. A group under `clipx/KEY` sets it; the default is null.

    Args:
        key: the node's key under the clipx node.
        classes: the classes that the node may have.
        meaning: as for `parameter`.
    """
    names = " or ".join(candidate.__name__ for candidate in classes)
    description = f"the parameters of {names} (choose them by a group under {NODE}/{key})"
    return parameter(None, optional(only(description, lambda value: isinstance(value, classes))), meaning)


@dataclass(frozen=True, kw_only=True)
class LossSettings(Parameters):
    """What a loss is: a method and its modifiers.

    Raises:
        ValueError: when built with a value outside a parameter's range, or with modifiers that don't fit the method.
    """

    node_key: ClassVar[str] = NODE

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
        # `dataclasses.replace` builds the settings again, with a method that these modifiers have changed already.
        if self.hold is not None and not isinstance(self.method, HeldBounds):
            object.__setattr__(self, "method", held(self.method, self.hold))
        if self.pull is not None and not isinstance(self.method, PulledMethod):
            object.__setattr__(self, "method", pulled(self.method, self.pull))

    @property
    def asks_for(self) -> tuple[str, ...]:
        """The optional fields of the tokens (`OPTIONAL` in base/tokens.py) that the method or the mask needs."""
        fields = self.method.asks_for
        if self.mask is not None and "rollout_log_prob" not in fields:
            # Every mask compares a policy with the sampler.
            return (*fields, "rollout_log_prob")
        return fields

    @property
    def adaptive(self) -> bool:
        """Whether the bounds depend on statistics."""
        return self.method.statistics_size > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the current policy's entropy."""
        return self.select is not None or "entropy" in self.method.asks_for

    @property
    def selects_over_mini_batch(self) -> bool:
        """Whether entropy selection needs a threshold over the mini-batch."""
        return self.select is not None and self.select.over == "mini_batch"


def build_node(node: Any, classes: tuple[type[Parameters], ...]) -> Any:
    """Return an instance of one of the classes, built from a mapping. None and such an instance are returned unchanged.

    Args:
        node: None, an instance of one of the classes, or a mapping from the names of the parameters to their values.
            If there are several classes, the mapping's entry "rule" chooses the class whose attribute `rule` equals
            it. Without that entry, the first class is chosen.
        classes: the classes that the node may have; several of them differ in their `rule`.

    Raises:
        Refusal: `node` is something else, it names an unknown rule or parameter, or one of its values is not allowed.
    """
    if node is None or isinstance(node, classes):
        return node
    default_class = classes[0]
    key = default_class.node_key
    if not isinstance(node, Mapping):
        group = key.replace(".", "/")
        overrides = " or ".join(f"+{group}={name}" for name in group_names(group))
        advice = f"On the command line, write {overrides}; in Python, give its parameters as a dictionary."
        raise Refusal(key, node, "must be a node of settings, not a single value", advice)
    values = dict(node)
    chosen_class = default_class
    if len(classes) > 1:
        chosen_class = find_class_of_rule(values.pop("rule", default_class.rule), classes)
    parameters = [field.name for field in dataclasses.fields(chosen_class)]
    reject_unknown(values, parameters, key, chosen_class.__name__)
    return chosen_class(**values)


def find_class_of_rule(rule: Any, classes: tuple[type[Parameters], ...]) -> type[Parameters]:
    """Return the class whose attribute `rule` equals a rule.

    Args:
        rule: what the user wrote, of any type.
        classes: classes of the same node, each with an attribute `rule`.

    Raises:
        Refusal: no class has that rule.
    """
    for candidate in classes:
        if candidate.rule == rule:
            return candidate
    rules = ", ".join(candidate.rule for candidate in classes)
    raise Refusal(f"{classes[0].node_key}.rule", rule, f"must be one of {rules}")
