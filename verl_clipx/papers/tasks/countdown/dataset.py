"""Countdown problems as rows in verl's schema: generated ones, and the public set that the papers train on."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from verl_clipx.papers.tasks.countdown.generator import CountdownConfig, Problem, generate_problems
from verl_clipx.papers.tasks.countdown.reward import BOXED_DATA_SOURCE
from verl_clipx.papers.tasks.definition import Row
from verl_clipx.papers.tasks.ground_truth import encode_ground_truth
from verl_clipx.papers.tasks.records import read_records
from verl_clipx.papers.tasks.splits import Split
from verl_clipx.papers.tasks.templates import Messages, template_named

COMPACT = "countdown_compact"
BOXED = "countdown_base_boxed"
PROMPTS = (COMPACT, "countdown_base", BOXED, "countdown_qwen_instruct")

PUBLIC_HUB = "Jiayi-Pan/Countdown-Tasks-3to4"

SIZES: dict[Split, int] = {"train": 4096, "test": 256}


def build_prompt(numbers: Sequence[int], target: int, template: str = COMPACT) -> Messages:
    """Return the chat messages of one problem. The compact template gives a text such as "2 3 5 = 16"."""
    shown = " ".join(map(str, numbers)) if template == COMPACT else list(numbers)
    return template_named(template).render(numbers=shown, target=target)


def build_row(numbers: Sequence[int], target: int, extra_info: dict[str, Any], template: str = COMPACT) -> Row:
    """Return the row of one problem, with the columns that verl's RLHFDataset and reward managers read."""
    truth = encode_ground_truth({"numbers": list(numbers), "target": target})
    return {
        "data_source": BOXED_DATA_SOURCE if template == BOXED else "countdown",
        "prompt": build_prompt(numbers, target, template),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra_info,
    }


def build_rows(problems: Sequence[Problem], split: Split, template: str = COMPACT) -> list[Row]:
    """Return one row per generated problem."""
    rows = []
    for index, problem in enumerate(problems):
        extra_info = {"index": index, "split": split, "solution": problem.solution}
        rows.append(build_row(problem.numbers, problem.target, extra_info, template))
    return rows


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
    """Yield generated problems. All have a solution by construction, and the two splits share none.

    Args:
        prompt: name of the template.
        size: number of problems; None for 4096 ("train") or 256 ("test").
        min_numbers, max_numbers, min_value, max_value, min_target, max_target, operators: see `CountdownConfig`.

    Raises:
        ValueError: an option is out of range, or there are too few such problems.
    """
    config = CountdownConfig(
        min_numbers=min_numbers,
        max_numbers=max_numbers,
        min_value=min_value,
        max_value=max_value,
        min_target=min_target,
        max_target=max_target,
        operators=operators,
    )
    count = SIZES[split] if size is None else size
    problems = generate_problems(config, count, seed, split)
    yield from build_rows(problems, split, prompt)


def public_rows(
    source: Path | None, *, split: str, prompt: str, train_size: int = 327_680, test_size: int = 1024
) -> Iterator[Row]:
    """Yield problems of the public set of 3 or 4 numbers up to 99.

    The set is one list. As in TinyZero and ACPO, its first `train_size` problems are for training and the next
    `test_size` for testing.

    Args:
        source: a local copy with the fields `target` and `nums`, or None for the hub.
        prompt: name of the template.

    Raises:
        ValueError: the set is too short for the split, or a record is not a problem. The message names the record by
            its index.
    """
    if split == "train":
        first = 0
        count = train_size
    else:
        first = train_size
        count = test_size
    records = read_records(source, hub=PUBLIC_HUB, hub_split="train")
    num_rows = 0
    for record in islice(records, first, first + count):
        numbers = record.get("nums")
        target = record.get("target")
        if not isinstance(target, int) or not _are_integers(numbers):
            raise ValueError(
                f"{PUBLIC_HUB}, record {first + num_rows}: fields {sorted(record)}; it must have an integer 'target' "
                "and a list 'nums' of integers"
            )
        yield build_row(numbers, target, {"index": num_rows, "split": split}, prompt)
        num_rows += 1
    if num_rows < count:
        raise ValueError(
            f"{PUBLIC_HUB}, {split}: only {num_rows} of {count} problems from number {first} on; is the copy "
            "complete? (options train_size, test_size)"
        )


def _are_integers(numbers: Any) -> bool:
    """Return whether a field of a record is a list of integers."""
    return isinstance(numbers, list) and all(isinstance(number, int) for number in numbers)
