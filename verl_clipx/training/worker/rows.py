"""The rows of a rollout batch as the worker got them, and as each micro-batch brings them."""

import math
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

# What a loss reads of a row that its prompt and response don't say, and which does not change from update to update.
MASKS = ("response_mask", "loss_mask", "attention_mask")
OLD_LOG_PROBS = "old_log_probs"
NUMBERS = (OLD_LOG_PROBS, "advantages", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")
# A trainer may hand these on in a narrower dtype than the worker got: F * A is of what the loss reads.
MAY_BE_NARROWER = ("advantages",)


# A field and the dtype that its values are rounded to, or None.
Field = tuple[str, torch.dtype | None]


class Rows:
    """Compares the rows of micro-batches with those of the rollout batch, by values and not by bytes.

    A field that an engine drops is not compared, and a mask may be of any dtype.
    """

    def __init__(self) -> None:
        self._of_batch: list[dict[str, Tensor]] = []
        self._got: dict[Field, Counter[int]] = {}
        self._trained: defaultdict[Field, Counter[int]] = defaultdict(Counter)

    def get(self, data: Any) -> None:
        """Keeps rows as the worker gets them."""
        names = [name for name in ("prompts", "responses", *MASKS, *NUMBERS) if name in data]
        # verl takes fields out of the data that it trains on.
        self._of_batch.append({name: data[name].cpu() for name in names})
        self._got.clear()

    def changed(self, rows: dict[Field, list[int]]) -> list[str]:
        """Returns the fields of which a row of a micro-batch has other values than the worker got for that row.

        Args:
            rows: of the micro-batch, as `rows_of` returns them.
        """
        return sorted({field[0] for field, of_field in rows.items() if not self._known(field).keys() >= {*of_field}})

    def train(self, rows: dict[Field, list[int]]) -> bool:
        """Counts the rows of a micro-batch as trained, and returns whether one was trained again before others."""
        again = False
        for field, of_field in rows.items():
            times_got = self._known(field)
            times_trained = self._trained[field]
            times_trained.update(of_field)
            epoch = math.ceil(times_trained.total() / max(times_got.total(), 1))
            again = again or any(times_trained[row] > epoch * times_got[row] for row in of_field)
        return again

    def equally_often(self) -> bool:
        """Returns whether every row of the rollout batch was trained equally often."""
        for field, trained in self._trained.items():
            often = {trained[row] / times for row, times in self._known(field).items()}
            if len(often) > 1:
                return False
        return True

    def _known(self, field: Field) -> Counter[int]:
        """Returns how often the worker got each value of a field, in the precision in which micro-batches have it."""
        if field not in self._got:
            name, dtype = field
            batches = [batch for batch in self._of_batch if name in batch]
            self._got[field] = Counter(row for batch in batches for row in hashes(batch, name, dtype))
        return self._got[field]


def rows_of(data: Any) -> dict[Field, list[int]]:
    """Returns the hashes of a micro-batch's rows by each field that it has."""
    fields = [(name, narrowed(name, data)) for name in (*MASKS, *NUMBERS) if name in data]
    return {field: hashes(data, *field) for field in fields}


def narrowed(name: str, data: Any) -> torch.dtype | None:
    """Returns the half-precision dtype in which a field comes that may come in one; None: it is compared as it is."""
    dtype = data[name].dtype
    return dtype if name in MAY_BE_NARROWER and dtype in (torch.bfloat16, torch.float16) else None


def hashes(data: Any, name: str, dtype: torch.dtype | None) -> list[int]:
    """Returns a hash of every row's values of a field, with its prompt and response.

    Args:
        dtype: the values are rounded to it; None: as they are.
    """
    prompts = [values(row) for row in data["prompts"].cpu().unbind()]
    responses = [values(row) for row in data["responses"].cpu().unbind()]
    rows = []
    for row in data[name].cpu().unbind():
        if dtype is not None:
            row = row.to(dtype)
        rows.append(values(row, mask=name in MASKS))
    return [hash(row) for row in zip(prompts, responses, rows, strict=True)]


def values(row: Tensor, *, mask: bool = False) -> bytes:
    """Returns the values of a row: equal numbers are equal bytes, whatever their dtype, the sign of 0 and of NaN."""
    if mask:
        row = row != 0
    elif row.is_floating_point():
        row = row.double()
        # Adding 0 turns -0.0 into 0.0.
        row = torch.where(row.isnan(), torch.nan, row) + 0.0
    else:
        row = row.long()
    return row.contiguous().view(torch.uint8).numpy().tobytes()
