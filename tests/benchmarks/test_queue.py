"""The queue of one process packs rows as TransferQueue does. Not covered: training in one process
(tests/end_to_end/test_one_process.py).
"""

import pytest
import torch
from one_process.queue import LocalQueue
from tensordict import NonTensorStack
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager


@pytest.mark.parametrize("lengths", [pytest.param((3, 2), id="two lengths"), pytest.param((3, 3), id="one length")])
def test_rows_are_packed_as_transfer_queue_packs_them_also_where_a_stack_would_fit(lengths):
    queue = LocalQueue()
    for key, length in zip("ab", lengths, strict=True):
        queue.rows[key] = {"mask": torch.ones(length), "step": torch.tensor(length), "text": "x" * length}
    rows = queue.kv_batch_get(["b", "a"])
    for name in ("mask", "step", "text"):
        theirs = AsyncSimpleStorageManager._pack_field_values([queue.rows[key][name] for key in "ba"])
        ours = rows.get(name)
        assert type(ours) is type(theirs)
        if isinstance(theirs, NonTensorStack):
            assert ours.tolist() == theirs.tolist()
        else:
            assert ours.is_nested == theirs.is_nested
            assert ours.layout == theirs.layout
            assert [part.tolist() for part in ours.unbind()] == [part.tolist() for part in theirs.unbind()]
