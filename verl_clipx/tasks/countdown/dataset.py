"""Countdown problems in verl's Parquet format."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_clipx.tasks.countdown.config import CountdownConfig
from verl_clipx.tasks.countdown.generator import Problem, Split, generate_problems
from verl_clipx.tasks.countdown.prompt import build_prompt

DATA_SOURCE = "countdown"


def build_rows(problems: Sequence[Problem], split: Split) -> list[dict[str, Any]]:
    """Return one row a problem, with the columns that verl's RLHFDataset and reward managers read."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": build_prompt(problem.numbers, problem.target),
            "ability": "math",
            "reward_model": {
                "style": "rule",
                "ground_truth": {"numbers": list(problem.numbers), "target": problem.target},
            },
            "extra_info": {"index": index, "split": split, "solution": problem.solution},
        }
        for index, problem in enumerate(problems)
    ]


def write_dataset(
    folder: Path, config: CountdownConfig, train_size: int, test_size: int, seed: int
) -> dict[Split, Path]:
    """Write train.parquet and test.parquet; they share no problem, and the same arguments give the same rows.

    Args:
        folder: where to write; created if missing. Each file appears whole or not at all.
        config: difficulty.
        train_size: number of training problems, at least 1.
        test_size: number of held-out problems, at least 1.
        seed: seed of both splits.

    Returns:
        The file of each split.

    Raises:
        ValueError: if a size is below 1, or larger than the configuration allows.
    """
    sizes: dict[Split, int] = {"train": train_size, "test": test_size}
    for split, size in sizes.items():
        if size < 1:
            raise ValueError(f"{split}_size={size!r} is below 1; verl cannot load an empty file")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for split, size in sizes.items():
        table = pa.Table.from_pylist(build_rows(generate_problems(config, size, seed, split), split))
        paths[split] = folder / f"{split}.parquet"
        partial = folder / f".{split}.parquet.{os.getpid()}"
        pq.write_table(table, partial)
        partial.replace(paths[split])
    return paths
