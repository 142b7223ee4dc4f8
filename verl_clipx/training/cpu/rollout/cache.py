"""Operations on a Hugging Face key-value cache whose rows come and go. Rows are padded on the left."""

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def check_layers(cache: DynamicCache, model_name: str) -> None:
    """Raise ValueError if a model caches what cannot be padded and merged, such as recurrent state or sliding windows.

    Args:
        cache: one that the model has filled.
        model_name: for the message.
    """
    unsuitable = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if unsuitable:
        raise ValueError(
            f"the CPU rollout cannot batch {model_name}, which caches {', '.join(unsuitable)}: use a model with full "
            "attention"
        )


def select_rows(cache: DynamicCache, rows: torch.Tensor, first_column: int = 0) -> None:
    """Keep some rows (or repeat them), and drop the columns before ``first_column``, in place.

    Args:
        cache: layers of ``[rows, heads, length, head size]``.
        rows: ``[kept]`` int64 row numbers.
        first_column: number of leading columns that are padding in every kept row.
    """
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, first_column:].index_select(0, rows)
        layer.values = layer.values[:, :, first_column:].index_select(0, rows)


def append_rows(cache: DynamicCache, other: DynamicCache) -> None:
    """Add the rows of ``other`` below those of ``cache``, in place, padding the shorter of the two on the left."""
    for layer, added in zip(cache.layers, other.layers, strict=True):
        length = max(layer.keys.shape[-2], added.keys.shape[-2])
        layer.keys = torch.cat([_pad_left(layer.keys, length), _pad_left(added.keys, length)])
        layer.values = torch.cat([_pad_left(layer.values, length), _pad_left(added.values, length)])


def _pad_left(states: torch.Tensor, length: int) -> torch.Tensor:
    """Return keys or values, ``[rows, heads, any length, head size]``, padded with 0 on the left to a length."""
    return F.pad(states, (0, 0, length - states.shape[-2], 0))
