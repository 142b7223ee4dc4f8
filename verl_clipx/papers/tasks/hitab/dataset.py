"""HiTab's question answering samples as rows in verl's schema, from a local copy of the public release."""

import random
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_clipx.common.files import parse_json, read_bytes
from verl_clipx.papers.tasks.definition import DatasetDefinition, Row
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.hitab.answers import LIST_SEPARATOR
from verl_clipx.papers.tasks.hitab.table import SEPARATOR_IN_CELLS, table_text
from verl_clipx.papers.tasks.records import read_jsonl
from verl_clipx.papers.tasks.templates import template_named

DATA_SOURCE = "hitab"

MAX_BYTES = 256 << 20
"""Largest table that is unpacked."""

PROMPTS = ("boxed_step_by_step", "r1_base")

_SHARE = re.compile(r"%|\bper ?cent|percentage|proportion|\bshare\b|\brate\b", re.IGNORECASE)

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


def build_row(sample: dict[str, Any], table: str, index: int, split: str, prompt: str) -> Row:
    """Return the row of one sample."""
    aggregation = sample["aggregation"]
    truth = {
        "answers": [_answer_text(answer) for answer in sample["answer"]],
        # For "how many percent", the release stores 0.876 if it divided, and 87.6 if the table says so.
        "ratio": "div" in aggregation and bool(_SHARE.search(sample["question"])),
        "rounding": bool({"div", "average"} & set(aggregation)),
    }
    return {
        "data_source": DATA_SOURCE,
        "prompt": template_named(prompt).render(problem=problem(table, sample["question"])),
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


def problem(table: str, question: str) -> str:
    """Return the text of a template's field `problem`: the table, the question, and how to write several answers."""
    (message,) = template_named("table_question").render(table=table, question=question.strip())
    return message["content"]


def _rows(source: Path | None, file: str, split: str, prompt: str, order: int | None = None) -> Iterator[Row]:
    if source is None:
        raise FileNotFoundError(
            "HiTab is not on the hub in this form. Clone the repository microsoft/HiTab from GitHub and give its folder"
        )
    folder = source / "data" if (source / "data").is_dir() else source
    samples = folder / file
    if not samples.exists():
        raise FileNotFoundError(f"{samples} does not exist; give the release's repository or its folder data/")
    load = lru_cache(maxsize=64)(_table_loader(folder))
    numbered = list(enumerate(read_jsonl(samples)))
    if order is not None:
        random.Random(order).shuffle(numbered)
    for index, sample in numbered:
        where = f"{samples.name}, sample {index}"
        _check(sample, where)
        if not isinstance(sample["question"], str):
            # In one of the corrected test samples, the question is its former answer.
            warnings.warn(
                f"{where}: question={sample['question']!r} is not text, so the sample is left out", stacklevel=2
            )
            continue
        yield build_row(sample, load(sample["table_id"]), index, split, prompt)


def _table_loader(folder: Path) -> Callable[[str], str]:
    unpacked, packed = folder / "tables" / "raw", folder / "tables.zip"
    if unpacked.is_dir():

        def read(table_id: str) -> bytes:
            return read_bytes(unpacked / f"{table_id}.json")

    elif packed.is_file():
        try:
            archive = zipfile.ZipFile(packed)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{packed}: {error}; is the copy complete (git lfs)?") from None
        members = {name.rpartition("raw/")[2]: name for name in archive.namelist() if "raw/" in name}

        def read(table_id: str) -> bytes:
            member = archive.getinfo(members[f"{table_id}.json"])
            if member.file_size > MAX_BYTES:
                raise ValueError(f"{member.filename} of {packed}: larger than {MAX_BYTES} bytes; is it the right file?")
            return archive.read(member)

    else:
        raise FileNotFoundError(f"{folder}: neither tables/raw nor tables.zip; give the release's folder data/")

    def load(table_id: str) -> str:
        try:
            return table_text(parse_json(read(table_id), f"{table_id}.json"))
        except (OSError, KeyError) as error:
            raise FileNotFoundError(f"{folder}: table {table_id!r} does not exist ({error})") from None
        except ValueError as error:
            raise ValueError(f"{folder}, table {table_id!r}: {error}") from None

    return load


def _check(sample: dict[str, Any], where: str) -> None:
    for field in _FIELDS:
        if field not in sample:
            raise ValueError(
                f"{where}: it has no field {field!r}, only {sorted(sample)}; is it a file of HiTab's samples?"
            )
    if not sample["answer"]:
        raise ValueError(f"{where}: no answer; remove the sample")
    if re.fullmatch(r"[\w.-]+", str(sample["table_id"])) is None:
        raise ValueError(f"{where}: table_id={sample['table_id']!r} is not a file name")


def _answer_text(answer: Any) -> str:
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer).replace(LIST_SEPARATOR, SEPARATOR_IN_CELLS)


_LICENSE = "Computational Use of Data Agreement v1.0 (C-UDA-1.0)"

DATASETS = (
    DatasetDefinition(
        name="hitab",
        task="hitab",
        kind="train",
        summary="HiTab: questions about hierarchical tables of statistics and Wikipedia (local copy of the release)",
        license=_LICENSE,
        prompts=PROMPTS,
        rows=release_rows,
        splits=("train", "dev", "test"),
    ),
    DatasetDefinition(
        name="hitab_test_checked",
        task="hitab",
        kind="evaluation",
        summary="HiTab's test questions as corrected by its authors in October 2025 (local copy of the release)",
        license=_LICENSE,
        prompts=PROMPTS,
        rows=checked_rows,
        splits=("test",),
    ),
)
