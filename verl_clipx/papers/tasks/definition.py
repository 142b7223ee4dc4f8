"""Describes a data set. The command `clipx papers data` reads only these descriptions."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = dict[str, Any]
"""One row of verl's Parquet schema: data_source, prompt, ability, reward_model, extra_info."""

RowBuilder = Callable[..., Iterator[Row]]
"""Called as `rows(source: Path | None, *, split: str, prompt: str, **options)`, it yields the rows of a split.

They are from a local copy, `source`. Without one, they are from the hub or generated.
"""


@dataclass(frozen=True)
class DatasetDefinition:
    """One data set that a task can build; sets.yaml explains the fields.

    Raises:
        ValueError: `kind` is unknown, or there is no prompt or no split; the message names the data set.
    """

    name: str
    task: str
    summary: str
    license: str
    prompts: Sequence[str]
    rows: RowBuilder
    splits: Sequence[str] = ("train", "test")
    kind: Literal["train", "evaluation"] = "train"
    hub: str | None = None
    repeats: bool = False
    generated: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("train", "evaluation"):
            raise ValueError(f"{self.name}: kind={self.kind!r} is unknown; use 'train' or 'evaluation'")
        for key in ("prompts", "splits"):
            if not getattr(self, key):
                raise ValueError(f"{self.name}: {key} is empty; name at least one")
