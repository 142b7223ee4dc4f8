"""One graph each for a configuration's loss and for its statistics, made by torch.compile before the first step."""

import logging
import math
import types
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_clipx.loss import Inputs, TokenLoss, token_loss, token_statistics
from verl_clipx.methods.method import Method
from verl_clipx.modifiers.advantage_reweighting import AdvantageReweighting
from verl_clipx.tokens import compute_dtype

logger = logging.getLogger(__name__)

TokenTensors = TypeVar("TokenTensors", bound=tuple)

# Sizes that are no others': equal ones would become one symbol of the graph.
EXAMPLE_SEQUENCES, EXAMPLE_LENGTH = 37, 41

# Numbers in the widest vector of a CPU, of float32 and so of float64 too.
VECTOR = 16


class TokenFunctions:
    """`token_loss` and `token_statistics` of one configuration, compiled or not.

    Args:
        method: the method.
        shaping: advantage reweighting, or None.
        compiled: whether to compile; where the compiler is missing or fails, a warning says so once and both functions
            stay as they are.
    """

    def __init__(self, method: Method, shaping: AdvantageReweighting | None, *, compiled: bool):
        self.method, self.shaping, self.compiled = method, shaping, compiled
        if compiled:
            try:
                self._fused = {function: compile_alone(function) for function in (token_loss, token_statistics)}
            except Exception as error:
                self._stay_uncompiled(error)

    def loss(self, inputs: Inputs, decision: Tensor) -> TokenLoss:
        """As `token_loss`; no gradient flows through."""
        rows, columns = inputs.mask.shape
        value, weighted, sums = self._call(token_loss, inputs, decision)
        return TokenLoss(value[:rows, :columns], weighted[:rows, :columns], sums)

    def statistics(self, inputs: Inputs) -> Tensor:
        """As `token_statistics`; no gradient flows through."""
        if self.method.statistics_size == 0:
            return torch.zeros(0, dtype=torch.float64, device=inputs.mask.device)
        return self._call(token_statistics, inputs)

    def prepare(self, device: torch.device | str, *, counted: bool, dtype: torch.dtype = torch.float32) -> None:
        """Compiles now, so that no step waits for it.

        Args:
            device: where the tokens will be.
            counted: whether inputs will say which tokens count.
            dtype: that the loss will be computed in.
        """
        if self.compiled:
            inputs = example_inputs(self.method, device, counted=counted, dtype=dtype)
            self.loss(inputs, self.method.decide(self.statistics(inputs)))

    def _call(self, function: Callable[..., Any], inputs: Inputs, *decision: Tensor) -> Any:
        # Without gradient and autocast: both would be graphs of their own, and autocast would lose precision.
        with torch.no_grad(), torch.autocast(inputs.mask.device.type, enabled=False):
            if self.compiled:
                try:
                    return self._fused[function](self.method, self.shaping, alike(inputs), *decision)
                except Exception as error:
                    self._stay_uncompiled(error)
            return function(self.method, self.shaping, inputs, *decision)

    def _stay_uncompiled(self, error: Exception) -> None:
        self.compiled = False
        logger.warning(NOT_COMPILED, self.method.name, type(error).__name__, error)


@cache
def token_functions(method: Method, shaping: AdvantageReweighting | None, compiled: bool) -> TokenFunctions:
    """The functions of a configuration, made once a process.

    Args:
        method, shaping, compiled: as for `TokenFunctions`.
    """
    return TokenFunctions(method, shaping, compiled=compiled)


def compile_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a copy of a function: the compiler counts graphs, and limits them, by the function's code."""
    code = function.__code__.replace(co_name=f"{function.__name__}_alone")
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    return torch.compile(copy, dynamic=True, fullgraph=True)


def alike(inputs: TokenTensors) -> TokenTensors:
    """The same inputs in the one form that a graph is made for, whatever their strides, sizes or gradients.

    Args:
        inputs: a micro-batch: `Inputs`, or another NamedTuple of such tensors with a mask and log_prob.

    Returns:
        Detached, contiguous, of the compute dtype, padded: a size of 0 or 1 would be a graph of its own, and at the end
        of a row that is no multiple of its vectors the CPU's code takes another exp, which differs in the last bit.
    """
    rows, columns = inputs.mask.shape
    multiple = VECTOR if inputs.mask.device.type == "cpu" else 1
    missing = (0, max(math.ceil(columns / multiple) * multiple, 2) - columns, 0, max(2 - rows, 0))
    dtype = compute_dtype(inputs.log_prob.dtype)

    def one(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        values = values.detach()
        if values.is_floating_point():
            values = values.to(dtype)
        if any(missing):
            values = pad(values, missing if values.ndim == 2 else missing[2:])
        return values.contiguous()

    return type(inputs)(*map(one, inputs))


def example_inputs(method: Method, device: torch.device | str, *, counted: bool, dtype: torch.dtype) -> Inputs:
    """A micro-batch to compile with; arguments as for `TokenFunctions.prepare`."""
    size = EXAMPLE_SEQUENCES, EXAMPLE_LENGTH
    log_prob = torch.full(size, -1.0, dtype=dtype, device=device)
    mask = torch.ones(size, dtype=torch.bool, device=device)
    optional = {
        "rollout_log_prob": log_prob.clone(),
        "entropy": log_prob.neg(),
        "group": torch.zeros(size[0], dtype=torch.int64, device=device),
    }
    return Inputs(
        log_prob,
        log_prob.clone(),
        log_prob.clone(),
        mask,
        mask.clone() if counted else None,
        **{name: optional[name] for name in method.asks_for},
    )


NOT_COMPILED = "clipx.compile: %s stays uncompiled, the compiler failed: %s: %s"
