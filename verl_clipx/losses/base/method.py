"""The class of methods: parameters, clip bounds, and the gradient weight F, with dJ/dlog_prob = F * A per token."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, minimum

from verl_clipx.losses.base.metric import Metric, Over, wrong_names
from verl_clipx.losses.base.parameters import (
    LOWER_WIDTH,
    NODE,
    UPPER_WIDTH,
    VerlKey,
    number,
    optional,
    parameter,
    validate,
)
from verl_clipx.losses.base.refusal import Refusal, did_you_mean
from verl_clipx.losses.base.shared_metrics import METRICS
from verl_clipx.losses.base.tokens import Tokens
from verl_clipx.losses.base.width import Width

# Ratios saturate at a log-ratio of 42.6 in float32 (tokens.py), so that a larger clamp would clamp nothing.
LARGEST_CLAMP = 40.0

# The largest clip bound on a ratio. It refuses 29, which is 1 plus a width of 28 where 28 % was meant.
LARGEST_BOUND = 20.0

# The largest cap on a weight. It is so large that it caps nothing that occurs.
LARGEST_CAP = 1e6

# The usual ranges of clip bounds on the ratio of a token. A bound on a sequence's ratio, which stays close to 1, is
# outside them, and so is a width, such as 0.2 in place of the bound 0.8.
USUAL_LOW = (0.5, 0.99)
USUAL_HIGH = (1.01, 10.0)

# Every registered method, by its name without `clipx_`.
METHODS: dict[str, type["Method"]] = {}

# Functions that `register` calls with the name of each method that it registers.
WHEN_REGISTERED: list[Callable[[str], None]] = []


def clamp_parameter(default: float | None, meaning: str, source: str = "choice") -> Any:
    """Return the parameter `log_ratio_clamp`, beyond which a log-ratio is clamped. Arguments as for `parameter`."""
    return parameter(default, optional(number(at_least=1, at_most=LARGEST_CLAMP)), meaning, source, role="guard")


class Bounds(NamedTuple):
    """Clip bounds on the quantity that they act on, mostly the ratio itself (0.8 and 1.28, not 0.2 and 0.28).

    Attributes:
        low: lower bound; a float, or a tensor of the ratio's dtype that broadcasts to (sequences, length). On a ratio,
            which is never negative, 0 or less means no lower bound.
        high: upper bound, of the same form; ``inf`` means no upper bound.
    """

    low: Tensor | float
    high: Tensor | float

    def clip(self, ratio: Tensor) -> Tensor:
        """Return the ratio clipped to the bounds, (sequences, length). If the bounds cross, the upper one wins."""
        return ratio.clamp(min=self.low).clamp(max=self.high)

    def clipped(self, values: Tensor, advantages: Tensor) -> Tensor:
        """Return which tokens PPO clips: those above with A > 0, those below with A < 0. bool, (sequences, length)."""
        is_above = (advantages > 0) & (values > self.high)
        is_below = (advantages < 0) & (values < self.low)
        return is_above | is_below

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Return PPO's value of the loss, max(-A r, -A clip(r)), (sequences, length)."""
        return -minimum(advantages * ratio, advantages * self.clip(ratio))


@dataclass(frozen=True, kw_only=True)
class Method:
    """One policy loss: subclass it with `name=` and `source=` (paper, equation) to register another.

    A subclass is a frozen, keyword-only dataclass whose fields are made by `parameter`. The first line of its docstring
    says what it does. Its methods must not wait for the accelerator: they must not read a tensor's value on the host,
    index with a boolean mask, or branch on a value.

    Raises:
        ValueError: when built with a value outside a parameter's range. The message names key, value and what is
            allowed.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    # What is wrong with the class. It is raised where the class is used, so that a module's other methods still work.
    refused: ClassVar[ValueError | None] = None
    # Whether F may be 0 or less at ratio 1, or change with the size of A. The contract then checks neither, and the
    # announced line of a run names it.
    unconstrained_weight: ClassVar[bool] = False
    # Whether a token's weight depends on the other tokens of its sequence. On an accelerator its sums are then compiled
    # over whole sequences, and otherwise over parts of them. The result is the same.
    by_sequence: ClassVar[bool] = False
    # Whether a token's weight depends on the other sequences of its micro-batch, and so on how verl divides the batch.
    # The contract then compares it neither over micro-batches nor over sizes of the advantages.
    by_batch: ClassVar[bool] = False
    # In a subclass, any of the attributes from here on may be a property instead, if it depends on parameters.

    # Which of `tokens.OPTIONAL` the method needs.
    asks_for: ClassVar[tuple[str, ...]] = ()
    # Whether the method's ratio is to the policy that sampled, and not to that of old_log_probs.
    ratio_to_sampler: ClassVar[bool] = False
    # The spread of the ratio at which its lower bound reaches 0, so that nothing is clipped below; None: never.
    unbounded_below_from: ClassVar[float | None] = None
    # What the values are that `bounded` returns, in words.
    bounds_on: ClassVar[str] = "ratio"
    # The bounds on these values, for the description of a run: the lower one, empty for none, the upper one, and
    # equations for what is in them. A {parameter} stands for its value. Empty: parameters with the roles LOW and HIGH
    # are the bounds.
    formula: ClassVar[tuple[str, ...]] = ()
    # What the symbols in `formula` stand for, in words. A {parameter} stands for its value here too.
    symbols: ClassVar[str] = ""
    # What the bounds are a width of, so that a target can be held (`losses.modifiers.hold`); None: they can hold none.
    bounds_width: ClassVar[Width | None] = None
    # The parameters whose place a held target takes (`losses.modifiers.hold`).
    solved_parameters: ClassVar[tuple[str, ...]] = ()
    # The bound on the ratio of tokens with A < 0. A method that has one makes it a parameter. There is no annotation,
    # because it would make a field of this attribute, and that parameter would stand in its place among the fields.
    dual_clip = None
    # The declarations of what `metrics` and `over_updates` return.
    logs: ClassVar[tuple[Metric, ...]] = ()

    log_ratio_clamp: float | None = clamp_parameter(
        20.0, "log importance-sampling ratios are clamped to plus or minus this, as in verl (20); null: no clamp"
    )

    def __init_subclass__(cls, name: str | None = None, source: str = "", **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if name is not None:
            register(cls, name, source)

    def __post_init__(self) -> None:
        if self.refused is not None:
            raise self.refused
        validate(self, NODE)

    @classmethod
    def summary(cls) -> str:
        """Return the line that `clipx methods` shows, which is the first one of the docstring."""
        return (cls.__doc__ or "").split("\n")[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters, from name to value."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def roles(self) -> dict[str, str]:
        """The parameters that can limit the weight, from name to role. Guards are left out."""
        roles = {field.name: field.metadata.get("role") for field in dataclasses.fields(self)}
        return {name: role for name, role in roles.items() if role not in (None, "", "guard")}

    @property
    def limits(self) -> dict[str, str]:
        """The parameters among `roles` whose values limit the weight, from name to role.

        Null limits nothing, and neither does 0, unless it is a bound on a difference.
        """
        bounds_difference = not self.bounds_on.endswith("ratio")
        limits = {}
        for name, role in self.roles.items():
            value = getattr(self, name)
            is_bound_at_0 = value == 0 and bounds_difference and role in ("low", "high")
            if value or is_bound_at_0:
                limits[name] = role
        return limits

    @property
    def acts_at_ratio_one(self) -> bool:
        """Whether a limit, a draw or a pull acts on tokens whose ratio to the policy of old_log_probs is 1."""
        return self.ratio_to_sampler or (self.unconstrained_weight and not self.declares_limits)

    @property
    def declares_limits(self) -> bool:
        """Whether the bounds, or the roles of parameters, say what limits the weight; if not, only the weight knows."""
        return type(self).bounds is not Method.bounds or bool(self.roles)

    # Additive statistics of the tokens -> a decision -> every token's bounds. Fixed bounds do not need these.

    # The length of the statistics vector; 0 for bounds that do not depend on statistics.
    statistics_size: ClassVar[int] = 0
    # The statistics that are counts or sums of magnitudes.
    never_negative: ClassVar[slice] = slice(0)

    def statistics(self, t: Tokens) -> Tensor:
        """Return sums over the tokens in the mask: (statistics_size,), float64, additive over any split of them."""
        return t.ratio.new_zeros(0, dtype=torch.float64)

    # A second stage, for what can only be counted once the first stage's totals are known, such as deviations from a
    # mean. `decide` gets both, the first stage's before the second's.

    # The length of the second stage's vector; 0 for a method with a single stage.
    second_statistics_size: ClassVar[int] = 0

    def second_statistics(self, t: Tokens, first: Tensor) -> Tensor:
        """Return the sums of the second stage over the tokens in the mask.

        Args:
            t: the tokens.
            first: the sum of `statistics` over all tokens of the update.

        Returns:
            (second_statistics_size,), float64, additive over any split of the tokens for a given `first`.
        """
        return first.new_zeros(0)

    def decide(self, statistics: Tensor) -> Tensor:
        """Return the decision, a small float64 vector that determines the bounds of every token.

        Args:
            statistics: the sums of both stages over all tokens of the update, the first stage's before the second's.

        Returns:
            (numbers,), float64, on the statistics' device.
        """
        return statistics

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        """Return what to log of a decision. The names, and the lengths of families, do not depend on the data.

        Args:
            statistics: what `decide` was given.
            decision: what `decide` returned.

        Returns:
            From the name of a metric in `logs` to a float64 tensor: 0-d, or (members,) for a family.
        """
        return {}

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """Return what to log for a rollout batch beside the means of its updates' metrics, which verl logs.

        Args:
            metrics: from a metric's name (name/bin_0, … for the members of a family) to its value in each update.

        Returns:
            From names of the same form, which must be those of metrics in `logs`, to values.
        """
        return {}

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """Return the bounds on the values that `bounded` returns.

        Args:
            t: the tokens.
            decision: what `decide` returned.
        """
        return Bounds(0.0, math.inf)

    def bounded(self, t: Tokens) -> Tensor:
        """Return the values that the bounds act on, (sequences, length), by which regions and clips are counted."""
        return t.ratio

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Return the gradient weight F of every token, (sequences, length), in the ratio's dtype."""
        raise NotImplementedError(f"{type(self).__name__}.gradient_weight: return the gradient weight F of every token")

    def gradient(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return dJ/dlog_prob of each token, (sequences, length): F * A, unless a term has a gradient where A is 0."""
        return weight * t.advantages

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return what is logged as the loss, (sequences, length). Whatever it is, its gradient is minus `gradient`."""
        return -weight * t.advantages


def lower_bound(default: float, source: str, verl: VerlKey, *, quantity: str = "ratio", **ends: Any) -> Any:
    """Return a parameter that is the lower clip bound on a ratio; null: no bound.

    Args:
        default, source, verl: as for `parameter`.
        quantity: what is bounded, in words.
        ends: further arguments of `number`, or others than the usual ones.
    """
    allowed = optional(number(**{"at_least": 0, "at_most": 1, "usual": USUAL_LOW, **ends}))
    return parameter(default, allowed, f"lower clip bound on the {quantity}; null: no bound", source, verl, role="low")


def upper_bound(default: float, source: str, verl: VerlKey, *, quantity: str = "ratio", **ends: Any) -> Any:
    """Return a parameter that is the upper clip bound on a ratio; null: no bound. Arguments as for `lower_bound`."""
    allowed = optional(number(**{"at_least": 1, "at_most": LARGEST_BOUND, "usual": USUAL_HIGH, **ends}))
    return parameter(default, allowed, f"upper clip bound on the {quantity}; null: no bound", source, verl, role="high")


@dataclass(frozen=True, kw_only=True)
class FixedBounds(Method):
    """Methods whose clip bounds are constants."""

    # The defaults are verl's, and those of most papers.
    clip_low: float | None = lower_bound(0.8, "choice", LOWER_WIDTH)
    clip_high: float | None = upper_bound(1.2, "choice", UPPER_WIDTH)

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        low = 0.0 if self.clip_low is None else self.clip_low
        high = math.inf if self.clip_high is None else self.clip_high
        return Bounds(low, high)


@dataclass(frozen=True, kw_only=True)
class ConstantWeight(Method):
    """Methods whose weight the gradient treats as a constant, so that log_ratio_clamp never removes a gradient."""

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """Return -F A log_prob, as verl does. With F held constant, its derivative with respect to log_prob is -F A."""
        return -weight * t.advantages * t.log_prob


# verl's key of the dual clip.
DUAL_CLIP = VerlKey(("clip_ratio_c",))


def dual_clip_parameter(default: float | None, source: str) -> Any:
    """Return the parameter `dual_clip`: the bound on the ratio where A < 0 (dual-clip PPO, arXiv 1912.09729)."""
    meaning = "tokens with A < 0 and a ratio above this get no gradient; null: no dual clip"
    return limit_parameter(default, meaning, source, DUAL_CLIP, at_least=None, above=1, usual=(1.2, 20))


def limit_parameter(default: float | None, meaning: str, source: str, verl: VerlKey | None = None, **ends: Any) -> Any:
    """Return a parameter that is a limit beside the bounds, mostly a cap on the weight; null: no limit.

    Args:
        default, meaning, source, verl: as for `parameter`.
        ends: further arguments of `number`, or others than the usual ones.
    """
    allowed = optional(number(**{"at_least": 1, "at_most": LARGEST_CAP, **ends}))
    return parameter(default, allowed, meaning, source, verl, role="beside")


def require_not_above(method: Any, low: str, high: str) -> None:
    """Raise a Refusal if one of a method's parameters is above another one; null is above or below nothing.

    Args:
        method: the method.
        low: the name of the parameter that must not be above the other one.
        high: the name of that other one.
    """
    lower_value = getattr(method, low)
    higher_value = getattr(method, high)
    if lower_value is None or higher_value is None:
        return
    if lower_value > higher_value:
        raise Refusal(f"{NODE}.{low}", lower_value, f"must not be above {NODE}.{high}={higher_value:g}")


def register(method: type[Method], name: str, source: str = "") -> None:
    """Register a method under its name, which verl knows as `clipx_<name>`.

    If a module is imported again, its copy replaces the first one. If another class has the name, this one is not
    registered and cannot be built.

    Args:
        method: the method.
        name: its name.
        source: its paper and equation; empty: its module and class.
    """
    method.name = name
    method.source = source or qualified_name(method)
    method.refused = None
    mistakes = [f"{qualified_name(method)}: {sentence}. Rename it." for sentence in wrong_names(method.logs, METRICS)]
    if mistakes:
        method.refused = ValueError("\n".join(mistakes))
        return
    existing = METHODS.get(name)
    if existing is not None and qualified_name(existing) != qualified_name(method):
        method.refused = ValueError(
            f"{qualified_name(method)}: the name {name!r} already belongs to {qualified_name(existing)}. Choose "
            "another one."
        )
        return
    METHODS[name] = method
    for call_with_name in WHEN_REGISTERED:
        call_with_name(name)


def find_declarations(method: Method, values: Mapping[str, Tensor]) -> list[tuple[Metric, dict[str, Tensor]]]:
    """Return each metric of a decision with its declaration.

    Args:
        method: the method that made the decision.
        values: what `method.metrics` returned.

    Returns:
        A pair for each metric: its declaration, and a dictionary from names to 0-d tensors. A family has a name for
        each member (name/bin_0, name/bin_1, …). Any other metric has its own name alone.

    Raises:
        ValueError: a metric is not declared with `of_decision`, or its number of dimensions does not fit its
            declaration.
    """
    known = {metric.name: metric for metric in method.logs if metric.over is Over.DECISION}
    returned_by = f"{qualified_name(type(method))}.metrics returns"
    declarations = []
    for name, value in values.items():
        metric = known.get(name)
        if metric is None:
            raise ValueError(
                f"{returned_by} {name!r}, which it does not declare: add logs = (of_decision({name!r}, meaning, unit), "
                "…) to the class, with verl_clipx.of_decision."
            )
        if metric.numbered and value.ndim != 1:
            raise ValueError(
                f"{returned_by} {name!r} with {value.ndim} dimensions. It is declared as a family, by numbered=, and "
                "must have one dimension."
            )
        if not metric.numbered and value.ndim != 0:
            raise ValueError(
                f"{returned_by} {name!r} with {value.ndim} dimensions. It is declared as a single number and must have "
                "no dimension; numbered= declares a family."
            )
        if metric.numbered:
            members = {f"{name}/{metric.numbered}_{k}": member for k, member in enumerate(value.unbind())}
        else:
            members = {name: value}
        declarations.append((metric, members))
    return declarations


def qualified_name(target: Any) -> str:
    """Return a class or a function as module:name, for messages."""
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


# From a name that other frameworks give to a loss to its name here.
OTHER_NAMES = {"ppo": "grpo", "vanilla": "grpo", "ppo_clip": "grpo"}


def nearest_method(name: str, known: Iterable[str]) -> str:
    """Return a sentence that names the methods or groups that a name could mean, or an empty text.

    Args:
        name: what the user wrote, without the prefix `clipx_`.
        known: the names to choose from.
    """
    if name.lower() in OTHER_NAMES:
        return f"Did you mean +{NODE}={OTHER_NAMES[name.lower()]}?"
    return did_you_mean(name, known, f"+{NODE}=").strip()


def method_named(name: str) -> type[Method]:
    """Return the method of a name, with or without the prefix `clipx_`.

    Raises:
        Refusal: there is no such method. The message names the nearest.
    """
    method = METHODS.get(name.removeprefix("clipx_")) if isinstance(name, str) else None
    if method is None:
        hint = nearest_method(str(name).removeprefix("clipx_"), METHODS)
        raise Refusal(f"{NODE}.method", name, "there is no such method", hint or "`clipx methods` lists them.")
    return method
