"""Stores completions in Parquet shards, each written once and atomically, so that an evaluation can stop anytime."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq

from verl_clipx.common.files import read_table, replacing

SCHEMA = pa.schema(
    [
        ("question", pa.int32()),
        ("sample", pa.int32()),
        ("seed", pa.int64()),
        ("text", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("length", pa.int32()),
        ("truncated", pa.bool_()),
    ]
)


@dataclass(frozen=True)
class Sample:
    """One completion.

    Args:
        question: row of the question in the benchmark, from 0.
        sample: which of the question's samples, from 0.
        text: the response without special tokens, as verl's reward managers decode it.
        tokens: the response's token ids, including the stop token.
        length: number of tokens, including the stop token.
        truncated: whether it reached the length limit before a stop token.
    """

    question: int
    sample: int
    seed: int
    text: str
    tokens: list[int]
    length: int
    truncated: bool


def write_shard(folder: Path, samples: list[Sample]) -> Path:
    """Write a shard, named after its first sample. No two shards share a sample, so the name is unique."""
    path = folder / f"{samples[0].question:06d}-{samples[0].sample:05d}.parquet"
    with replacing(path) as partial:
        pq.write_table(pa.Table.from_pylist([asdict(sample) for sample in samples], schema=SCHEMA), partial)
    return path


def finished_samples(folder: Path) -> set[tuple[int, int]]:
    """Return (question, sample) of every completion in a folder of shards."""
    table = _read(folder, ["question", "sample"])
    return set(zip(table["question"], table["sample"], strict=True))


def pending_shards(
    finished: set[tuple[int, int]], questions: int, samples: int, size: int
) -> list[list[tuple[int, int]]]:
    """Return what is left to sample, in shards of at most `size` completions.

    A question's samples are adjacent, so that back ends compute their common prompt once.

    Args:
        size: maximum number of completions per shard, at least 1.
    """
    if size < 1:
        raise ValueError(f"--shard-size {size}: must be at least 1")
    pairs = [(question, sample) for question in range(questions) for sample in range(samples)]
    left = [pair for pair in pairs if pair not in finished]
    return [left[start : start + size] for start in range(0, len(left), size)]


def read_samples(folder: Path, *, questions: int, samples: int) -> pandas.DataFrame:
    """Read all completions of a benchmark, ordered by question and sample.

    Args:
        samples: number of samples per question to read; further ones are left out.

    Returns:
        ``questions * samples`` rows with the columns of `SCHEMA`.

    Raises:
        ValueError: a completion is missing or occurs twice.
    """
    table = _read(folder, None)
    table = table[(table["sample"] < samples) & (table["question"] < questions)]
    table = table.sort_values(["question", "sample"], ignore_index=True)
    if table.duplicated(["question", "sample"]).any():
        raise ValueError(
            f"{folder}: contains a completion twice, as if two evaluations had run at the same time; remove it"
        )
    if len(table) != questions * samples:
        raise ValueError(
            f"{folder}: {len(table)} of {questions * samples} completions exist. "
            "Repeat the same `clipx eval run` command to finish them"
        )
    return table


def _read(folder: Path, columns: Iterable[str] | None) -> pandas.DataFrame:
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        return SCHEMA.empty_table().to_pandas()
    return pa.concat_tables(_read_shard(path, columns) for path in paths).to_pandas()


def _read_shard(path: Path, columns: Iterable[str] | None) -> pa.Table:
    try:
        return read_table(path, columns)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: cannot be read ({error}); remove it, and the same `clipx eval run` samples it again"
        ) from None
