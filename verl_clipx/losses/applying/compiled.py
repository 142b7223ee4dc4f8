"""Compiles each function of a micro-batch's tokens into one graph with torch.compile, before the first step."""

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

# The compiler uses one symbol for equal sizes, so these sizes differ from each other and from every other size. It also
# chooses the tiling of sums over a sequence from this example, so the example has a realistic length.
EXAMPLE_SEQUENCES = 37
EXAMPLE_LENGTH = 4099


class TokenFunctions:
    """`token_loss` and `token_statistics` for one configuration, compiled or not. No gradient flows through them.

    Args:
        method: the configuration's method.
        shaping: the configuration's shaping of the advantages; None: they stay as they are.
        compiled: whether to compile. If the compiler is missing, or if it or a compiled function fails, one warning is
            logged, and both functions run uncompiled from then on.
    """

    def __init__(self, method: Method, shaping: Shaping | None, *, compiled: bool):
        self.method = method
        self.shaping = shaping
        self.compiled = compiled
        self.by_sequence = method.by_sequence or (shaping is not None and shaping.by_sequence)
        # From each function to its compiled copy.
        self._compiled_functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def call(self, function: Callable[..., Any], inputs: Inputs, *others: Any) -> Any:
        """Call function(method, shaping, inputs, *others), compiled or as it is.

        A compiled function gets inputs that `fit_to_graph` has padded, so a result per token may have more rows and
        columns than `inputs`, and the caller has to cut it. If the compiler or the compiled function fails,
        `compiled` becomes False, one warning is logged, and the function is called as it is.
        """
        # Gradients and autocast are off because each of them would need another graph. Autocast would also lose
        # precision.
        with torch.no_grad(), torch.autocast(inputs.mask.device.type, enabled=False):
            if self.compiled:
                try:
                    if function not in self._compiled_functions:
                        self._compiled_functions[function] = compile_copy(function)
                    compiled_function = self._compiled_functions[function]
                    return compiled_function(self.method, self.shaping, fit_to_graph(inputs), *others)
                # The compiler raises errors of many types. So does the compiled function, for example when memory runs
                # out. An error of the method itself is raised again by the uncompiled call below.
                except Exception as error:
                    self.compiled = False
                    message = (
                        "clipx.compile: %s stays uncompiled because the compiler, or what it compiled, failed: %s: %s"
                    )
                    logger.warning(message, self.method.name, type(error).__name__, error)
            return function(self.method, self.shaping, inputs, *others)

    def loss(self, inputs: Inputs, decision: Tensor) -> TokenLoss:
        """Return what `token_loss` returns for the configuration's method and shaping."""
        if not self.compiled:
            return self.call(token_loss, inputs, decision)
        rows, columns = inputs.mask.shape
        function = token_loss if self.by_sequence else token_loss_in_parts
        value, weighted, sums = self.call(function, inputs, decision)
        return TokenLoss(value=value[:rows, :columns], weighted=weighted[:rows, :columns], sums=sums)

    def statistics(self, inputs: Inputs, first: Tensor | None = None) -> Tensor:
        """Return what `token_statistics` returns for the configuration's method and shaping.

        Args:
            inputs: the micro-batch.
            first: as for `token_statistics`.
        """
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
        """Compile now, so that no step waits for the compiler.

        Args:
            device: where the tokens will be.
            counted: whether the inputs will say which tokens count.
            asks_for: the optional fields (`OPTIONAL` in base/tokens.py) that the inputs will have in addition to those
                that the method asks for.
            dtype: the dtype in which the loss will be computed.
        """
        if not self.compiled:
            return
        inputs = example_inputs({*self.method.asks_for, *asks_for}, device, counted=counted, dtype=dtype)
        statistics = self.statistics(inputs)
        if self.method.second_statistics_size:
            statistics = self.statistics(inputs, statistics[: self.method.statistics_size])
        self.loss(inputs, self.method.decide(statistics))


def token_loss_in_parts(method: Method, shaping: Shaping | None, inputs: Inputs, decision: Tensor) -> TokenLoss:
    """Return what `token_loss` returns for sequences that are padded to a multiple of `PART` tokens.

    An accelerator then sums equal parts (see `parts` in base/tokens.py). `value` and `weighted` are returned with the
    padding. The compiler turns padding inside the graph into a condition on each read, so no padded copy is stored.
    """
    return token_loss(method, shaping, pad_to_parts(inputs), decision)


def token_statistics_in_parts(
    method: Method, shaping: Shaping | None, inputs: Inputs, first: Tensor | None = None
) -> Tensor:
    """Return what `token_statistics` returns for sequences that are padded to a multiple of `PART` tokens.

    An accelerator then sums equal parts (see `parts` in base/tokens.py).
    """
    return token_statistics(method, shaping, pad_to_parts(inputs), first)


def pad_to_parts(inputs: Inputs) -> Inputs:
    """Return the inputs with their sequences padded to a multiple of `PART` tokens. The padding is outside the mask."""
    columns = inputs.mask.shape[1]
    part_count = (columns + PART - 1) // PART
    missing_columns = part_count * PART - columns

    def lengthen(values: Tensor | None) -> Tensor | None:
        """Return a field of the inputs with the missing columns at its end; unchanged if it has no columns."""
        # Only `group` has one dimension.
        if values is None or values.ndim == 1:
            return values
        return pad(values, (0, missing_columns))

    return Inputs(*map(lengthen, inputs))


@cache
def token_functions(method: Method, shaping: Shaping | None, *, compiled: bool) -> TokenFunctions:
    """Return a configuration's functions. A process makes them once. The arguments are those of `TokenFunctions`."""
    return TokenFunctions(method, shaping, compiled=compiled)


# The compiler's options, by function. By default the compiler stores a per-token intermediate result that is computed
# from many tensors or by many operations. With these options it computes the result again wherever it is needed, so
# that the statistics read the tokens only once.
OPTIONS = {token_statistics_in_parts: {"realize_reads_threshold": 100, "realize_opcount_threshold": 1000}}


def compile_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a copy of a function, because the compiler counts and limits graphs by a function's code.

    A method's parameters are constants of the graph. By default, the compiler would turn a float parameter into a
    float64 input of the graph, and everything that is multiplied by it would be computed in float64.
    """
    from torch._dynamo import config

    code = function.__code__.replace(co_name=f"{function.__name__}_alone")
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    compiled = torch.compile(copy, dynamic=True, fullgraph=True, options=OPTIONS.get(function))
    # The option is set during each call, because the function is compiled when it is called and not here.
    return config.patch(specialize_float=True)(compiled)


def fit_to_graph(inputs: Inputs) -> Inputs:
    """Return inputs in the one form that a graph is made for, whatever their strides, sizes or gradients are.

    The compiler takes a size of 0 or 1 for a constant and would make another graph for it. Such inputs are padded to
    two rows and two columns. The padding is outside the mask.

    Returns:
        Detached, contiguous inputs; floating-point fields are in the compute dtype.
    """
    rows, columns = inputs.mask.shape
    missing_rows = max(2 - rows, 0)
    missing_columns = max(2 - columns, 0)
    dtype = compute_dtype(inputs.log_prob.dtype)

    def conform(values: Tensor | None) -> Tensor | None:
        """Return one field of the inputs in the form that a graph expects, or None if the field is absent."""
        if values is None:
            return None
        values = values.detach()
        if values.is_floating_point():
            values = values.to(dtype)
        if missing_rows or missing_columns:
            # How many entries `pad` adds at the left, right, top and bottom.
            padding = (0, missing_columns, 0, missing_rows)
            if values.ndim == 1:
                # `group` has no columns.
                padding = (0, missing_rows)
            values = pad(values, padding)
        return values.contiguous()

    return Inputs(*map(conform, inputs))


def example_inputs(asks_for: Iterable[str], device: torch.device | str, *, counted: bool, dtype: torch.dtype) -> Inputs:
    """Make the micro-batch with which functions are compiled.

    Args:
        asks_for: the optional fields that the micro-batch has.
        device: where its tensors are.
        counted: whether it says which tokens count.
        dtype: the dtype of its floating-point fields.
    """
    shape = (EXAMPLE_SEQUENCES, EXAMPLE_LENGTH)
    log_prob = torch.full(shape, -1.0, dtype=dtype, device=device)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    optional = {
        "rollout_log_prob": log_prob.clone(),
        "entropy": log_prob.neg(),
        "group": torch.zeros(EXAMPLE_SEQUENCES, dtype=torch.int64, device=device),
    }
    return Inputs(
        log_prob=log_prob,
        old_log_prob=log_prob.clone(),
        advantages=log_prob.clone(),
        mask=mask,
        counted=mask.clone() if counted else None,
        **{name: optional[name] for name in asks_for},
    )
