"""The clipx node of a run: its loss, and what the run adds to it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from verl_clipx.losses.applying.compiled import TokenFunctions, token_functions
from verl_clipx.losses.applying.user_method import load_method
from verl_clipx.losses.base.method import NODE, Bounds
from verl_clipx.losses.base.parameters import Parameters, boolean, choice, only, optional, parameter, reject_unknown
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.groups import OBSERVE, swap_by
from verl_clipx.losses.methods import METHODS, Method, method_named
from verl_clipx.losses.modifiers import MODIFIERS
from verl_clipx.losses.settings import LossSettings, build_node, node_parameter
from verl_clipx.run.trace import Trace

# From the keys under the clipx node that have groups of their own to the classes of their nodes.
NODES = {**MODIFIERS, "trace": (Trace,)}


@dataclass(frozen=True, kw_only=True)
class Node(Parameters):
    """The clipx node as far as it does not depend on the loss: what is logged, watched and traced.

    Raises:
        ValueError: when built with a value outside a parameter's range.
    """

    node: ClassVar[str] = NODE
    # Whether the run trains a method of the plugin, and not verl's own loss.
    trains: ClassVar[bool] = True

    health: str = parameter(
        "warn",
        choice("warn", "stop"),
        "what happens if updates are skipped or values are not finite: warn (once for each) or stop the run; that the "
        "reward, the entropy or another trend looks bad only warns",
    )
    log: bool = parameter(
        True,
        boolean(),
        "whether the run keeps a log that goes on where it resumes, and a record: trainer.logger's file, or else one "
        "in trainer.default_local_dir",
    )
    trace: Trace | None = node_parameter("trace", NODES["trace"], "+clipx/trace=prompts")


@dataclass(frozen=True, kw_only=True)
class RunSettings(Node):
    """What a run that trains a method of the plugin adds to its loss.

    Raises:
        ValueError: when built with a value outside a parameter's range.
    """

    scope: str = parameter(
        "mini_batch",
        choice("mini_batch", "lagged", "micro_batch"),
        "the tokens that the statistics behind the bounds are computed from: mini_batch (exact: the optimizer "
        "mini-batch of all ranks), lagged (the same update of the previous rollout batch; no extra forward pass) or "
        "micro_batch (the current micro-batch of this rank)",
    )
    compile: str | bool = parameter(
        "auto",
        only("auto, true or false", lambda value: value == "auto" or isinstance(value, bool)),
        "whether torch.compile fuses loss, statistics and metrics into one graph each; auto: on an accelerator, unless "
        "verl's use_torch_compile is off",
    )
    missing_state: str = parameter(
        "error",
        choice("error", "fresh"),
        "what happens if the checkpoint has no usable state of the bounds: error stops the run, fresh starts them "
        "afresh",
    )
    receipt: str = parameter(
        "auto",
        choice("auto", "stop", "warn", "off"),
        "what happens if the gradient on log_prob in the first rollout batch is not the announced one: stop the run, "
        "warn, or off (nothing is compared); auto: stop if tests have run all of the run's options, otherwise warn",
    )
    paper_loss_agg_mode: str | None = parameter(
        None,
        optional(choice("token-mean", "seq-mean-token-mean")),
        "how the method's paper averages, which the line of a run names where loss_agg_mode differs; null: not named",
    )


@dataclass(frozen=True, kw_only=True)
class Settings(LossSettings, RunSettings):
    """The clipx node of a run that trains a method of the plugin: its loss, and what the run adds.

    Raises:
        ValueError: when built with a value outside a parameter's range, or with two values that contradict each other.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hold is not None and self.scope == "micro_batch" and self.method.by_sequence:
            reason = f"a micro-batch has too few sequences for the width of {self.method.name} to hold a target"
            raise Refusal(f"{NODE}.scope", self.scope, reason, f"Set {NODE}.scope=mini_batch or lagged.")
        if self.scope == "lagged" and self.method.second_statistics_size:
            reason = f"{self.method.name} counts around its tokens' means, which differ between rollout batches"
            raise Refusal(f"{NODE}.scope", self.scope, reason, f"Set {NODE}.scope=mini_batch or micro_batch.")

    def functions(self, device: torch.device | str) -> TokenFunctions:
        """The functions that compute the loss and the statistics of tokens on a device."""
        compiled = torch.device(device).type != "cpu" if self.compile == "auto" else bool(self.compile)
        return token_functions(self.method, self.shaping, compiled=compiled)


@dataclass(frozen=True, kw_only=True)
class Observe(Node):
    """The clipx node of +clipx=observe: verl's own loss, whatever loss_mode is, with the plugin's metrics."""

    trains: ClassVar[bool] = False

    receipt: str = parameter(
        "auto", choice("auto", "off"), "verl's own loss announces no gradient: nothing is compared"
    )


# The parameters of the clipx node besides the method's own, and those under +clipx=observe.
AROUND = {field.name: field for field in dataclasses.fields(Settings) if field.name != "method"}
OBSERVED = {field.name: field for field in dataclasses.fields(Observe)}


def parameters_of(method: type[Method]) -> dict[str, dataclasses.Field]:
    """Every key that a method's clipx node takes: its own parameters, those of its bases, then those of `Settings`."""
    fields = {field.name: field for field in dataclasses.fields(method)}
    # dataclasses puts the fields of a base first; here they come last, because all methods have them.
    own_first = [name for base in method.__mro__ for name in vars(base).get("__annotations__", {}) if name in fields]
    return {**{name: fields[name] for name in own_first}, **AROUND}


def completed(node: Mapping[str, Any]) -> dict[str, Any]:
    """A clipx node with the defaults of what it leaves out; unchanged if it names no method of the plugin."""
    name = node.get("method")
    fields = parameters_of(METHODS[name]) if name in METHODS else OBSERVED if name == OBSERVE else {}
    return {**{key: field.default for key, field in fields.items()}, **node}


def build(method: str | None = None, function: str | None = None, **parameters: Any) -> Settings | Observe:
    """Build and check a clipx node.

    Args:
        method: the name of a method of the plugin, or "observe"; None if `function` is given.
        function: a user's loss as `package.module:name`; None if `method` is given.
        parameters: the method's parameters and those of `Settings`, by name.

    Raises:
        ValueError: no method or two methods; an unknown method or parameter; or a value of a wrong type or range. The
            message names the key, the value and what is allowed.
    """
    if (method is None) == (function is None):
        other = f"{NODE}.function={function}"
        reason = f"with {other} no method is chosen" if method is None else f"contradicts {other}"
        advice = (
            f"Choose one by its group ({swap_by('acpo')}), or a loss of your own "
            "(+clipx=custom clipx.function=module:name)."
        )
        raise Refusal(f"{NODE}.method", method, reason, advice)
    if method == OBSERVE:
        reject_unknown(parameters, OBSERVED, NODE, f"{OBSERVE}, which leaves verl's own loss as it is")
        return Observe(**{key: with_node(key, value) for key, value in parameters.items()})
    chosen = method_named(method) if method is not None else load_method(function)
    taken = AROUND.keys() & {field.name for field in dataclasses.fields(chosen)}
    if taken:
        reason = f"its parameter {min(taken)} has the name of a key that every method has"
        raise Refusal(f"{NODE}.function", function, reason, "Rename this parameter.")
    reject_unknown(parameters, parameters_of(chosen), NODE, chosen.name)
    own = {key: value for key, value in parameters.items() if key not in AROUND}
    around = {key: with_node(key, value) for key, value in parameters.items() if key in AROUND}
    return Settings(method=chosen(**own), **around)


def with_node(key: str, node: Any) -> Any:
    """Build a node by its key's own class in `NODES`; return any other value as it is."""
    return build_node(node, NODES[key]) if key in NODES else node


def clip_range(actor: Mapping[str, Any]) -> Bounds:
    """Return the bounds on the ratio that verl's clip_ratio_low and clip_ratio_high, or else its clip_ratio, set.

    Args:
        actor: these keys with their values, as verl's ActorConfig or a record's `loss.widths` has them.
    """
    low = actor.get("clip_ratio_low")
    high = actor.get("clip_ratio_high")
    if low is None:
        low = actor["clip_ratio"]
    if high is None:
        high = actor["clip_ratio"]
    return Bounds(1 - low, 1 + high)


def settings_without_group(name: str, actor: Any) -> Settings:
    """The settings if `loss_mode` was set without a `+clipx=<method>` group: the method's defaults and verl's bounds.

    Args:
        actor: verl's ActorConfig. Its clip_ratio_low and clip_ratio_high become fixed bounds, its clip_ratio_c becomes
            GRPO's dual clip.

    Raises:
        ValueError: a value of verl's is outside the parameter's range.
    """
    method = METHODS[name]
    overrides: dict[str, float] = {}
    if "clip_low" in parameters_of(method):
        overrides["clip_low"], overrides["clip_high"] = clip_range(actor)
    if name == "grpo":
        overrides["dual_clip"] = actor.get("clip_ratio_c", 3.0)
    return Settings(method=method(**overrides))
