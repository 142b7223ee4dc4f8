"""The rows of a rollout batch as the worker got them, and as each micro-batch brings them."""

import math
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

# The fields that a loss reads besides prompt and response, and which do not change from update to update.
MASKS = ("response_mask", "loss_mask", "attention_mask")
OLD_LOG_PROBS = "old_log_probs"
NUMBERS = (OLD_LOG_PROBS, "advantages", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")

# Fields that a trainer may pass on to the loss in a narrower dtype than the worker got them in. That is no fault: the
# announced gradient F * A is computed from what the loss reads.
MAY_BE_NARROWER = ("advantages",)


# A field's name, and the dtype that its values are rounded to before they are compared; None: they are not rounded.
Field = tuple[str, torch.dtype | None]


class Rows:
    """Compares the rows of micro-batches with those of the rollout batch, by values and not by bytes.

    A row is known by a hash of its prompt, its response and one more field, so that each field is compared by itself.
    A field that an engine drops is not compared, and a mask may be of any dtype.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Tensor]] = []
        # By field: how often the worker got a row of each hash, and how often such a row was trained.
        self._times_got: dict[Field, Counter[int]] = {}
        self._times_trained: defaultdict[Field, Counter[int]] = defaultdict(Counter)

    def receive(self, data: Any) -> None:
        """Keep rows as the worker gets them."""
        names = [name for name in ("prompts", "responses", *MASKS, *NUMBERS) if name in data]
        # Tensors by name and not verl's data themselves, from which verl removes fields while it trains.
        self._batches.append({name: data[name].cpu() for name in names})
        self._times_got.clear()

    def find_changed(self, rows: dict[Field, list[int]]) -> list[str]:
        """Return the names of the fields in which a micro-batch has rows that the worker did not get.

        Args:
            rows: the micro-batch's, as `hash_rows_by_field` returns them.
        """
        changed = set()
        for field, row_hashes in rows.items():
            if not self._count_got(field).keys() >= set(row_hashes):
                name, _ = field
                changed.add(name)
        return sorted(changed)

    def train(self, rows: dict[Field, list[int]]) -> bool:
        """Count the rows of a micro-batch as trained; return whether one was trained again before others were trained.

        Args:
            rows: the micro-batch's, as `hash_rows_by_field` returns them.
        """
        is_repeated = False
        for field, row_hashes in rows.items():
            times_got = self._count_got(field)
            times_trained = self._times_trained[field]
            times_trained.update(row_hashes)
            # Within the first epoch no row may be trained more often than the worker got it, within the second twice
            # as often, and so on.
            epoch = math.ceil(times_trained.total() / max(times_got.total(), 1))
            if any(times_trained[row] > epoch * times_got[row] for row in row_hashes):
                is_repeated = True
        return is_repeated

    def are_trained_equally_often(self) -> bool:
        """Return whether every row of the rollout batch was trained equally often."""
        for field, times_trained in self._times_trained.items():
            epochs = {times_trained[row] / times for row, times in self._count_got(field).items()}
            if len(epochs) > 1:
                return False
        return True

    def _count_got(self, field: Field) -> Counter[int]:
        """Return how often the worker got a row of each hash, by a field in the precision that micro-batches have."""
        if field not in self._times_got:
            name, dtype = field
            counter: Counter[int] = Counter()
            for batch in self._batches:
                if name in batch:
                    counter.update(hash_rows_with(batch, name, dtype))
            self._times_got[field] = counter
        return self._times_got[field]


def hash_rows_by_field(data: Any) -> dict[Field, list[int]]:
    """Return the hashes of a micro-batch's rows, in their order, by each field of MASKS and NUMBERS that it has."""
    fields = [(name, narrowed_dtype(name, data)) for name in (*MASKS, *NUMBERS) if name in data]
    return {field: hash_rows_with(data, *field) for field in fields}


def narrowed_dtype(name: str, data: Any) -> torch.dtype | None:
    """Return the half-precision dtype in which a field comes that may come in one; None: it is compared as it is."""
    dtype = data[name].dtype
    if name in MAY_BE_NARROWER and dtype in (torch.bfloat16, torch.float16):
        return dtype
    return None


def hash_rows_with(data: Any, name: str, dtype: torch.dtype | None) -> list[int]:
    """Return a hash of each row's prompt, response and values of one field.

    Hashes are compared only within one process, because Python's `hash` of bytes differs between processes.

    Args:
        data: verl's, with the fields "prompts" and "responses".
        name: the field.
        dtype: the field's values are rounded to it; None: they are not.
    """
    prompts = [canonical_bytes(row) for row in data["prompts"].cpu().unbind()]
    responses = [canonical_bytes(row) for row in data["responses"].cpu().unbind()]
    values = []
    for row in data[name].cpu().unbind():
        if dtype is not None:
            row = row.to(dtype)
        values.append(canonical_bytes(row, is_mask=name in MASKS))
    return [hash(parts) for parts in zip(prompts, responses, values, strict=True)]


def canonical_bytes(row: Tensor, *, is_mask: bool = False) -> bytes:
    """Return a row as bytes, such that equal numbers are equal bytes: in any dtype, -0.0 as 0.0, and any NaN.

    Args:
        row: (length,).
        is_mask: whether only the place of its zeros matters.
    """
    if is_mask:
        row = row != 0
    elif row.is_floating_point():
        row = row.double()
        # Adding 0 turns -0.0 into 0.0.
        row = torch.where(row.isnan(), torch.nan, row) + 0.0
    else:
        row = row.long()
    return row.contiguous().view(torch.uint8).numpy().tobytes()
