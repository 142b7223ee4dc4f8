"""How a task describes each of its data sets. The command `clipx data` reads only these descriptions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
"""One row of verl's Parquet schema: data_source, prompt, ability, reward_model, extra_info."""

RowBuilder = Callable[..., Iterator[Row]]
"""`rows(source: Path | None, *, split: str, prompt: str, **options)`; without a source, from the hub or generated."""


@dataclass(frozen=True)
class DatasetDefinition:
    """One data set that a task can build.

    Args:
        name: what `clipx data build` calls it, unique over all tasks.
        task: the task's folder name; its reward scores the rows.
        kind: whether rows are for training or for measuring.
        license: licence of the source as its owners state it, or "not stated".
        prompts: names of the prompt templates that fit, the default first.
        splits: names of the splits that `rows` accepts, in the order in which they are built.
        hub: repository id on the Hugging Face hub; None if the rows are generated, or only a local copy can be read.
        repeats: whether the source repeats problems on purpose, so that duplicates stay.
        generated: whether its problems are always generated, so that a local copy is refused.

    Raises:
        ValueError: if `kind` is unknown, or there is no prompt or no split; the message names the data set.
    """

    name: str
    task: str
    kind: Literal["train", "evaluation"]
    summary: str
    license: str
    prompts: tuple[str, ...]
    rows: RowBuilder
    splits: tuple[str, ...]
    hub: str | None = None
    repeats: bool = False
    generated: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("train", "evaluation"):
            raise ValueError(f"{self.name}: kind={self.kind!r} is unknown; use 'train' or 'evaluation'")
        for key in ("prompts", "splits"):
            if not getattr(self, key):
                raise ValueError(f"{self.name}: {key} is empty; name at least one")
