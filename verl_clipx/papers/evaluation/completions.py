"""Reads the responses that verl's validation wrote: one folder for each seed and chunk of questions."""

from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path

import pandas

from verl_clipx.common.files import check_shape, parse_json, read_lines

ROW = {"index": int, "sample": int, "seed": int, "output": str, "length": int, "truncated": bool}
"""What a line of verl's file must hold: the agent loop's record, and the response without special tokens."""

COLUMNS = ("question", "sample", "seed", "text", "length", "truncated")
"""What is made of it."""


def read_dump(folder: Path, samples: int, asked: Collection[int] | None = None) -> pandas.DataFrame:
    """Read the responses of one run.

    Args:
        samples: samples of each question.
        asked: rows of the benchmark that were asked; None for those that the file has.

    Returns:
        Columns question, sample, seed, text, length, truncated.

    Raises:
        ValueError: a line cannot be read, or there are not exactly `samples` responses to each question.
    """
    paths = sorted(folder.glob("*.jsonl"))
    if len(paths) != 1:
        raise ValueError(f"{folder}: contains {len(paths)} files of verl's validation, not one; remove the folder")
    rows = []
    for number, line in enumerate(read_lines(paths[0]), 1):
        row = parse_json(line, f"{paths[0]}, line {number}")
        check_shape(paths[0], row, ROW)
        rows.append([row[key] for key in ROW])
    table = pandas.DataFrame(rows, columns=COLUMNS)
    questions = sorted(set(table["question"]) if asked is None else asked)
    pairs = sorted(zip(table["question"], table["sample"], strict=True))
    if pairs != list(product(questions, range(samples))):
        raise ValueError(
            f"{paths[0]}: {len(pairs)} responses, not exactly {samples} to each of {len(questions)} questions. "
            "Remove its folder, and the same `clipx eval run` samples them again"
        )
    return table


def chunk_folder(folder: Path, seed: int, questions: Sequence[int]) -> Path:
    """Return the folder of a chunk, named after its first question. No two chunks of a seed share one."""
    return folder / f"seed-{seed}" / f"{questions[0]:06d}"


def pending_chunks(folder: Path, seed: int, questions: int, samples: int, size: int) -> list[list[int]]:
    """Return the questions that a seed has not answered yet, in chunks of at most `size`."""
    answered = {question for chunk in _chunks(folder, seed) for question in read_dump(chunk, samples)["question"]}
    left = [question for question in range(questions) if question not in answered]
    return [left[start : start + size] for start in range(0, len(left), size)]


def read_completions(folder: Path, *, questions: int, samples: int, seeds: Sequence[int]) -> pandas.DataFrame:
    """Read all responses to a benchmark, ordered by question and sample.

    Args:
        folder: of a checkpoint and a benchmark.
        questions: number of questions; responses to later ones are left out.
        samples: samples per question and seed. Those of the first seed come first.

    Returns:
        ``questions * samples * len(seeds)`` rows; see `read_dump`.

    Raises:
        ValueError: a response is missing or occurs twice.
    """
    tables = [pandas.DataFrame(columns=COLUMNS)]
    for place, seed in enumerate(seeds):
        for chunk in _chunks(folder, seed):
            table = read_dump(chunk, samples)
            tables.append(table.assign(sample=table["sample"] + place * samples))
    table = pandas.concat(tables[1:] or tables)
    table = table[table["question"] < questions].sort_values(["question", "sample"], ignore_index=True)
    if len(table) != questions * samples * len(seeds) or table.duplicated(["question", "sample"]).any():
        raise ValueError(
            f"{folder}: {len(table)} of {questions * samples * len(seeds)} responses exist. "
            "Repeat the same `clipx eval run` command to finish them"
        )
    return table


def _chunks(folder: Path, seed: int) -> list[Path]:
    return sorted(filter(is_chunk, (folder / f"seed-{seed}").glob("*")))


def is_chunk(path: Path) -> bool:
    """Return whether a folder of a seed is that of a chunk, and not of a run that has not finished."""
    return path.name.isdecimal()
