"""Fingerprints of a rollout batch in the trainer's process, and of each update's rows in the worker.

They depend neither on the order of the rows nor on padding or the number of ranks, and equal fingerprints mean equal
tokens but for one chance in 2^64. Both processes hash rows alike, so that the updates' fingerprints add up to their
batch's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy
import torch

# The number of the definition below, which a log keeps with its fingerprints. Raise it with every change of what is
# hashed: fingerprints of two definitions can't be compared. The first, which logs without a number have, left out where
# the mask lies, and told -0.0 from 0.0.
DEFINITION = 2
FIELDS = ("prompts", "responses", "response_mask", "advantages")
# The fields of a batch that say which weights began to sample a response, and which ended it.
OLDEST = "min_global_steps"
NEWEST = "max_global_steps"


class RowHashes(NamedTuple):
    """The hashes of a row, 64 bits each, and how many of its tokens count.

    Args:
        prompt: of the prompt's tokens.
        pair: of these and the response's.
        row: of all that an update trains on: both, which tokens count, and their advantages.
        tokens: how many tokens of the response count, at least 1.
    """

    prompt: int
    pair: int
    row: int
    tokens: int


def hash_rows(data: Any) -> list[RowHashes | None]:
    """Returns the hashes of each row of verl's data, jagged or padded; None for a row without tokens that count."""
    fields = [rows_in(data, name) for name in FIELDS]
    return [hash_row(*row) for row in zip(*fields, strict=True)]


def hash_row(
    prompt: numpy.ndarray, response: numpy.ndarray, mask: numpy.ndarray, advantages: numpy.ndarray
) -> RowHashes | None:
    """Returns the hashes of a row; None if no token counts.

    Args:
        prompt: its token ids without padding, (prompt length,).
        response: its token ids without padding, (response length,).
        mask: above 0 where a token counts; padding may follow, (at least response length,).
        advantages: as long as the mask. Read where a token counts, in float32; 0 and NaN have one spelling each.
    """
    counted = numpy.flatnonzero(mask > 0)
    if not len(counted):
        return None
    values = advantages[counted].astype(numpy.float32) + numpy.float32(0)
    values[numpy.isnan(values)] = numpy.nan
    of_prompt = _digest(b"", prompt.astype(numpy.int64))
    of_pair = _digest(of_prompt, response.astype(numpy.int64))
    of_row = _digest(of_pair, counted.astype(numpy.int64), values)
    return RowHashes(
        prompt=int.from_bytes(of_prompt, "big"),
        pair=int.from_bytes(of_pair, "big"),
        row=int.from_bytes(of_row, "big"),
        tokens=len(counted),
    )


def _digest(before: bytes, *parts: numpy.ndarray) -> bytes:
    content = b"".join(part.tobytes() for part in parts)
    return blake2b(before + content, digest_size=8).digest()


def rows_in(data: Any, name: str) -> list[numpy.ndarray]:
    """Returns the rows of a field of verl's data, jagged or padded; those of prompts and responses without padding."""
    values = data[name].cpu()
    # NumPy has no bfloat16. Every number of 16 bits is one of float32 too.
    in_numpy = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    if values.is_nested:
        return [row.numpy() for row in in_numpy.unbind()]
    rows = in_numpy.numpy()
    length = f"{name[:-1]}_length"
    if name not in FIELDS[:2]:
        return list(rows)
    if length in data:
        present = numpy.arange(rows.shape[1]) < data[length].cpu().numpy()[:, None]
    else:
        parts = data["attention_mask"].bool().cpu().tensor_split([data["prompts"].shape[1]], 1)
        present = parts[FIELDS.index(name)].numpy()
    return [row[there] for row, there in zip(rows, present, strict=True)]


@dataclass(frozen=True)
class BatchHashes:
    """The hashes of a rollout batch's rows, from which its fingerprints are made.

    Args:
        rows: of each row with tokens that count.
        versions: of the weights that sampled it, the oldest and the newest; None if they are not known.
        updates: of each update's rows, as the worker cut them; empty if the worker did not report them.
    """

    rows: Sequence[RowHashes]
    versions: tuple[int, int] | None = None
    updates: Sequence[int] = ()


def hash_batch(batch: Any, versions: tuple[int, int] | None = None, updates: Sequence[int] = ()) -> BatchHashes:
    """Returns the hashes of a rollout batch of verl's trainer.

    Args:
        batch: verl's DataProto, as its trainers give it to `compute_data_metrics`, on the host.
        versions: of the weights that sampled it, the oldest and the newest; None: as its rows say.
        updates: as the worker reports them.
    """
    rows = [row for row in hash_rows(batch.batch) if row is not None]
    of_rows = batch.non_tensor_batch
    if versions is None and OLDEST in of_rows and NEWEST in of_rows:
        versions = span(of_rows[OLDEST], of_rows[NEWEST])
    return BatchHashes(rows=rows, versions=versions, updates=tuple(updates))


def join(first: BatchHashes | None, second: BatchHashes) -> BatchHashes:
    """Returns the hashes of rollout batches that are logged as one step, as of one batch.

    A group that is cut between them is one group in what is logged.
    """
    if first is None:
        return second
    versions = None
    if first.versions is not None and second.versions is not None:
        both = (*first.versions, *second.versions)
        versions = min(both), max(both)
    updates: tuple[int, ...] = ()
    # Those of one part alone are not all that trained the step.
    if first.updates and second.updates:
        updates = (*first.updates, *second.updates)
    return BatchHashes(rows=[*first.rows, *second.rows], versions=versions, updates=updates)


def fingerprints_of(batch: BatchHashes) -> dict[str, Any]:
    """Returns what identifies a rollout batch, as the log keeps it.

    Returns:
        `definition`: that of the fingerprints; `prompts`, `responses` (each with its prompt) and `rows` (all that an
        update trains on), fingerprints in hexadecimal; `groups`, `sequences`, `tokens`, `distinct`: how many prompts,
        responses with tokens that count, such tokens, and different pairs of a prompt and a response; `versions` and
        `updates`, if they are known.
    """
    prompts = {row.prompt for row in batch.rows}
    fingerprints = {
        "definition": DEFINITION,
        "prompts": hexadecimal(prompts),
        "responses": hexadecimal(row.pair for row in batch.rows),
        "rows": hexadecimal(row.row for row in batch.rows),
        "groups": len(prompts),
        "sequences": len(batch.rows),
        "tokens": sum(row.tokens for row in batch.rows),
        "distinct": len({row.pair for row in batch.rows}),
    }
    if batch.versions is not None:
        fingerprints["versions"] = list(batch.versions)
    if batch.updates:
        fingerprints["updates"] = [hexadecimal([update]) for update in batch.updates]
    return fingerprints


def span(oldest: Iterable[Any], newest: Iterable[Any]) -> tuple[int, int] | None:
    """Returns the oldest and the newest of weight versions; None if a sampler does not say its own."""
    oldest = [*oldest]
    newest = [*newest]
    if not oldest or None in (*oldest, *newest):
        return None
    return int(min(oldest)), int(max(newest))


def hexadecimal(hashes: Iterable[int]) -> str:
    """Returns the sum of hashes, which does not depend on their order, in 64 bits."""
    return f"{sum(hashes) % 2**64:016x}"


def hash_field(data: Any) -> torch.Tensor:
    """Returns the hash of each row of verl's data as a field of theirs, int64, (rows,); 0 without tokens."""
    hashes = [0 if row is None else row.row for row in hash_rows(data)]
    return torch.from_numpy(numpy.array(hashes, dtype=numpy.uint64).astype(numpy.int64))
