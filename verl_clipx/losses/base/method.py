"""The class of methods: parameters, bounds on the ratio, gradient weight F; dJ/dlog_prob = F * A per token."""

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

# The largest clip bound on a ratio: 29, of a width of 28 where 28 % was meant, is above it. null means no bound.
LARGEST_BOUND = 20.0

# The largest cap on a weight, at which nothing is capped.
LARGEST_CAP = 1e6

# Clip bounds on the ratio of a token. Those on a sequence's ratio, which stays close to 1, would be unusual here, and
# so would 0.2 for 0.8.
USUAL_LOW = (0.5, 0.99)
USUAL_HIGH = (1.01, 10.0)

METHODS: dict[str, type["Method"]] = {}

# Called with the name of each method that is registered from now on.
WHEN_REGISTERED: list[Callable[[str], None]] = []


def clamp_parameter(default: float | None, meaning: str, source: str = "choice") -> Any:
    """The magnitude beyond which a log-ratio is clamped, `log_ratio_clamp`; the arguments are as for `parameter`."""
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
        """The ratio clipped to the bounds, (sequences, length). If the bounds cross, the upper one wins."""
        return ratio.clamp(min=self.low).clamp(max=self.high)

    def clipped(self, values: Tensor, advantages: Tensor) -> Tensor:
        """Returns the tokens that PPO clips, above with A > 0 and below with A < 0: bool, (sequences, length)."""
        return ((advantages > 0) & (values > self.high)) | ((advantages < 0) & (values < self.low))

    def surrogate(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """PPO's value of the loss, max(-A r, -A clip(r)), (sequences, length)."""
        return -minimum(advantages * ratio, advantages * self.clip(ratio))


@dataclass(frozen=True, kw_only=True)
class Method:
    """One policy loss: subclass it with `name=` and `source=` (paper, equation) to register another.

    A subclass is a frozen, keyword-only dataclass whose fields are made by `parameter`. The first line of its docstring
    says what it does. Its methods must not wait for the accelerator: they must not read a tensor's value on the host,
    index with a boolean mask, or branch on a value.

    Raises:
        ValueError: when built with a value outside a parameter's range; names key, value and what is allowed.
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
    # Here and below, a class attribute becomes a property where it depends on parameters.
    # Those of `tokens.OPTIONAL` that the method needs.
    asks_for: ClassVar[tuple[str, ...]] = ()
    # Whether the method's ratio is to the policy that sampled, and not to that of old_log_probs.
    ratio_to_sampler: ClassVar[bool] = False
    # The spread of the ratio at which its lower bound reaches 0, so that nothing is clipped below; None: never.
    unbounded_below_from: ClassVar[float | None] = None
    # What `bounded` returns. Where parameters with the roles LOW and HIGH do not say the bounds on it: the lower one,
    # empty for none, the upper one, and equations for what is in them. A {parameter} stands for its value.
    bounds_on: ClassVar[str] = "ratio"
    formula: ClassVar[tuple[str, ...]] = ()
    # What the symbols in `formula` stand for, in words. A {parameter} stands for its value here too.
    symbols: ClassVar[str] = ""
    # What the bounds are a width of, so that a target can be held (`losses.modifiers.hold`); None: they can hold none.
    bounds_width: ClassVar[Width | None] = None
    # The parameters whose place a held target takes (`losses.modifiers.hold`).
    solved_parameters: ClassVar[tuple[str, ...]] = ()
    # The bound on the ratio of tokens with A < 0. A method that has one makes it a parameter; no annotation here, which
    # would give that parameter this place.
    dual_clip = None
    # What `metrics` and `over_updates` return, declared.
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
        """One line for `clipx methods`."""
        return (cls.__doc__ or "").split("\n")[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameter name to value."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def roles(self) -> dict[str, str]:
        """The parameters that can limit the weight, with their roles, guards apart."""
        roles = {field.name: field.metadata.get("role") for field in dataclasses.fields(self)}
        return {name: role for name, role in roles.items() if role not in (None, "", "guard")}

    @property
    def limits(self) -> dict[str, str]:
        """Returns those of `roles` that limit the weight as they are set.

        Null limits nothing, and neither does 0, unless it bounds a difference.
        """
        of_difference = () if self.bounds_on.endswith("ratio") else ("low", "high")
        return {
            name: role
            for name, role in self.roles.items()
            if (value := getattr(self, name)) or (value == 0 and role in of_difference)
        }

    @property
    def acts_at_ratio_one(self) -> bool:
        """Returns whether something of it acts on tokens whose ratio to the policy of old_log_probs is 1."""
        return self.ratio_to_sampler or (self.unconstrained_weight and not self.declares_limits)

    @property
    def declares_limits(self) -> bool:
        """Returns whether bounds, or roles of parameters, say what limits the weight; else only the weight knows."""
        return type(self).bounds is not Method.bounds or bool(self.roles)

    # Additive statistics of the tokens -> a decision -> every token's bounds. Fixed bounds do not need these.

    # Length of the statistics vector; 0 for bounds that do not depend on statistics.
    statistics_size: ClassVar[int] = 0
    # Which of the statistics are counts or sums of magnitudes.
    never_negative: ClassVar[slice] = slice(0)

    def statistics(self, t: Tokens) -> Tensor:
        """Sums over the tokens in the mask: (statistics_size,), float64, additive over any split of the tokens."""
        return t.ratio.new_zeros(0, dtype=torch.float64)

    # A second stage, for what can only be counted once the first stage's totals are known, such as deviations from a
    # mean. `decide` gets both, the first stage's before the second's.

    # Length of the second stage's vector; 0 for a method with a single stage.
    second_statistics_size: ClassVar[int] = 0

    def second_statistics(self, t: Tokens, first: Tensor) -> Tensor:
        """Sums over the tokens in the mask: (second_statistics_size,), float64, additive for a given `first`.

        Args:
            first: the sum of `statistics` over all tokens.
        """
        return first.new_zeros(0)

    def decide(self, statistics: Tensor) -> Tensor:
        """A small float64 vector, on the statistics' device, that determines the bounds of every token."""
        return statistics

    def metrics(self, statistics: Tensor, decision: Tensor) -> dict[str, Tensor]:
        """Returns what to log of a decision: by a name in `logs` a 0-d float64 tensor, or a 1-d one for a family.

        The names and the lengths don't depend on the data.
        """
        return {}

    def over_updates(self, metrics: dict[str, list[float]]) -> dict[str, float]:
        """Returns what to log for a rollout batch beside the means of its updates' metrics, which verl logs.

        Args:
            metrics: from a metric's name (name/bin_0, … for the members of a family) to its value in each update.

        Returns:
            From names of the same form, which must be those of metrics in `logs`, to values.
        """
        return {}

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        """The lower and upper bound on the values that `bounded` returns."""
        return Bounds(0.0, math.inf)

    def bounded(self, t: Tokens) -> Tensor:
        """The values that the bounds act on, (sequences, length). Regions and clip fractions are counted by them."""
        return t.ratio

    def gradient_weight(self, t: Tokens, bounds: Bounds) -> Tensor:
        """Gradient weight F, (sequences, length), in the ratio's dtype."""
        raise NotImplementedError(f"{type(self).__name__}.gradient_weight: return the gradient weight F of every token")

    def gradient(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """dJ/dlog_prob of each token, (sequences, length): F * A, unless a term has a gradient where A is 0."""
        return weight * t.advantages

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """The value that is logged as the loss, (sequences, length). Its gradient is always minus `gradient`."""
        return -weight * t.advantages


def lower_bound(default: float, source: str, verl: VerlKey, *, of: str = "ratio", **ends: Any) -> Any:
    """The lower clip bound on a ratio; null: no bound. The arguments are as for `parameter` and `number`."""
    allowed = optional(number(**{"at_least": 0, "at_most": 1, "usual": USUAL_LOW, **ends}))
    return parameter(default, allowed, f"lower clip bound on the {of}; null: no bound", source, verl, role="low")


def upper_bound(default: float, source: str, verl: VerlKey, *, of: str = "ratio", **ends: Any) -> Any:
    """The upper clip bound on a ratio; as `lower_bound`."""
    allowed = optional(number(**{"at_least": 1, "at_most": LARGEST_BOUND, "usual": USUAL_HIGH, **ends}))
    return parameter(default, allowed, f"upper clip bound on the {of}; null: no bound", source, verl, role="high")


@dataclass(frozen=True, kw_only=True)
class FixedBounds(Method):
    """Methods whose clip bounds are constants."""

    # The defaults are verl's, and those of most papers.
    clip_low: float | None = lower_bound(0.8, "choice", LOWER_WIDTH)
    clip_high: float | None = upper_bound(1.2, "choice", UPPER_WIDTH)

    def bounds(self, t: Tokens, decision: Tensor) -> Bounds:
        return Bounds(self.clip_low or 0.0, math.inf if self.clip_high is None else self.clip_high)


@dataclass(frozen=True, kw_only=True)
class ConstantWeight(Method):
    """Methods whose weight the gradient treats as a constant, so that log_ratio_clamp never removes a gradient."""

    def loss_value(self, t: Tokens, bounds: Bounds, weight: Tensor) -> Tensor:
        """-F A log_prob, whose derivative with F held constant is -F A, as in verl."""
        return -weight * t.advantages * t.log_prob


DUAL_CLIP = VerlKey(("clip_ratio_c",))


def dual_clip_parameter(default: float | None, source: str) -> Any:
    """The bound on the ratio of tokens with negative advantages (dual-clip PPO, arXiv 1912.09729)."""
    meaning = "tokens with A < 0 and a ratio above this get no gradient; null: no dual clip"
    return limit_parameter(default, meaning, source, DUAL_CLIP, at_least=None, above=1, usual=(1.2, 20))


def limit_parameter(default: float | None, meaning: str, source: str, verl: VerlKey | None = None, **ends: Any) -> Any:
    """A limit beside the bounds, mostly a cap on the weight; null: no limit. As for `parameter` and `number`."""
    allowed = optional(number(**{"at_least": 1, "at_most": LARGEST_CAP, **ends}))
    return parameter(default, allowed, meaning, source, verl, role="beside")


def not_above(method: Any, low: str, high: str) -> None:
    """Raises a Refusal if a method's parameter `low` is above its parameter `high`; null is above or below nothing."""
    first = getattr(method, low)
    second = getattr(method, high)
    if first is not None and second is not None and first > second:
        raise Refusal(f"{NODE}.{low}", first, f"must not be above {NODE}.{high}={second:g}")


def register(method: type[Method], name: str, source: str = "") -> None:
    """Registers a method under its name, which verl knows as `clipx_<name>`; source: paper and equation.

    If a module is imported again, its copy replaces the first one. If another class has the name, this one is not
    registered and cannot be built.
    """
    method.name = name
    method.source = source or qualified_name(method)
    method.refused = None
    wrong = [f"{qualified_name(method)}: {sentence}. Rename it." for sentence in wrong_names(method.logs, METRICS)]
    if wrong:
        method.refused = ValueError("\n".join(wrong))
        return
    existing = METHODS.get(name)
    if existing is not None and qualified_name(existing) != qualified_name(method):
        method.refused = ValueError(
            f"{qualified_name(method)}: the name {name!r} already belongs to {qualified_name(existing)}. Choose "
            "another one."
        )
        return
    METHODS[name] = method
    for follow in WHEN_REGISTERED:
        follow(name)


def find_declarations(method: Method, values: Mapping[str, Tensor]) -> list[tuple[Metric, dict[str, Tensor]]]:
    """Returns the declaration of each metric of a decision, with its members: from their names to 0-d tensors.

    Args:
        values: by a metric's name; 0-d, or 1-d for a family.

    Raises:
        ValueError: a metric is not declared with `of_decision`, or is a family and was declared as a number.
    """
    known = {metric.name: metric for metric in method.logs if metric.over is Over.DECISION}
    declarations = []
    for name, value in values.items():
        metric = known.get(name)
        if metric is None:
            raise ValueError(
                f"{qualified_name(type(method))}.metrics returns {name!r}, which it does not declare: add "
                f"logs = (of_decision({name!r}, meaning, unit), …) to the class, with verl_clipx.of_decision."
            )
        if value.ndim != bool(metric.numbered):
            raise ValueError(
                f"{qualified_name(type(method))}.metrics returns {name!r} with {value.ndim} dimensions. A metric must "
                "have no dimension; a family, which numbered= declares, must have one."
            )
        members = {name: value}
        if metric.numbered:
            members = {f"{name}/{metric.numbered}_{k}": one for k, one in enumerate(value.unbind())}
        declarations.append((metric, members))
    return declarations


def qualified_name(target: Any) -> str:
    """A class or a function as module:name, for messages."""
    return f"{getattr(target, '__module__', '?')}:{getattr(target, '__qualname__', repr(target))}"


# Usual names of losses that are here under another one.
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
    """The method of that name, with or without the prefix `clipx_`.

    Raises:
        Refusal: there is none; names the nearest.
    """
    method = METHODS.get(name.removeprefix("clipx_")) if isinstance(name, str) else None
    if method is None:
        hint = nearest_method(str(name).removeprefix("clipx_"), METHODS)
        raise Refusal(f"{NODE}.method", name, "there is no such method", hint or "`clipx methods` lists them.")
    return method
