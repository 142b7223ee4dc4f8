"""Finds how much of an evaluation set is already in a training set, by the word n-grams that problems share.

The report is a warning, not a verdict: a shared 13-gram can be a common phrase, and a reworded problem shares none.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.common.files import parquet_file
from verl_clipx.tasks.templates import Messages, problem_text

# GPT-3's contamination analysis (Brown et al. 2020, appendix C) and most later ones use 13 words.
NGRAM_SIZE = 13

MAX_EXAMPLES = 5

_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class OverlapExample:
    """A pair of problems that share an n-gram."""

    train_row: int
    """Row of the training set, from 0."""

    evaluation_row: int
    """Row of the evaluation set, from 0."""

    shared: str
    """The first shared n-gram, or the whole of a short problem."""


@dataclass(frozen=True)
class OverlapReport:
    """What two sets share.

    Args:
        ngram_size: words in an n-gram; a problem with fewer words is compared as a whole.
        train_rows_touched: number of training rows that share an n-gram with some evaluation row.
        evaluation_rows_touched: number of evaluation rows that share an n-gram with some training row.
        examples: the first pairs that were found, at most `MAX_EXAMPLES` and one per evaluation row.
    """

    ngram_size: int
    train_rows: int
    evaluation_rows: int
    train_rows_touched: int
    evaluation_rows_touched: int
    examples: tuple[OverlapExample, ...]


def word_ngrams(text: str, size: int = NGRAM_SIZE) -> list[str]:
    """Return a text's word n-grams, in lower case and without punctuation.

    Returns:
        The n-grams in order, each with blanks between its words. If the text has fewer than `size` words, all of them
        form one n-gram; without any word, there is none.
    """
    words = _WORD.findall(text.casefold())
    if len(words) < size:
        return [" ".join(words)] if words else []
    return [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)]


def find_overlap(train: Iterable[str], evaluation: Iterable[str], size: int = NGRAM_SIZE) -> OverlapReport:
    """Compare the problems of a training set with those of an evaluation set.

    Args:
        train: a text per training row; read once and not kept.
        evaluation: a text per evaluation row; its n-grams are kept in memory.
        size: words in an n-gram, at least 1.
    """
    owners: dict[str, list[int]] = defaultdict(list)
    evaluation_rows = 0
    for row, text in enumerate(evaluation):
        evaluation_rows += 1
        for ngram in dict.fromkeys(word_ngrams(text, size)):
            owners[ngram].append(row)
    touched: dict[int, OverlapExample] = {}
    train_rows = train_rows_touched = 0
    for train_row, text in enumerate(train):
        train_rows += 1
        shared = [ngram for ngram in dict.fromkeys(word_ngrams(text, size)) if ngram in owners]
        train_rows_touched += bool(shared)
        for ngram in shared:
            for row in owners[ngram]:
                touched.setdefault(row, OverlapExample(train_row, row, ngram))
    return OverlapReport(
        ngram_size=size,
        train_rows=train_rows,
        evaluation_rows=evaluation_rows,
        train_rows_touched=train_rows_touched,
        evaluation_rows_touched=len(touched),
        examples=tuple(touched.values())[:MAX_EXAMPLES],
    )


def compare_files(train: Path, evaluation: Path) -> OverlapReport:
    """Compare two Parquet files in verl's schema. The text of known prompt templates does not count.

    Raises:
        FileNotFoundError, ValueError: see `problems`.
    """
    return find_overlap(problems(train), problems(evaluation))


def problems(path: Path) -> Iterator[str]:
    """Yield the problem text of each row of a Parquet file in verl's schema.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it is not a Parquet file, or has no column `prompt`.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a Parquet file that `clipx data build` wrote")
    with parquet_file(path, ["prompt"]) as file:
        if "prompt" not in file.schema_arrow.names:
            raise ValueError(
                f"{path}: it has no column 'prompt', only {file.schema_arrow.names}; give a file in verl's schema"
            )
        for batch in file.iter_batches(batch_size=1024, columns=["prompt"]):
            for prompt in batch.column("prompt").to_pylist():
                yield _problem(prompt)


def _problem(prompt: Messages | str) -> str:
    # verl also accepts a plain string, which data sets from other tools may contain.
    return prompt if isinstance(prompt, str) else problem_text(prompt)
