"""verl's queue between rollout and training, as a dictionary in this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tensordict_utils import assign_non_tensor


class LocalQueue:
    """The part of TransferQueue's module that verl's trainer calls: rows by their keys, in one partition."""

    def __init__(self):
        self.rows: dict[str, dict[str, Any]] = {}
        # Notes about each row, by key.
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str | None = None, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        """Return the rows of the given keys, in order; like TransferQueue, leaves out fields that no row has."""
        rows = [self.rows[key] for key in keys]
        wanted = [name for name in (select_fields or rows[0]) if name in rows[0]]
        return TensorDict({name: _packed([row[name] for row in rows]) for name in wanted}, batch_size=[len(rows)])

    def kv_batch_put(self, keys: Sequence[str], fields: TensorDict, partition_id: str | None = None) -> KVBatchMeta:
        """Adds tensor fields to existing rows; returns their batch."""
        for name, values in fields.items():
            for key, value in zip(keys, values.unbind(), strict=True):
                self.rows[key][name] = value
        return KVBatchMeta(keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id)

    def kv_clear(self, keys: Sequence[str], partition_id: str | None = None) -> None:
        """Removes rows."""
        for key in keys:
            del self.rows[key], self.tags[key]

    def data_of(self, batch: KVBatchMeta) -> TensorDict:
        """Return what verl's workers get for a batch: all fields of its rows, and the trainer's notes on the batch."""
        data = self.kv_batch_get(batch.keys)
        assign_non_tensor(data, **batch.extra_info)
        return data


def _packed(values: Sequence[Any]) -> Any:
    """Pack a field's values, one per row, like TransferQueue: nested even if all rows have the same length."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if all(value.dim() == 0 for value in values):
        return torch.stack(list(values))
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


@contextmanager
def queue_of_trainer() -> Iterator[LocalQueue]:
    """Replaces TransferQueue's module with a queue in this process, only for verl's trainer."""
    queue, of_verl = LocalQueue(), trainer_base.tq
    trainer_base.tq = queue
    try:
        yield queue
    finally:
        trainer_base.tq = of_verl
