"""verl's queue between rollout and training, as a dictionary of this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.tensordict_utils import assign_non_tensor


class LocalQueue:
    """What verl's trainer calls of TransferQueue's module: rows by their keys, one partition."""

    def __init__(self):
        self.rows: dict[str, dict[str, Any]] = {}
        # By key, what is noted of a row beside it.
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str | None = None, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        """The rows of some keys, in their order; fields that no row has are left out, as TransferQueue does."""
        rows = [self.rows[key] for key in keys]
        wanted = [name for name in (select_fields or rows[0]) if name in rows[0]]
        return TensorDict({name: _packed([row[name] for row in rows]) for name in wanted}, batch_size=[len(rows)])

    def kv_batch_put(self, keys: Sequence[str], fields: TensorDict, partition_id: str | None = None) -> KVBatchMeta:
        """Adds fields, tensors, to rows that are there; returns their batch."""
        for name, values in fields.items():
            for key, value in zip(keys, values.unbind(), strict=True):
                self.rows[key][name] = value
        return KVBatchMeta(keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id)

    def kv_clear(self, keys: Sequence[str], partition_id: str | None = None) -> None:
        """Forgets rows."""
        for key in keys:
            del self.rows[key], self.tags[key]

    def data_of(self, batch: KVBatchMeta) -> TensorDict:
        """What verl's workers get for a batch: all fields of its rows, and what the trainer says of the batch."""
        data = self.kv_batch_get(batch.keys)
        assign_non_tensor(data, **batch.extra_info)
        return data


def _packed(values: Sequence[Any]) -> Any:
    """The values of a field, one a row, as TransferQueue packs them: nested even if all rows are of one length."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return NonTensorStack(*values)
    if all(value.dim() == 0 for value in values):
        return torch.stack(list(values))
    return torch.nested.as_nested_tensor(list(values), layout=torch.jagged)


@contextmanager
def queue_of_trainer() -> Iterator[LocalQueue]:
    """Puts a queue of this process in the place of TransferQueue's module, for verl's trainer alone."""
    queue, of_verl = LocalQueue(), trainer_base.tq
    trainer_base.tq = queue
    try:
        yield queue
    finally:
        trainer_base.tq = of_verl
