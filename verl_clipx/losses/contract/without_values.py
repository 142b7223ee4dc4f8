"""Runs formulas on tensors without values, and keeps the first error by which one was to be read."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WithoutValues(TorchFunctionMode):
    """Keeps the first error by which a tensor on the device "meta" was to be read, also if the loss catches it.

    Args:
        accelerator: whether tensors say that they are on one, so that what is done only there is done here.

    Attributes:
        read: the first such error; None if nothing was read.
    """

    def __init__(self, *, accelerator: bool):
        super().__init__()
        self.accelerator = accelerator
        self.read: Exception | None = None

    def __enter__(self) -> "WithoutValues":
        self._synchronize = torch.cuda.synchronize
        torch.cuda.synchronize = self._wait
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize = self._synchronize
        super().__exit__(*error)

    def _wait(self, *device: Any) -> None:
        if self.read is None:
            self.read = RuntimeError("torch.cuda.synchronize() waits for the accelerator")
        raise self.read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.accelerator and func in ANSWERS_THERE:
            return ANSWERS_THERE[func]
        if self.accelerator:
            args = tuple(without_accelerator(value) for value in args)
            kwargs = {name: without_accelerator(value) for name, value in kwargs.items()}
        try:
            if func in (Tensor.__repr__, Tensor.__format__):
                raise NotImplementedError("a message reads a meta tensor")
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if self.read is None and reads_meta(error):
                self.read = error
            raise


def reads_meta(error: Exception) -> bool:
    """Return whether an error is PyTorch's about a tensor that has no values."""
    return re.search(r"(?<![a-z])meta(?![a-z])", first_sentence(error).lower()) is not None


def first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]


ACCELERATOR = torch.device("cuda", 0)
# What a tensor on an accelerator says of itself.
ANSWERS_THERE = {
    Tensor.is_cuda.__get__: True,
    Tensor.is_cpu.__get__: False,
    Tensor.is_meta.__get__: False,
    Tensor.device.__get__: ACCELERATOR,
    Tensor.get_device: 0,
}


def without_accelerator(value: Any) -> Any:
    """Return the device of tensors without values for an accelerator, and anything else as it is."""
    names_one = isinstance(value, torch.device | str) and str(value).partition(":")[0] == ACCELERATOR.type
    return torch.device("meta") if names_one else value
