"""A loss with its modifiers as a function of tensors, without verl."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl_clipx.losses.applying.loss import apply, make_shaped_tokens, per_token_loss
from verl_clipx.losses.base.parameters import NODE, reject_unknown
from verl_clipx.losses.base.refusal import Refusal
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.losses.groups import group_names, read_node
from verl_clipx.losses.methods import METHODS, method_named
from verl_clipx.losses.modifiers import MODIFIERS
from verl_clipx.losses.modifiers.masks import apply_mask_rule
from verl_clipx.losses.settings import LossSettings, build_node

# Statistics of fewer tokens are warned of. In docs/dev/measurements.md, 64 sequences have so many. There, 14 % of what
# ACPO clips depends on whether its bounds follow from these sequences or from the whole mini-batch.
FEW_TOKENS = 16_384

# The modifiers that work in any trainer, because they act on the tokens of one call. The others choose tokens or passes
# of a whole update.
ON_TOP = ("mask", "shaping", "hold")

# From an optional argument of a call, which some losses need, to what it has to be.
NEEDED = {
    "rollout_log_prob": "log-probabilities under the policy that sampled, (sequences, length)",
    "entropy": "entropies of the current policy in nats, (sequences, length)",
    "group": "a number for each prompt, int64, (sequences,)",
}


@dataclasses.dataclass
class ClipLoss:
    """A loss with its modifiers, which `clip_loss` returns. Tensors are (sequences, length) unless said otherwise.

    Args:
        settings: the method and its modifiers.
    """

    settings: LossSettings
    _warned: bool = False

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        decision: Tensor | None = None,
        all_reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
        **optional: Tensor | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each token, which your trainer averages, and detached tensors.

        Args:
            log_prob, old_log_prob: in nats, under the current policy and the one that the ratio is taken to.
            advantages: also (sequences, 1).
            mask: the response's tokens, bool or 0 and 1; nothing outside is read.
            decision: what `decide` returned; None: the method decides from the statistics of these tokens.
            all_reduce: sums a float64 vector over ranks. All ranks must then call the loss equally often.
            **optional: rollout_log_prob, entropy and group, as `NEEDED` says; ignored where the loss needs none.

        Returns:
            The loss, (sequences, length), float64 for float64 tensors and else float32. It is 0 outside the mask, and
            its gradient is -F * A.

            A dictionary of detached tensors: "gradient", which is -F * A, and "weight", F, both 0 outside the mask;
            "kept", bool, the mask without what the modifier `mask` takes out; "low" and "high", the bounds, which
            broadcast; "clip_fraction", 0-d, the share of the kept tokens that are clipped; and "decision".

        Raises:
            ValueError: a tensor that is needed is missing, or has another shape.
        """
        tokens = (log_prob, old_log_prob, advantages, mask)
        method = self.settings.method
        inputs = self.inputs(*tokens, **optional)
        if decision is None:
            sums = all_reduce(self.statistics(*tokens, **optional))
            if method.second_statistics_size:
                sums = all_reduce(self.statistics(*tokens, first=sums, **optional))
            decision = self.decide(sums)
        applied = apply(method, self.settings.shaping, inputs, decision)
        t = applied.tokens
        bounds = applied.bounds
        is_clipped = t.mask & bounds.clipped(method.bounded(t), t.advantages)
        detached = {
            "low": torch.as_tensor(bounds.low, dtype=t.ratio.dtype, device=t.ratio.device),
            "high": torch.as_tensor(bounds.high, dtype=t.ratio.dtype, device=t.ratio.device),
            "clip_fraction": is_clipped.sum() / t.mask.sum().clamp(min=1),
            "gradient": -applied.weighted,
            "weight": applied.weight.where(t.mask, 0.0),
            "kept": t.mask,
            "decision": decision,
        }
        return per_token_loss(log_prob, applied.value, applied.weighted), detached

    def statistics(self, *tokens: Tensor, first: Tensor | None = None, **optional: Tensor | None) -> Tensor:
        """Return a micro-batch's number of tokens, and the sums that `decide` needs.

        Add these vectors up over the micro-batches and ranks of an update.

        Args:
            *tokens, **optional: as for a call.
            first: for `clip_cov` and `kl_cov`, which need two stages: the sum over the update of what this function
                returned without `first`. None: the first stage, which is the only one of other methods.

        Returns:
            (1 + the number of sums,), float64.
        """
        method = self.settings.method
        t = make_shaped_tokens(method, self.settings.shaping, self.inputs(*tokens, **optional))
        token_count = t.mask.sum(dtype=torch.float64)
        sums = [token_count[None], method.statistics(t)]
        if first is not None:
            # `first` begins with the number of tokens, which the method does not take.
            sums.append(method.second_statistics(t, first[1:]))
        return torch.cat(sums)

    def decide(self, statistics: Tensor) -> Tensor:
        """Return the vector that determines the bounds, float64: the `decision` of all micro-batches of an update.

        Args:
            statistics: the sum of `statistics` over the update's micro-batches and ranks. Its first number is read on
                the host until the method has warned of few tokens.

        Raises:
            ValueError: the sums of the second stage are missing.
        """
        method = self.settings.method
        size = method.statistics_size + method.second_statistics_size
        if len(statistics) != 1 + size:
            raise ValueError(
                f"{method.name} needs {1 + size} statistics, not {len(statistics)}: sum statistics(…) over the update, "
                "then statistics(…, first=that sum)."
            )
        if size and not self._warned and statistics[0] < FEW_TOKENS:
            self._warned = True
            message = (
                f"what {method.name} clips follows from statistics of {int(statistics[0])} tokens, and of fewer than "
                f"{FEW_TOKENS} they are chance. Sum `statistics` over the update's micro-batches and ranks, and give "
                "`decide` the sum."
            )
            warnings.warn(message, stacklevel=3)
        return method.decide(statistics[1:])

    def inputs(
        self, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, **optional: Tensor | None
    ) -> Inputs:
        """Return those tensors of a call that the loss needs. Their mask is what a call returns as "kept".

        Raises:
            ValueError: a tensor that is needed is missing, or has another shape.
        """
        reject_unknown(optional, NEEDED, "clip_loss", "a call")
        given = {"old_log_prob": old_log_prob, "advantages": advantages, "mask": mask}
        for name in self.settings.asks_for:
            if optional.get(name) is None:
                raise ValueError(
                    f"{self.settings.method.name}, with what goes on top of it, needs {name}=: {NEEDED[name]}."
                )
            given[name] = optional[name]
        for name, value in {"log_prob": log_prob, **given}.items():
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} is {value!r}: give a tensor.")
        shape = tuple(log_prob.shape)
        if len(shape) != 2:
            raise ValueError(f"log_prob is {shape}: give (sequences, length), for one sequence log_prob[None].")
        for name, tensor in given.items():
            if name == "group":
                allowed_shapes = [shape[:1]]
            elif name == "advantages":
                allowed_shapes = [shape, (shape[0], 1)]
            else:
                allowed_shapes = [shape]
            if tuple(tensor.shape) not in allowed_shapes:
                wanted = " or ".join(map(str, allowed_shapes))
                raise ValueError(f"{name} is {tuple(tensor.shape)}, but log_prob is {shape}: give {wanted}.")
        given["advantages"] = advantages.expand(shape)
        given["mask"] = mask.bool()
        inputs = Inputs(log_prob=log_prob, **given)
        return inputs._replace(mask=apply_mask_rule(self.settings.mask, inputs))


# The end of a refusal of a key that `clip_loss` does not take.
AVAILABLE = f"On top of a method, clip_loss takes {', '.join(f'{key}=' for key in ON_TOP)}."

# From a key of the clipx node that only runs of verl have to what to do here instead.
INSTEAD = {
    "pull": "Add it to the loss that the call returns: k2 is coefficient * (log_prob - old_log_prob) ** 2 / 2. ",
    "scope": "Sum `statistics` over the tokens that the bounds shall follow, and give `decision=`. ",
    "update": "It divides updates, which only verl's worker can do. ",
    "select": "Choose the tokens by the tensor `mask` of the call. ",
}


def clip_loss(name: str, **parameters: Any) -> ClipLoss:
    """Return a loss of this package, for a trainer of your own.

    You call what it returns with tensors of an update: `per_token, info = loss(log_prob, old_log_prob, advantages,
    mask)`. In the following, n is the number of sequences and t their padded length.

    Args:
        name: as in `clipx methods`: acpo, dapo, acpo_reference, or a loss of your own that is registered.
        **parameters: the method's, as `clipx methods NAME` lists them, and what goes on top of it, such as
            mask="icepop", mask={"rule": "opsm", "delta": 0.5}, shaping={"rule": "fipo"}, or
            hold={"target": "clip_fraction", "value": 0.02}.

    Returns:
        A function of these tensors, with the methods `statistics` and `decide` for updates of several micro-batches:
        log_prob, old_log_prob: log-probabilities in nats, (n, t), of any float dtype; log_prob carries the gradient.
            float64 is computed in float64, everything else in float32.
        advantages: (n, t) or (n, 1), float.
        mask: (n, t), bool or 0 and 1: the response's tokens. Nothing outside is read.
        rollout_log_prob (n, t), entropy (n, t), group (n,): by name, where the method needs them.
        decision, all_reduce: by name; see help(type(loss).__call__).

        It returns two things:
        per_token: the loss, (n, t), float32, or float64 for float64 tensors. It is 0 outside the mask, and its gradient
            with respect to log_prob is -F * A. Your trainer averages it.
        info: a dictionary of detached tensors. "gradient", which is -F * A, "weight", F, and "kept", bool, the mask
            without what the modifier `mask` takes out, are (n, t). "low" and "high", the bounds, broadcast to (n, t).
            "clip_fraction", in [0, 1], is 0-d. "decision", float64, is what the bounds follow from.

    Raises:
        ValueError: there is no such loss or parameter, or a value is not allowed. The message names the nearest.
        ModuleNotFoundError: the name is a group of settings, whose file needs OmegaConf.
    """
    is_group = name not in METHODS and name in group_names()
    settings = read_node_of_group(name) if is_group else {}
    method_class = method_named(settings.get("method", name))
    method_parameters = [field.name for field in dataclasses.fields(method_class)]
    known = [*method_parameters, *ON_TOP]
    for key in INSTEAD.keys() & parameters.keys() - {*known}:
        raise Refusal(f"{NODE}.{key}", parameters[key], f"is not a parameter of {name}", f"{INSTEAD[key]}{AVAILABLE}")
    reject_unknown(parameters, known, NODE, name)
    for key in ("mask", "shaping"):
        # The name of a rule alone.
        if isinstance(parameters.get(key), str):
            parameters[key] = {"rule": parameters[key]}
    # What the user gives takes precedence over the group's settings.
    node = {key: value for key, value in settings.items() if key in known} | parameters
    for key, value in node.items():
        if value == "???":
            raise Refusal(f"{NODE}.{key}", value, f"{name} has no value of its own", f"Give {key}=.")
    modifiers = {key: build_node(node[key], MODIFIERS[key]) for key in ON_TOP if key in node}
    method = method_class(**{key: value for key, value in node.items() if key in method_parameters})
    return ClipLoss(LossSettings(method=method, **modifiers))


def read_node_of_group(name: str) -> dict[str, Any]:
    """Return what a group of settings, configs/clipx/NAME.yaml, sets in the clipx node.

    Args:
        name: the name of a group that there is.

    Returns:
        What `read_node` returns: from key to value, with "???" for a value that the user must give. The dictionary is
        cached and must not be changed.

    Raises:
        ModuleNotFoundError: OmegaConf, which reads the group's file, is not installed.
    """
    try:
        return read_node(name)
    except ModuleNotFoundError as error:
        if error.name != "omegaconf":
            raise
        methods = ", ".join(sorted(METHODS))
        raise ModuleNotFoundError(
            f"{name} is a group of settings, and OmegaConf, which reads it, is not installed: pip install omegaconf. "
            f"The methods {methods} need nothing but torch: give one of them the parameters that "
            f"configs/clipx/{name}.yaml sets.",
            name="omegaconf",
        ) from None
