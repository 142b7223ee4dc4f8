"""Masks as bits: comparisons and selections that leave no trace of what stands outside a mask.

On CPUs torch.where takes ten times as long as these, and a comparison with a bool as its result twice as long.
"""

import torch
from torch import Tensor

# Integers of the same width as a floating-point type.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in the form that `kept` uses: all bits set where it is true.

    Args:
        mask: bool, (sequences, length).
        dtype: floating-point type of the values that it will select.

    Returns:
        -1 where the mask is true, else 0, in the integer type of the same width, (sequences, length).
    """
    return mask.to(_INTEGERS[dtype.itemsize]).neg_()


def less(first: Tensor | float, second: Tensor | float) -> Tensor:
    """first < second, as signs: combine them with &, | and ~, and `spread` the result once.

    Args:
        first, second: finite or infinite, but not both infinite with one sign; at least one a floating-point tensor.

    Returns:
        The sign bit is set where first < second, the other bits are anything; in the integer type of the tensors'
        width, broadcast.
    """
    # The difference of -0 and 0 would be -0 with its sign set; adding 0 to either one, the smaller, prevents it.
    if not isinstance(second, Tensor) or second.ndim == 0:
        difference = first + (0.0 - second)
    elif not isinstance(first, Tensor) or first.ndim == 0:
        difference = (first + 0.0) - second
    else:
        difference = (first - second).add_(0.0)
    return difference.view(_INTEGERS[difference.element_size()])


def spread(signs: Tensor) -> Tensor:
    """Signs as bits: changes its argument.

    Args:
        signs: from `less`, or combined from several.

    Returns:
        -1 where the sign bit was set, else 0, in the same memory.
    """
    return signs.bitwise_right_shift_(8 * signs.element_size() - 1)


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """The values where the mask is true, 0 elsewhere; NaN and infinity outside leave no trace.

    Args:
        values: (sequences, length), floating point; no gradient flows through.
        mask: bool, or bits as from `as_bits` and `spread`, of any width, (sequences, length).

    Returns:
        (sequences, length), in the dtype of `values`.
    """
    bits = as_bits(mask, values.dtype) if mask.dtype == torch.bool else mask.to(_INTEGERS[values.element_size()])
    return (values.detach().view(bits.dtype) & bits).view(values.dtype)


def choose(mask: Tensor, values: Tensor, other: Tensor | float) -> Tensor:
    """The values where the mask is true, the other ones elsewhere; neither leaves a trace where it is not chosen.

    Args:
        mask: bits as from `spread`, (sequences, length).
        values: (sequences, length), floating point of the bits' width; no gradient flows through.
        other: the same, or a number.

    Returns:
        (sequences, length), in the dtype of `values`.
    """
    if not isinstance(other, Tensor):
        other = torch.full((), other, dtype=values.dtype, device=values.device)
    other = other.view(mask.dtype)
    return ((values.view(mask.dtype) ^ other).bitwise_and_(mask).bitwise_xor_(other)).view(values.dtype)
