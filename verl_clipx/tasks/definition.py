"""What a task says about each of its data sets; the command `clipx data` reads nothing else."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
"""One row of verl's Parquet schema: data_source, prompt, ability, reward_model, extra_info."""

RowBuilder = Callable[..., Iterator[Row]]
"""`rows(source: Path | None, *, split: str, prompt: str, **options)`: source None means the hub."""


@dataclass(frozen=True)
class DatasetDefinition:
    """One data set that a task can build.

    Raises:
        ValueError: if `kind` is unknown, or there is no prompt or no split; the message names the data set.
    """

    name: str
    """What `clipx data build` calls it, unique over all tasks."""

    task: str
    """The task's folder name; its reward scores the rows."""

    kind: Literal["train", "evaluation"]
    """Whether rows are for training or for measuring."""

    summary: str
    """One line for the list."""

    hub: str | None
    """Repository id on the Hugging Face hub, or None if the rows are generated or only a local copy can be read."""

    license: str
    """Licence of the source as its owners state it, or "not stated"."""

    prompts: tuple[str, ...]
    """Names of the prompt templates that fit, the default first."""

    rows: RowBuilder
    """Yields the rows of one split."""

    splits: tuple[str, ...]
    """Names of the splits that `rows` takes, in the order in which they are built."""

    repeats: bool = False
    """Whether problems that stand in it several times were drawn so on purpose, and stay."""

    def __post_init__(self) -> None:
        if self.kind not in ("train", "evaluation"):
            raise ValueError(f"{self.name}: kind={self.kind!r} is unknown; use 'train' or 'evaluation'")
        for key in ("prompts", "splits"):
            if not getattr(self, key):
                raise ValueError(f"{self.name}: {key} is empty; name at least one")
