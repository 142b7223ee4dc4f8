"""Knights-and-knaves puzzles as rows in verl's Parquet schema, generated on the spot or from AR-Lopti's release."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.knights_and_knaves.generator import generate_puzzles
from verl_clipx.papers.tasks.knights_and_knaves.prompt import LETTERS, build_compact_prompt, compact_puzzle
from verl_clipx.papers.tasks.knights_and_knaves.puzzle import OPERATORS, Puzzle
from verl_clipx.papers.tasks.knights_and_knaves.release import released_puzzles
from verl_clipx.papers.tasks.knights_and_knaves.wording import word_puzzle, word_solution
from verl_clipx.papers.tasks.splits import Split
from verl_clipx.papers.tasks.templates import Messages, template_named

# Puzzles of each size. As in Logic-RL and AR-Lopti, 900 are for training and 100 for testing.
PAPER_PEOPLE = (3, 4, 5, 6, 7)
PAPER_COUNT: dict[Split, int] = {"train": 900, "test": 100}

# For the tiny policy. With these operators, there are few logically different puzzles: 21 of two people and 1359 of
# three for training, and 5 of two people and 151 of three for testing. Most counts are a little lower, because the last
# few puzzles would take long to draw.
TINY_OPERATORS = ("and", "or", "iff")
TINY_COUNTS: dict[Split, dict[int, int]] = {"train": {2: 20, 3: 1000}, "test": {2: 5, 3: 123}}


def rows(
    source: Path | None,
    *,
    split: str,
    prompt: str,
    seed: int = 0,
    people: Sequence[int] = PAPER_PEOPLE,
    count: int | None = None,
) -> Iterator[Row]:
    """Yield puzzles in English. Generated puzzles of different sizes are mixed; released ones keep their order.

    Args:
        source: None to generate puzzles, or the folder of AR-Lopti's release (see `released_puzzles`).
        split: "train" or "test". The generated splits share no puzzle, whatever the seeds.
        prompt: name of the template.
        seed: determines the generated puzzles; must be 0 for released ones.
        people: numbers of people, each 2 to 8.
        count: number of generated puzzles of each size, at least 1; None for the papers' 900 ("train") and 100
            ("test"); must be None for released ones.

    Raises:
        FileNotFoundError: a file of the release is missing.
        ValueError: an argument is out of range or does not apply to released puzzles, a released puzzle does not have
            exactly the solution that its record states, or there are too few different puzzles.
    """
    template = template_named(prompt)
    if source is not None:
        if seed or count is not None:
            raise ValueError(
                f"seed and count do not apply to released puzzles (seed={seed!r}, count={count!r}); use --limit"
            )
        for index, (puzzle, problem, truth) in enumerate(released_puzzles(source, split, people)):
            yield _build_row(puzzle, template.render(problem=problem), truth, split, index)
        return
    count = PAPER_COUNT[split] if count is None else count
    if count < 1:
        raise ValueError(f"count={count!r} is below 1; verl cannot load an empty file")
    rng = random.Random(f"wording-{split}-{seed}")
    counts = {size: count for size in people}
    for index, puzzle in enumerate(_generate_in_mixed_order(counts, seed, split, OPERATORS)):
        problem, names = word_puzzle(puzzle, rng)
        truth = word_solution(puzzle.solution, names)
        yield _build_row(puzzle, template.render(problem=problem), truth, split, index)


def tiny_rows(source: Path | None, *, split: str, prompt: str, seed: int = 0) -> Iterator[Row]:
    """Yield puzzles of two and three people in compact notation, for a policy of about a million parameters."""
    for index, puzzle in enumerate(_generate_in_mixed_order(TINY_COUNTS[split], seed, split, TINY_OPERATORS)):
        truth = word_solution(puzzle.solution, LETTERS[: len(puzzle.solution)])
        yield _build_row(puzzle, build_compact_prompt(puzzle.statements), truth, split, index)


def _generate_in_mixed_order(
    counts: Mapping[int, int], seed: int, split: Split, operators: tuple[str, ...]
) -> list[Puzzle]:
    """Return puzzles of all sizes in random order.

    Args:
        counts: the number of puzzles of each size.
    """
    puzzles = []
    for size, count in counts.items():
        puzzles += generate_puzzles(size, count, seed, split, operators)
    # The first rows of a file should contain all sizes, because people look at them, and a limit keeps only them.
    random.Random(f"order-{split}-{seed}").shuffle(puzzles)
    return puzzles


def _build_row(puzzle: Puzzle, prompt: Messages, truth: str, split: Split, index: int) -> Row:
    """Return the row of one puzzle.

    Args:
        truth: the solution with a line per person, which becomes the ground truth.
    """
    return {
        "data_source": "knights_and_knaves",
        "prompt": prompt,
        "ability": "logic",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": index,
            "split": split,
            "people": len(puzzle.statements),
            "statements": compact_puzzle(puzzle.statements),
        },
    }
