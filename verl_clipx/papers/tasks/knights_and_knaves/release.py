"""Reads the puzzles that AR-Lopti's authors released."""

import ast
import warnings
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from verl_clipx.papers.tasks.knights_and_knaves.puzzle import Puzzle, Statement, solve
from verl_clipx.papers.tasks.records import Record, local_records
from verl_clipx.papers.tasks.splits import Split

# Seven people's statements take about 400 characters. Python's parser should not get much longer texts.
MAX_STATEMENTS_LENGTH = 4096

# From the release's names to those of `puzzle.LEAVES` and `puzzle.OPERATORS`.
_OPERATORS = {"telling-truth": "knight", "lying": "knave", "<=>": "iff", "->": "if", "and": "and", "or": "or"}


def released_puzzles(source: Path, split: Split, people: Container[int]) -> Iterator[tuple[Puzzle, str, str]]:
    """Yield the puzzles of a split. Warn about test puzzles that equal a training puzzle apart from names and wording.

    Args:
        source: folder with `train.parquet` and `test.parquet`: `data/kk/instruct/merge_34567ppl` in the repository.
        people: the sizes of the puzzles to yield, as numbers of people.

    Yields:
        The puzzle, its problem in English, and its solution with a line per person.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a record is not a puzzle whose only solution is the one that it states; the message names it.
    """
    released = list(_read(source, split, people))
    if split == "test":
        training_keys = {puzzle.key for puzzle, _, _ in _read(source, "train", people)}
        leaks = sum(puzzle.key in training_keys for puzzle, _, _ in released)
        if leaks:
            warnings.warn(
                f"{source / 'test.parquet'}: {leaks} of {len(released)} test puzzles equal training puzzles, apart "
                "from names, order and wording",
                stacklevel=2,
            )
    yield from released


def _read(source: Path, split: Split, people: Container[int]) -> Iterator[tuple[Puzzle, str, str]]:
    """Do what `released_puzzles` does, without its warning."""
    path = source / f"{split}.parquet"
    for index, record in enumerate(local_records(path)):
        try:
            puzzle = _puzzle(record)
            problem = str(record["quiz"])
            solution = str(record["solution_text_format"])
        except (KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"{path}, row {index}: {type(error).__name__}: {error}; is it from AR-Lopti's data/kk/instruct?"
            ) from None
        if len(puzzle.statements) in people:
            yield puzzle, problem, solution


def _puzzle(record: Record) -> Puzzle:
    """Return the puzzle of a record.

    Raises:
        KeyError, TypeError, ValueError, SyntaxError, RecursionError, MemoryError: the record has another form, or the
            solution that it states is not the only one.
    """
    # A tuple of all statements in Python's syntax; see `_statement`.
    text = record["statements"]
    if len(text) > MAX_STATEMENTS_LENGTH:
        raise ValueError(f"statements of {len(text)} characters; at most {MAX_STATEMENTS_LENGTH} are read")
    statements = tuple(map(_statement, ast.literal_eval(text)))
    solution = tuple(bool(knight) for knight in record["solution"])
    if solve(statements) != [solution]:
        raise ValueError(f"solution={solution} is not the only solution of {text}")
    return Puzzle(statements, solution)


def _statement(released: Any) -> Statement:
    """Return a statement of the release in the form of `puzzle.Statement`.

    Args:
        released: such as ("and", ("lying", 0), ("not", ("lying", 1))).
    """
    operator, *parts = released
    if operator == "not":
        (negated,) = parts
        return ("not", _statement(negated))
    # A part is the number of a person, or another statement.
    converted = [part if isinstance(part, int) else _statement(part) for part in parts]
    return (_OPERATORS[operator], *converted)
