"""Reads the puzzles that AR-Lopti's authors released."""

import ast
import warnings
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle, Split, solve
from verl_clipx.papers.tasks.knights_and_knaves.statement import Statement
from verl_clipx.papers.tasks.records import Record, local_records

# Seven people's statements take about 400 characters. Python's parser should not get much longer texts.
MAX_STATEMENTS_LENGTH = 4096

_OPERATORS = {"telling-truth": "knight", "lying": "knave", "<=>": "iff", "->": "if", "and": "and", "or": "or"}


def released_puzzles(source: Path, split: Split, people: Container[int]) -> Iterator[tuple[Puzzle, str, str]]:
    """Yield the puzzles of a split. Warn about test puzzles that equal a training puzzle apart from names and wording.

    Args:
        source: folder with `train.parquet` and `test.parquet`: `data/kk/instruct/merge_34567ppl` in the repository.
        people: numbers of people of the puzzles to yield.

    Yields:
        The puzzle, its problem in English, and its solution with a line per person.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a record is not a puzzle whose only solution is the one that it states; the message names it.
    """
    found = list(_read(source, split, people))
    if split == "test":
        trained = {puzzle.key for puzzle, *_ in _read(source, "train", people)}
        leaks = Counter(len(puzzle.statements) for puzzle, *_ in found if puzzle.key in trained)
        sizes = Counter(len(puzzle.statements) for puzzle, *_ in found)
        if leaks:
            counts = ", ".join(f"{leaks[size]} of {sizes[size]} with {size} people" for size in sorted(leaks))
            warnings.warn(
                f"{source / 'test.parquet'}: these test puzzles equal training puzzles, apart from names, order and "
                f"wording: {counts}",
                stacklevel=2,
            )
    yield from found


def _read(source: Path, split: Split, people: Container[int]) -> Iterator[tuple[Puzzle, str, str]]:
    path = source / f"{split}.parquet"
    for index, record in enumerate(local_records(path)):
        try:
            puzzle = _puzzle(record)
            problem, solution = str(record["quiz"]), str(record["solution_text_format"])
        except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"{path}, row {index}: {type(error).__name__}: {error}; is it from AR-Lopti's data/kk/instruct?"
            ) from None
        if len(puzzle.statements) in people:
            yield puzzle, problem, solution


def _puzzle(record: Record) -> Puzzle:
    text = record["statements"]
    if len(text) > MAX_STATEMENTS_LENGTH:
        raise ValueError(f"statements of {len(text)} characters; at most {MAX_STATEMENTS_LENGTH} are read")
    statements = tuple(map(_statement, ast.literal_eval(text)))
    solution = tuple(bool(knight) for knight in record["solution"])
    if solve(statements) != [solution]:
        raise ValueError(f"solution={solution} is not the only solution of {text}")
    return Puzzle(statements, solution)


def _statement(released: Any) -> Statement:
    operator, *parts = released
    if operator == "not":
        return ("not", _statement(*parts))
    if operator not in _OPERATORS:
        raise ValueError(f"statement {released!r} has an unknown form")
    return (_OPERATORS[operator], *(part if isinstance(part, int) else _statement(part) for part in parts))
