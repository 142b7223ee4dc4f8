"""Countdown problems in verl's Parquet format: generated ones, and the public set that the papers train on."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.countdown.generator import Problem, generate_problems
from verl_clipx.tasks.countdown.prompt import BOXED, PROMPTS, build_prompt
from verl_clipx.tasks.definition import DatasetDefinition, Row
from verl_clipx.tasks.ground_truth import encode_ground_truth
from verl_clipx.tasks.records import read_records
from verl_clipx.tasks.splits import SPLITS, Split

DATA_SOURCE = "countdown"
BOXED_DATA_SOURCE = "countdown_boxed"
"""Rows whose prompt asks for a box; another reward reads the answer there."""

PUBLIC_HUB = "Jiayi-Pan/Countdown-Tasks-3to4"


def build_row(numbers: Sequence[int], target: int, extra_info: dict[str, Any], prompt: str = PROMPTS[0]) -> Row:
    """Return the row of one problem, with the columns that verl's RLHFDataset and reward managers read.

    Args:
        extra_info: what to keep beside it, at least `index` and `split`.
    """
    truth = encode_ground_truth({"numbers": list(map(int, numbers)), "target": target})
    return {
        "data_source": BOXED_DATA_SOURCE if prompt == BOXED else DATA_SOURCE,
        "prompt": build_prompt(numbers, target, prompt),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def build_rows(problems: Sequence[Problem], split: Split, prompt: str = PROMPTS[0]) -> list[Row]:
    """Return one row a generated problem."""
    return [
        build_row(
            problem.numbers,
            problem.target,
            {"index": index, "split": split, "solution": problem.solution},
            prompt,
        )
        for index, problem in enumerate(problems)
    ]


def generated_rows(
    source: Path | None,
    *,
    split: str,
    prompt: str,
    size: int | None = None,
    seed: int = 0,
    min_numbers: int = CountdownConfig.min_numbers,
    max_numbers: int = CountdownConfig.max_numbers,
    min_value: int = CountdownConfig.min_value,
    max_value: int = CountdownConfig.max_value,
    min_target: int = CountdownConfig.min_target,
    max_target: int = CountdownConfig.max_target,
    operators: str = CountdownConfig.operators,
) -> Iterator[Row]:
    """Yield generated problems, solvable by construction; the two splits share none.

    Args:
        source: must be None, nothing is read.
        split: "train" or "test".
        size: number of problems; 4096 for training and 256 for testing by default.
        min_numbers, max_numbers, min_value, max_value, min_target, max_target, operators: see `CountdownConfig`.

    Raises:
        ValueError: if a source is given, or a value is out of its range.
    """
    if source is not None:
        raise ValueError(f"source={source}: countdown's problems are generated; leave out --from")
    config = CountdownConfig(min_numbers, max_numbers, min_value, max_value, min_target, max_target, operators)
    count = size if size is not None else DEFAULT_SIZES[split]
    yield from build_rows(generate_problems(config, count, seed, split), split, prompt)


DEFAULT_SIZES: dict[Split, int] = {"train": 4096, "test": 256}


def public_rows(
    source: Path | None, *, split: str, prompt: str, train_size: int = 327_680, test_size: int = 1024
) -> Iterator[Row]:
    """Yield problems of the public set of 3 or 4 numbers up to 99.

    The set has one list; the papers (ACPO, after TinyZero) take its first `train_size` problems for training and the
    next `test_size` for testing.

    Args:
        source: a local copy with the fields `target` and `nums`, or None for the hub.
        split: "train" or "test".

    Raises:
        ValueError: if the set is too short for the split, or a record is not a problem; the message names it.
    """
    first, count = (0, train_size) if split == "train" else (train_size, test_size)
    records = read_records(source, hub=PUBLIC_HUB, hub_split="train")
    index = -1
    for index, record in enumerate(islice(records, first, first + count)):
        numbers, target = record.get("nums"), record.get("target")
        if not isinstance(target, int) or not isinstance(numbers, Sequence) or isinstance(numbers, str):
            raise ValueError(
                f"{PUBLIC_HUB}, record {first + index}: fields {sorted(record)}; it must have an integer 'target' and "
                "a list 'nums'"
            )
        yield build_row(numbers, target, {"index": index, "split": split}, prompt)
    if index + 1 < count:
        raise ValueError(
            f"{PUBLIC_HUB}, {split}: only {index + 1} of {count} problems from number {first} on; is the copy "
            "complete? (options train_size, test_size)"
        )


DATASETS = (
    DatasetDefinition(
        name="countdown",
        task="countdown",
        kind="train",
        summary="Generated Countdown problems of a chosen difficulty, for small policies",
        hub=None,
        license="Apache-2.0 (generated by this project)",
        prompts=PROMPTS,
        rows=generated_rows,
        splits=SPLITS,
    ),
    DatasetDefinition(
        name="countdown_3to4",
        task="countdown",
        kind="train",
        summary="Public Countdown problems of 3 or 4 numbers, split as in ACPO: 327,680 and 1,024",
        hub=PUBLIC_HUB,
        license="not verified; see the hub",
        prompts=(*PROMPTS[1:], PROMPTS[0]),
        rows=public_rows,
        splits=SPLITS,
    ),
)
