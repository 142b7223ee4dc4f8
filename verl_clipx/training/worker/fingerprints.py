"""Fingerprints of a rollout batch in the trainer's process, and of each update's rows in the worker.

They depend neither on the order of the rows nor on padding or the number of ranks, and equal fingerprints mean equal
tokens but for one chance in 2^64. Both processes hash a row in the same way, so that the fingerprints of a batch's
updates add up to that of the batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy
import torch

# The version of what `hash_row` hashes, which a log keeps with its fingerprints. Raise it with every change of that:
# fingerprints of two definitions can't be compared. Definition 1, which logs without a number have, did not hash the
# positions of the tokens that count, and told -0.0 from 0.0.
DEFINITION = 2

# The fields of verl's data that `hash_row` gets, in its order.
FIELDS = ("prompts", "responses", "response_mask", "advantages")

# The fields of verl's data with the version of the weights that began to sample a response, and that which ended it.
OLDEST = "min_global_steps"
NEWEST = "max_global_steps"


class RowHashes(NamedTuple):
    """The hashes of a row, 64 bits each, and how many of its tokens count.

    Args:
        prompt: the hash of the prompt's tokens.
        pair: the hash of the prompt's and the response's tokens.
        row: the hash of all that an update trains on: prompt, response, the positions of the tokens that count, and
            their advantages.
        tokens: how many tokens of the response count, at least 1.
    """

    prompt: int
    pair: int
    row: int
    tokens: int


def hash_rows(data: Any) -> list[RowHashes | None]:
    """Return the hashes of each row of verl's data, jagged or padded; None for a row without tokens that count."""
    fields = [rows_in(data, name) for name in FIELDS]
    return [hash_row(*row) for row in zip(*fields, strict=True)]


def hash_row(
    prompt: numpy.ndarray, response: numpy.ndarray, mask: numpy.ndarray, advantages: numpy.ndarray
) -> RowHashes | None:
    """Hash a row.

    Args:
        prompt: its token ids without padding, (prompt length,).
        response: its token ids without padding, (response length,).
        mask: above 0 where a token of the response counts; padding may follow, (at least response length,).
        advantages: as long as the mask. They are read in float32, where a token counts.

    Returns:
        Its hashes; None if no token counts.
    """
    counted_positions = numpy.flatnonzero(mask > 0)
    if not len(counted_positions):
        return None
    counted_advantages = advantages[counted_positions].astype(numpy.float32)
    # Equal numbers get equal bytes: adding 0 turns -0.0 into 0.0, and every NaN becomes the same one.
    counted_advantages = counted_advantages + numpy.float32(0)
    counted_advantages[numpy.isnan(counted_advantages)] = numpy.nan
    prompt_digest = _digest(b"", prompt.astype(numpy.int64))
    pair_digest = _digest(prompt_digest, response.astype(numpy.int64))
    row_digest = _digest(pair_digest, counted_positions.astype(numpy.int64), counted_advantages)
    return RowHashes(
        prompt=int.from_bytes(prompt_digest, "big"),
        pair=int.from_bytes(pair_digest, "big"),
        row=int.from_bytes(row_digest, "big"),
        tokens=len(counted_positions),
    )


def _digest(before: bytes, *parts: numpy.ndarray) -> bytes:
    """Return the digest, 8 bytes, of what was hashed before and the bytes of these arrays."""
    content = b"".join(part.tobytes() for part in parts)
    return blake2b(before + content, digest_size=8).digest()


def rows_in(data: Any, name: str) -> list[numpy.ndarray]:
    """Return the rows of a field of verl's data, one of FIELDS.

    Args:
        data: jagged or padded.
        name: the field. Padding is taken off prompts and responses alone.

    Returns:
        For each row an array, (row length,), of the field's dtype, or float32 for half precision.
    """
    values = data[name].cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        # NumPy has no bfloat16. float32 holds every number of both dtypes exactly.
        values = values.float()
    if values.is_nested:
        return [row.numpy() for row in values.unbind()]
    rows = values.numpy()
    if name not in ("prompts", "responses"):
        return list(rows)
    length_field = f"{name.removesuffix('s')}_length"
    if length_field in data:
        # verl's v1 trainer has these fields, and pads prompts on the right too.
        lengths = data[length_field].cpu().numpy()
        is_token = numpy.arange(rows.shape[1]) < lengths[:, None]
    else:
        # Its other trainers pad prompts on the left.
        prompt_width = data["prompts"].shape[1]
        attention_mask = data["attention_mask"].bool().cpu().numpy()
        is_token = attention_mask[:, :prompt_width] if name == "prompts" else attention_mask[:, prompt_width:]
    return [row[is_token_of_row] for row, is_token_of_row in zip(rows, is_token, strict=True)]


@dataclass(frozen=True)
class BatchHashes:
    """The hashes of a rollout batch's rows, from which its fingerprints are made.

    Args:
        rows: the hashes of each row with tokens that count.
        versions: the oldest and the newest version of the weights that sampled it; None if they are not known.
        updates: the fingerprint of each update's rows, as the worker cut them; empty if the worker did not report them.
    """

    rows: Sequence[RowHashes]
    versions: tuple[int, int] | None = None
    updates: Sequence[int] = ()


def hash_batch(batch: Any, versions: tuple[int, int] | None = None, updates: Sequence[int] = ()) -> BatchHashes:
    """Hash a rollout batch of verl's trainer.

    Args:
        batch: verl's DataProto, as its trainers give it to `compute_data_metrics`, on the host.
        versions: the oldest and the newest version of the weights that sampled it; None: those that its rows name.
        updates: the updates' fingerprints, as the worker reports them.
    """
    rows = [row for row in hash_rows(batch.batch) if row is not None]
    fields_of_rows = batch.non_tensor_batch
    if versions is None and OLDEST in fields_of_rows and NEWEST in fields_of_rows:
        versions = span(fields_of_rows[OLDEST], fields_of_rows[NEWEST])
    return BatchHashes(rows=rows, versions=versions, updates=tuple(updates))


def join(first: BatchHashes | None, second: BatchHashes) -> BatchHashes:
    """Join the hashes of two rollout batches that are logged as one step.

    The responses to one prompt count as one group, even if some are in the first and some in the second batch.

    Args:
        first: the hashes of the step so far; None if there are none.
        second: those of the batch that is added.
    """
    if first is None:
        return second
    versions = None
    if first.versions is not None and second.versions is not None:
        versions_of_both = (*first.versions, *second.versions)
        versions = min(versions_of_both), max(versions_of_both)
    updates: tuple[int, ...] = ()
    # If the worker reported the updates of one batch alone, they are not all the updates of the step.
    if first.updates and second.updates:
        updates = (*first.updates, *second.updates)
    return BatchHashes(rows=[*first.rows, *second.rows], versions=versions, updates=updates)


def fingerprints_of(batch: BatchHashes) -> dict[str, Any]:
    """Return what identifies a rollout batch, as the log keeps it.

    Returns:
        definition: the DEFINITION of the fingerprints.
        prompts: the fingerprint of the prompts, in hexadecimal, as are the next two.
        responses: that of the responses, each with its prompt.
        rows: that of all that an update trains on.
        groups: how many prompts there are.
        sequences: how many responses with tokens that count.
        tokens: how many such tokens.
        distinct: how many different pairs of a prompt and a response.
        versions: the oldest and the newest version of the weights; absent if they are not known.
        updates: the fingerprint of each update's rows, in hexadecimal; absent if they are not known.
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
    """Return the oldest and the newest of weight versions; None if there are none, or if a response has no version.

    Args:
        oldest: of each response, the version that began to sample it.
        newest: of each response, the version that ended it.
    """
    oldest = [*oldest]
    newest = [*newest]
    if not oldest or None in (*oldest, *newest):
        return None
    return int(min(oldest)), int(max(newest))


def hexadecimal(hashes: Iterable[int]) -> str:
    """Return the sum of hashes modulo 2^64, which does not depend on their order, as 16 hexadecimal digits."""
    return f"{sum(hashes) % 2**64:016x}"


def hash_field(data: Any) -> torch.Tensor:
    """Return the hash of each row of verl's data as a field of them: int64, (rows,); 0 for a row without tokens."""
    hashes = [0 if row is None else row.row for row in hash_rows(data)]
    return torch.from_numpy(numpy.array(hashes, dtype=numpy.uint64).astype(numpy.int64))
