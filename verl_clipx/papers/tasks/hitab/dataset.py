"""HiTab's question answering samples as rows in verl's schema, from a local copy of the public release."""

import random
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from verl_clipx.common.files import parse_json, read_bytes
from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.hitab.answers import LIST_SEPARATOR
from verl_clipx.papers.tasks.hitab.table import SEPARATOR_IN_CELLS, table_text
from verl_clipx.papers.tasks.records import read_jsonl
from verl_clipx.papers.tasks.templates import template_named

# Words of a question that asks for a share.
_SHARE = re.compile(r"%|\bper ?cent|percentage|proportion|\bshare\b|\brate\b", re.IGNORECASE)

# The fields that each sample must have.
_FIELDS = ("id", "table_id", "question", "answer", "aggregation")


def release_rows(source: Path | None, *, split: str, prompt: str, order: int | None = None) -> Iterator[Row]:
    """Yield the questions of one split of the release, each with its table.

    Args:
        source: the release's repository, or its folder data/, which contains `<split>_samples.jsonl` and the tables in
            `tables.zip` or, unpacked, in `tables/raw/`.
        order: seed of a random order, so that a limit draws from the whole split; None for the release's order.

    Raises:
        FileNotFoundError: a file is missing, or no source is given, since the release is not on the hub.
        ValueError: a sample or a table differs from the release's format; the message names it.
    """
    yield from _rows(source, f"{split}_samples.jsonl", split, prompt, order)


def checked_rows(source: Path | None, *, split: str, prompt: str) -> Iterator[Row]:
    """Yield the test questions that the release's authors corrected in October 2025; see `release_rows`."""
    yield from _rows(source, "test_samples_qualitycheck.jsonl", split, prompt)


def _rows(source: Path | None, file: str, split: str, prompt: str, order: int | None = None) -> Iterator[Row]:
    """Yield the questions of a file of samples; see `release_rows`.

    Args:
        file: the name of the file.
    """
    if source is None:
        raise FileNotFoundError(
            "HiTab is not on the hub in this form. Clone the repository microsoft/HiTab from GitHub and give its folder"
        )
    folder = source / "data" if (source / "data").is_dir() else source
    samples = folder / file
    if not samples.exists():
        raise FileNotFoundError(f"{samples} does not exist; give the release's repository or its folder data/")
    readers = _table_readers(folder)

    # Several questions are about the same table.
    @lru_cache(maxsize=64)
    def read_table(table_id: str) -> str:
        """Return the text of a table."""
        name = f"{table_id}.json"
        if name not in readers:
            raise FileNotFoundError(f"{folder}: table {table_id!r} does not exist")
        try:
            content = readers[name]()
            return table_text(parse_json(content, name))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{folder}, table {table_id!r}: {type(error).__name__}: {error}; is it one of tables/raw?"
            ) from None

    numbered = list(enumerate(read_jsonl(samples)))
    if order is not None:
        random.Random(order).shuffle(numbered)
    for index, sample in numbered:
        where = f"{samples.name}, sample {index}"
        missing = [field for field in _FIELDS if field not in sample]
        if missing or not sample["answer"]:
            raise ValueError(f"{where}: it has no {', '.join(missing) or 'answer'}; is it a file of HiTab's samples?")
        if isinstance(sample["question"], str):
            yield _build_row(sample, read_table(sample["table_id"]), index, split, prompt)
        else:
            # In one of the corrected test samples, the question is its former answer.
            warnings.warn(
                f"{where}: question={sample['question']!r} is not text, so the sample is left out", stacklevel=2
            )


def _build_row(sample: dict[str, Any], table: str, index: int, split: str, prompt: str) -> Row:
    """Return the row of a sample.

    Args:
        sample: a sample of the release.
        table: the text of its table.
        index: the place of the sample in its file.
        prompt: name of the template.
    """
    # The names of the operations by which the answer is computed from the table.
    aggregation = sample["aggregation"]
    truth = {
        "answers": [_answer_text(answer) for answer in sample["answer"]],
        # For "how many percent", the release stores 0.876 if it divided, and 87.6 if the table says so.
        "ratio": "div" in aggregation and bool(_SHARE.search(sample["question"])),
        "rounding": bool({"div", "average"} & set(aggregation)),
    }
    (problem,) = template_named("table_question").render(table=table, question=sample["question"].strip())
    return {
        "data_source": "hitab",
        "prompt": template_named(prompt).render(problem=problem["content"]),
        "ability": "table",
        "reward_model": {"style": "rule", "ground_truth": encode_ground_truth(truth)},
        "extra_info": {
            "index": index,
            "split": split,
            "id": sample["id"],
            "table_id": sample["table_id"],
            "aggregation": list(aggregation),
        },
    }


def _answer_text(answer: Any) -> str:
    """Return an answer of the release as text: 5.0 as 5, and a vertical bar as in the table's cells."""
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer).replace(LIST_SEPARATOR, SEPARATOR_IN_CELLS)


def _table_readers(folder: Path) -> dict[str, Callable[[], bytes]]:
    """Return for each table's file name a function that returns the content of the file.

    Raises:
        FileNotFoundError: the folder has no tables.
        ValueError: the archive of the tables is damaged.
    """
    unpacked = folder / "tables" / "raw"
    packed = folder / "tables.zip"
    if unpacked.is_dir():
        return {path.name: partial(read_bytes, path) for path in unpacked.iterdir()}
    if not packed.is_file():
        raise FileNotFoundError(f"{folder}: neither tables/raw nor tables.zip; give the release's folder data/")
    try:
        archive = zipfile.ZipFile(packed)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{packed}: {error}; is the copy complete (git lfs)?") from None
    readers = {}
    for path in archive.namelist():
        _, folder_name, name = path.rpartition("raw/")
        if folder_name:
            readers[name] = partial(archive.read, path)
    return readers
