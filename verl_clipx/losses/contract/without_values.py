"""Runs formulas on tensors without values, and keeps the first error about something that an accelerator waits for."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What `WithoutValues` refuses by itself, as the message of a `Wait`.
COPIES = "a copy from the host's memory waits for the accelerator"
PRINTS = "a message contains a tensor, so it reads the tensor's values"
SYNCHRONIZES = "torch.cuda.synchronize() or torch.accelerator.synchronize() waits for the accelerator"


class Wait(RuntimeError):
    """Something would wait for the accelerator, although PyTorch raises no error for it on the device "meta"."""


class WithoutValues(TorchFunctionMode):
    """Runs functions on tensors on the device "meta", and keeps the first error about a wait for an accelerator.

    PyTorch itself raises an error where a value of such a tensor is read. This mode also refuses copies from the host's
    memory, messages that contain a tensor, and calls that synchronize. The error is kept even if the loss catches it.

    Args:
        accelerator: whether tensors say that they are on one, so that what is done only there is done here.

    Attributes:
        first_wait: the first such error, a `Wait` or PyTorch's own; None if there was none.
    """

    def __init__(self, *, accelerator: bool):
        super().__init__()
        self.accelerator = accelerator
        self.first_wait: Exception | None = None

    def __enter__(self) -> "WithoutValues":
        self._synchronize = {module: module.synchronize for module in (torch.cuda, torch.accelerator)}
        for module in self._synchronize:
            module.synchronize = self._refuse_to_synchronize
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for module, synchronize in self._synchronize.items():
            module.synchronize = synchronize
        super().__exit__(*error)

    def _refuse_to_synchronize(self, *device: Any) -> None:
        self._refuse(SYNCHRONIZES)

    def _refuse(self, message: str) -> None:
        error = Wait(message)
        self._keep(error)
        raise error

    def _keep(self, error: Exception) -> None:
        if self.first_wait is None:
            self.first_wait = error

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, as PyTorch asks of a mode, and keep the first error about a wait."""
        kwargs = kwargs or {}
        if self.accelerator and func in ANSWERS_ON_ACCELERATOR:
            return ANSWERS_ON_ACCELERATOR[func]
        if self.accelerator:
            args = tuple(without_accelerator(value) for value in args)
            kwargs = {name: without_accelerator(value) for name, value in kwargs.items()}
        if self.accelerator and func is Tensor.cuda:
            func = Tensor.to
            args = (args[0], torch.device("meta"))
        if func in (Tensor.__repr__, Tensor.__format__):
            self._refuse(PRINTS)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if reads_meta(error):
                self._keep(error)
            raise
        if copies_from_host(func, args, kwargs, result):
            self._refuse(COPIES)
        return result


# Functions that copy their first argument, a tensor, to another device.
MOVES = (Tensor.to, Tensor.type_as)

# Functions that make a tensor from numbers on the host.
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
    if "data" in kwargs:
        source = kwargs["data"]
    elif func is Tensor.new_tensor and len(args) > 1:
        # Its first argument is the tensor that it belongs to.
        source = args[1]
    else:
        source = args[0] if args else None
    is_without_values = isinstance(source, Tensor) and source.is_meta
    return not is_without_values


def reads_meta(error: Exception) -> bool:
    """Return whether an error is PyTorch's about a tensor that has no values."""
    # "meta" as a word of its own, and not as a part of another one such as "metadata".
    return re.search(r"(?<![a-z])meta(?![a-z])", first_sentence(error).lower()) is not None


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message."""
    return str(error).partition("\n")[0].partition(". ")[0]


ACCELERATOR = torch.device("cuda", 0)

# From a function that asks a tensor where it is to the answer of a tensor on an accelerator.
ANSWERS_ON_ACCELERATOR = {
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.is_meta.__get__: False,
    Tensor.device.__get__: ACCELERATOR,
    Tensor.get_device: 0,
}


def without_accelerator(value: Any) -> Any:
    """Return the device "meta" instead of an accelerator, and anything else as it is."""
    if not isinstance(value, torch.device | str):
        return value
    # "cuda:0" and "cuda" name the same kind of device.
    kind_of_device = str(value).partition(":")[0]
    if kind_of_device == ACCELERATOR.type:
        return torch.device("meta")
    return value
