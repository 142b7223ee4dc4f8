"""Generated Countdown problems as files, for tests that need some."""

from pathlib import Path

from verl_clipx.papers.tasks.building import build_split
from verl_clipx.papers.tasks.catalog import definition_named


def write_countdown(folder: Path, train: int, test: int, seed: int = 0) -> dict[str, Path]:
    """Build both splits, with so many problems in each; returns the file of each."""
    for split, size in (("train", train), ("test", test)):
        build_split(definition_named("countdown"), folder, split=split, options={"size": size, "seed": seed})
    return {split: folder / f"{split}.parquet" for split in ("train", "test")}
