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

# By key under the clipx node that has groups of its own, the classes from which its node may be built.
NODES = {**MODIFIERS, "trace": (Trace,)}


@dataclass(frozen=True, kw_only=True)
class Node(Parameters):
    """The keys of the clipx node that every loss has, verl's own included: what is logged, watched and traced.

    Raises:
        ValueError: when built with a value outside a parameter's range.
    """

    node_key: ClassVar[str] = NODE
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
        """Return the functions that compute the loss and the statistics of tokens on a device."""
        compiled = bool(self.compile)
        if self.compile == "auto":
            compiled = torch.device(device).type != "cpu"
        return token_functions(self.method, self.shaping, compiled=compiled)


@dataclass(frozen=True, kw_only=True)
class Observe(Node):
    """The clipx node of +clipx=observe: verl's own loss, whatever loss_mode is, with the plugin's metrics."""

    trains: ClassVar[bool] = False

    receipt: str = parameter(
        "auto", choice("auto", "off"), "verl's own loss announces no gradient: nothing is compared"
    )


# The fields of the clipx node by name: those besides the method's own, and those under +clipx=observe.
AROUND = {field.name: field for field in dataclasses.fields(Settings) if field.name != "method"}
OBSERVED = {field.name: field for field in dataclasses.fields(Observe)}


def parameters_of(method: type[Method]) -> dict[str, dataclasses.Field]:
    """Return the fields of a method's clipx node by name: the method's own, those of its bases, those of `Settings`."""
    fields = {field.name: field for field in dataclasses.fields(method)}
    # dataclasses puts the fields of a base first; here they come last, because all methods have them.
    own_first = [name for base in method.__mro__ for name in vars(base).get("__annotations__", {}) if name in fields]
    return {**{name: fields[name] for name in own_first}, **AROUND}


def completed(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return a clipx node with the defaults of the keys that it leaves out.

    Args:
        node: the node, not built. If it names neither a method of the plugin nor observe, nothing is added.
    """
    name = node.get("method")
    fields = {}
    if name in METHODS:
        fields = parameters_of(METHODS[name])
    elif name == OBSERVE:
        fields = OBSERVED
    defaults = {key: field.default for key, field in fields.items()}
    return {**defaults, **node}


def build(method: str | None = None, function: str | None = None, **parameters: Any) -> Settings | Observe:
    """Build and check a clipx node.

    Args:
        method: the name of a method of the plugin, or "observe"; None if `function` is given.
        function: a user's loss as `package.module:name`; None if `method` is given.
        parameters: the method's parameters and those of `Settings`, by name.

    Raises:
        ValueError: there is no method, or there are two; a method or a parameter is unknown; or a value has a wrong
            type or is out of range. The message names the key, the value and what is allowed.
    """
    if (method is None) == (function is None):
        reason = f"contradicts {NODE}.function={function}"
        if method is None:
            reason = f"with {NODE}.function={function} no method is chosen"
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
    """Return the bounds that verl's own loss puts on the ratio: 1 less clip_ratio_low, and 1 plus clip_ratio_high.

    Args:
        actor: these keys with their values, as verl's ActorConfig or a record's `loss.widths` has them. verl reads
            clip_ratio in place of one that is None.
    """
    low = actor.get("clip_ratio_low")
    high = actor.get("clip_ratio_high")
    if low is None:
        low = actor["clip_ratio"]
    if high is None:
        high = actor["clip_ratio"]
    return Bounds(1 - low, 1 + high)


def settings_without_group(name: str, actor: Any) -> Settings:
    """Return the settings of a method that loss_mode names without its group: the defaults, with verl's bounds.

    Args:
        name: the method's name.
        actor: verl's ActorConfig. Its clip_ratio_low and clip_ratio_high become fixed bounds if the method has any, its
            clip_ratio_c becomes GRPO's dual clip.

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
