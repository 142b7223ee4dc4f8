"""Sends weights from the training worker to the rollout server, as NumPy arrays in messages of bounded size."""

import warnings
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import nn


def pack_weights(weights: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, np.ndarray]]:
    """Group named tensors into messages, reading the iterable to its end.

    Args:
        weights: name and full tensor, any floating dtype.
        max_bytes: maximum message size in bytes; a larger tensor gets its own message.

    Yields:
        Mappings from name to float32 array. At least one message, which may be empty.
    """
    message: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in weights:
        array = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
        if message and size + array.nbytes > max_bytes:
            yield message
            message = {}
            size = 0
        message[name] = array
        size += array.nbytes
    yield message


@torch.no_grad()
def copy_weights(model: nn.Module, message: Mapping[str, np.ndarray]) -> None:
    """Write a message into the model's parameters and buffers, in place.

    Args:
        model: the rollout's.
        message: name to float32 array, from `pack_weights`.

    Raises:
        KeyError: the model has no weight of a name.
        ValueError: the model's weight has another shape.
    """
    targets = model.state_dict()
    for name, array in message.items():
        if name not in targets:
            raise KeyError(f"the trainer sent the weight {name}, which {type(model).__name__} does not have")
        target = targets[name]
        if tuple(target.shape) != array.shape:
            raise ValueError(f"the trainer sent {name} with shape {array.shape}; the rollout has {tuple(target.shape)}")
        with warnings.catch_warnings():
            # Ray's shared memory is read-only; this code only reads it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            target.copy_(torch.from_numpy(array))


def missing_weights(model: nn.Module, received: set[str]) -> list[str]:
    """Return the names in the model's state that were not received.

    A weight that shares memory with one that was received, as tied weights do, is not missing.

    Args:
        model: the rollout's.
        received: the names that were received.
    """
    state = model.state_dict()
    written = {state[name].data_ptr() for name in received if name in state}
    return sorted(name for name, tensor in state.items() if tensor.data_ptr() not in written)
