"""Fingerprints of a rollout batch in the trainer's process, and of each update's rows in the worker.

They depend neither on the order of the rows nor on the number of ranks, and equal fingerprints mean equal tokens but
for one chance in 2^64. Both processes hash rows alike, so that the updates' fingerprints add up to their batch's.
"""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy
import torch

FIELDS = ("prompts", "responses", "response_mask", "advantages")
# The fields of a batch that say which weights began to sample a response, and which ended it.
OLDEST, NEWEST = "min_global_steps", "max_global_steps"


def row_hashes(data: Any) -> list[tuple[int, int, int] | None]:
    """Returns three hashes of each row of verl's data, jagged or padded; None for a row without tokens that count.

    They are of its prompt; of this and the response; of both and the advantages: 64 bits each.
    """
    hashes: list[tuple[int, ...] | None] = []
    for prompt, response, mask, advantages in zip(*(rows_in(data, name) for name in FIELDS), strict=True):
        parts = (prompt.astype(numpy.int64), response.astype(numpy.int64), advantages[mask > 0].astype(numpy.float32))
        digest, of_row = b"", []
        for part in parts:
            digest = blake2b(digest + part.tobytes(), digest_size=8).digest()
            of_row.append(int.from_bytes(digest, "big"))
        hashes.append(tuple(of_row) if mask.any() else None)
    return hashes


def rows_in(data: Any, name: str) -> list[numpy.ndarray]:
    """Returns the rows of a field of verl's data, jagged or padded; those of prompts and responses without padding."""
    values = data[name].cpu()
    if values.is_nested:
        return [row.numpy() for row in values.unbind()]
    rows, length = values.numpy(), f"{name[:-1]}_length"
    if name not in FIELDS[:2]:
        return list(rows)
    if length in data:
        present = numpy.arange(rows.shape[1]) < data[length].cpu().numpy()[:, None]
    else:
        parts = data["attention_mask"].bool().cpu().tensor_split([data["prompts"].shape[1]], 1)
        present = parts[FIELDS.index(name)].numpy()
    return [row[there] for row, there in zip(rows, present, strict=True)]


def fingerprints_of(batch: Any, versions: tuple[Any, Any] | None = None) -> dict[str, Any]:
    """Returns what identifies a rollout batch of verl's trainer.

    Args:
        batch: verl's DataProto, as its trainers give it to `compute_data_metrics`, on the host.
        versions: of the weights that sampled it, the oldest and the newest; None: as its rows say.

    Returns:
        `prompts`, `responses` (each with its prompt) and `rows` (each with its advantages too), fingerprints in
        hexadecimal; `groups`, `sequences`, `tokens`, `distinct`: how many prompts, responses with tokens, tokens of
        theirs, and different pairs of a prompt and a response; `versions`, if they are known.
    """
    hashes = [of_row for of_row in row_hashes(batch.batch) if of_row is not None]
    prompts, pairs, rows = zip(*hashes, strict=True) if hashes else ((), (), ())
    of_rows = batch.non_tensor_batch
    if versions is None and OLDEST in of_rows and NEWEST in of_rows:
        versions = span(of_rows[OLDEST], of_rows[NEWEST])
    return {
        "prompts": hexadecimal({*prompts}),
        "responses": hexadecimal(pairs),
        "rows": hexadecimal(rows),
        "groups": len({*prompts}),
        "sequences": len(prompts),
        "tokens": int(batch.batch["response_mask"].sum()),
        "distinct": len({*pairs}),
    } | ({} if versions is None else {"versions": list(versions)})


def span(oldest: Iterable[Any], newest: Iterable[Any]) -> tuple[int, int] | None:
    """Returns the oldest and the newest of weight versions; None if a sampler does not say its own."""
    oldest, newest = [*oldest], [*newest]
    return (int(min(oldest)), int(max(newest))) if oldest and None not in (*oldest, *newest) else None


def join(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Returns the fingerprints of two rollout batches that are logged as one step, as of one batch."""
    if first is None:
        return second
    joined = {key: of + second[key] for key, of in first.items() if key in second and not isinstance(of, str)}
    joined |= {key: hexadecimal(int(of[key], 16) for of in (first, second)) for key in ("prompts", "responses", "rows")}
    if "versions" in joined:
        joined["versions"] = list(span(joined["versions"], joined["versions"]))
    return joined


def hexadecimal(hashes: Iterable[int]) -> str:
    """Returns the sum of hashes, which does not depend on their order, in 64 bits."""
    return f"{sum(hashes) % 2**64:016x}"


def hash_field(data: Any) -> torch.Tensor:
    """Returns the hash of each row of verl's data as a field of theirs, int64, (rows,); 0 without tokens."""
    hashes = [0 if of_row is None else of_row[-1] for of_row in row_hashes(data)]
    return torch.from_numpy(numpy.array(hashes, dtype=numpy.uint64).astype(numpy.int64))
