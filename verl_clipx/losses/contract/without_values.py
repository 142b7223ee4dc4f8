"""Runs formulas on tensors without values, and keeps the first error of an attempt to read one."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WithoutValues(TorchFunctionMode):
    """Keeps the first error of an attempt to read a tensor on the device "meta", also if the loss catches it.

    Waiting for the accelerator, and copying from the host's memory, are errors too.

    Args:
        accelerator: whether tensors say that they are on one, so that what is done only there is done here.

    Attributes:
        first_read: the first such error; None if there was none.
    """

    def __init__(self, *, accelerator: bool):
        super().__init__()
        self.accelerator = accelerator
        self.first_read: Exception | None = None

    def __enter__(self) -> "WithoutValues":
        self._synchronize = {module: module.synchronize for module in (torch.cuda, torch.accelerator)}
        for module in self._synchronize:
            module.synchronize = self._wait
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for module, synchronize in self._synchronize.items():
            module.synchronize = synchronize
        super().__exit__(*error)

    def _wait(self, *device: Any) -> None:
        self._refuse("torch.cuda.synchronize() or torch.accelerator.synchronize() waits for the accelerator")

    def _refuse(self, message: str) -> None:
        error = RuntimeError(message)
        if self.first_read is None:
            self.first_read = error
        raise error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch in its place, as PyTorch asks of a mode, and keep the first error of a reading."""
        kwargs = kwargs or {}
        if self.accelerator and func in ANSWERS_ON_ACCELERATOR:
            return ANSWERS_ON_ACCELERATOR[func]
        if self.accelerator:
            args = tuple(without_accelerator(value) for value in args)
            kwargs = {name: without_accelerator(value) for name, value in kwargs.items()}
        if self.accelerator and func is Tensor.cuda:
            func = Tensor.to
            args = (args[0], torch.device("meta"))
        try:
            if func in (Tensor.__repr__, Tensor.__format__):
                raise NotImplementedError("a message reads a meta tensor")
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if self.first_read is None and reads_meta(error):
                self.first_read = error
            raise
        if copies_from_host(func, args, kwargs, result):
            self._refuse(COPIED)
        return result


COPIED = "a copy from the host's memory waits for the accelerator"

# What copies a tensor, its first argument, to another device.
MOVES = (Tensor.to, Tensor.type_as)

# What makes a tensor from numbers on the host.
MAKES = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)


def copies_from_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Return whether a call copied numbers of the host to a tensor without values, for which the host waits.

    Args:
        func: a function of torch, as a mode gets it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        result: what it returned.
    """
    if not isinstance(result, Tensor) or not result.is_meta or kwargs.get("non_blocking"):
        return False
    if func in MOVES:
        return not args[0].is_meta
    if func is Tensor.copy_:
        return not args[1].is_meta
    if func not in MAKES:
        return False
    source = kwargs.get("data", args[0] if args else None)
    if func is Tensor.new_tensor and len(args) > 1:
        # Its first argument is the tensor that it belongs to.
        source = args[1]
    return not (isinstance(source, Tensor) and source.is_meta)


def reads_meta(error: Exception) -> bool:
    """Return whether an error is PyTorch's about a tensor that has no values."""
    return re.search(r"(?<![a-z])meta(?![a-z])", first_sentence(error).lower()) is not None


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message."""
    return str(error).partition("\n")[0].partition(". ")[0]


ACCELERATOR = torch.device("cuda", 0)

# What a tensor on an accelerator says of itself.
ANSWERS_ON_ACCELERATOR = {
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.is_meta.__get__: False,
    Tensor.device.__get__: ACCELERATOR,
    Tensor.get_device: 0,
}


def without_accelerator(value: Any) -> Any:
    """Return the device "meta" instead of an accelerator, and anything else as it is."""
    is_device = isinstance(value, torch.device | str)
    if is_device and str(value).partition(":")[0] == ACCELERATOR.type:
        return torch.device("meta")
    return value
