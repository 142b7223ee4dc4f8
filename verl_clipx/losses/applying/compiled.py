"""Compiles functions of a micro-batch's tokens with torch.compile into one graph each, before the first step."""

import logging
import types
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_clipx.losses.applying.loss import TokenLoss, token_loss, token_statistics
from verl_clipx.losses.base.method import Method
from verl_clipx.losses.base.tokens import PART, Inputs, compute_dtype
from verl_clipx.losses.modifiers import Shaping

logger = logging.getLogger(__name__)

# Sizes that differ from each other and from all others, because equal sizes would become one symbol of the graph. The
# compiler chooses the tiles of sums over a whole sequence by the example, so its length is realistic.
EXAMPLE_SEQUENCES = 37
EXAMPLE_LENGTH = 4099


class TokenFunctions:
    """`token_loss` and `token_statistics` for one configuration, compiled or not. No gradient flows through them.

    Args:
        compiled: whether to compile. If the compiler is missing or fails, one warning says so, and both functions stay
            uncompiled.
    """

    def __init__(self, method: Method, shaping: Shaping | None, *, compiled: bool):
        self.method = method
        self.shaping = shaping
        self.compiled = compiled
        self.by_sequence = method.by_sequence or (shaping is not None and shaping.by_sequence)
        self._fused: dict[Callable[..., Any], Callable[..., Any]] = {}

    def call(self, function: Callable[..., Any], inputs: Inputs, *others: Any) -> Any:
        """Calls function(method, shaping, inputs, *others), compiled or as it is.

        Compiled, the function gets the inputs as `fit_to_graph` pads them, and returns as many rows and columns.
        """
        # Without gradient and autocast: each would need another graph, and autocast would lose precision.
        with torch.no_grad(), torch.autocast(inputs.mask.device.type, enabled=False):
            if self.compiled:
                try:
                    if function not in self._fused:
                        self._fused[function] = compile_alone(function)
                    return self._fused[function](self.method, self.shaping, fit_to_graph(inputs), *others)
                except Exception as error:
                    self.compiled = False
                    stays = "clipx.compile: %s stays uncompiled because the compiler failed: %s: %s"
                    logger.warning(stays, self.method.name, type(error).__name__, error)
            return function(self.method, self.shaping, inputs, *others)

    def loss(self, inputs: Inputs, decision: Tensor) -> TokenLoss:
        """As `token_loss`."""
        if not self.compiled:
            return self.call(token_loss, inputs, decision)
        rows, columns = inputs.mask.shape
        function = token_loss if self.by_sequence else token_loss_in_parts
        value, weighted, sums = self.call(function, inputs, decision)
        return TokenLoss(value=value[:rows, :columns], weighted=weighted[:rows, :columns], sums=sums)

    def statistics(self, inputs: Inputs, first: Tensor | None = None) -> Tensor:
        """As `token_statistics`."""
        if self.method.statistics_size == 0:
            return torch.zeros(0, dtype=torch.float64, device=inputs.mask.device)
        function = token_statistics_in_parts if self.compiled else token_statistics
        return self.call(function, inputs, first)

    def prepare(
        self,
        device: torch.device | str,
        *,
        counted: bool,
        asks_for: Iterable[str] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Compiles now, so that no step waits for it.

        Args:
            device: where the tokens will be.
            counted: whether inputs will say which tokens count.
            asks_for: those of `tokens.OPTIONAL` that they will have besides those that the method asks for.
            dtype: that the loss will be computed in.
        """
        if not self.compiled:
            return
        inputs = example_inputs({*self.method.asks_for, *asks_for}, device, counted=counted, dtype=dtype)
        statistics = self.statistics(inputs)
        if self.method.second_statistics_size:
            statistics = self.statistics(inputs, statistics[: self.method.statistics_size])
        self.loss(inputs, self.method.decide(statistics))


def token_loss_in_parts(method: Method, shaping: Shaping | None, inputs: Inputs, decision: Tensor) -> TokenLoss:
    """As `token_loss`, with sequences padded to whole `tokens.parts`; value and weighted stay padded.

    The padding happens in the graph, where it becomes a condition when reading and not a copy.
    """
    return token_loss(method, shaping, in_parts(inputs), decision)


def token_statistics_in_parts(
    method: Method, shaping: Shaping | None, inputs: Inputs, first: Tensor | None = None
) -> Tensor:
    """As `token_statistics`, with sequences padded to whole `tokens.parts`."""
    return token_statistics(method, shaping, in_parts(inputs), first)


def in_parts(inputs: Inputs) -> Inputs:
    """Returns the inputs with their sequences padded to a multiple of `PART`."""
    columns = inputs.mask.shape[1]
    missing = (columns + PART - 1) // PART * PART - columns

    def lengthen(values: Tensor | None) -> Tensor | None:
        return values if values is None or values.ndim == 1 else pad(values, (0, missing))

    return Inputs(*map(lengthen, inputs))


# Each process creates the functions of a configuration only once.
token_functions = cache(TokenFunctions)


# By default the compiler stores, for each token, what is computed from many tensors or in many operations. With these
# options it computes that again where it is needed, so that the statistics read the tokens once.
OPTIONS = {token_statistics_in_parts: {"realize_reads_threshold": 100, "realize_opcount_threshold": 1000}}


def compile_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a copy of a function, because the compiler counts and limits graphs by a function's code.

    A method's parameters are constants of the graph. By default, the compiler would turn a float parameter into a
    float64 input of the graph, and compute in float64 whatever is multiplied by it.
    """
    from torch._dynamo import config

    code = function.__code__.replace(co_name=f"{function.__name__}_alone")
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    compiled = torch.compile(copy, dynamic=True, fullgraph=True, options=OPTIONS.get(function))
    return config.patch(specialize_float=True)(compiled)


def fit_to_graph(inputs: Inputs) -> Inputs:
    """Brings inputs into the one form that a graph is made for, whatever their strides, sizes or gradients.

    The compiler takes a size of 0 or 1 for a constant and would make another graph for it. Such inputs are padded to
    two rows and two columns; what is added lies outside the mask.

    Returns:
        Detached, contiguous inputs in the compute dtype.
    """
    rows, columns = inputs.mask.shape
    missing_rows = max(2 - rows, 0)
    missing_columns = max(2 - columns, 0)
    dtype = compute_dtype(inputs.log_prob.dtype)

    def conform(values: Tensor | None) -> Tensor | None:
        """Return one of the inputs in that form; None for an input that there is not."""
        if values is None:
            return None
        values = values.detach()
        if values.is_floating_point():
            values = values.to(dtype)
        if missing_rows or missing_columns:
            # pad takes left, right, top, bottom; `group` has no columns.
            padding = (0, missing_columns, 0, missing_rows) if values.ndim == 2 else (0, missing_rows)
            values = pad(values, padding)
        return values.contiguous()

    return Inputs(*map(conform, inputs))


def example_inputs(asks_for: Iterable[str], device: torch.device | str, *, counted: bool, dtype: torch.dtype) -> Inputs:
    """Makes the micro-batch that functions are compiled with; the arguments are those of `TokenFunctions.prepare`."""
    size = EXAMPLE_SEQUENCES, EXAMPLE_LENGTH
    log_prob = torch.full(size, -1.0, dtype=dtype, device=device)
    mask = torch.ones(size, dtype=torch.bool, device=device)
    optional = {
        "rollout_log_prob": log_prob.clone(),
        "entropy": log_prob.neg(),
        "group": torch.zeros(size[0], dtype=torch.int64, device=device),
    }
    return Inputs(
        log_prob=log_prob,
        old_log_prob=log_prob.clone(),
        advantages=log_prob.clone(),
        mask=mask,
        counted=mask.clone() if counted else None,
        **{name: optional[name] for name in asks_for},
    )
