"""The node clipx.trace: which prompts a run traces, how often, and to which folder."""

from dataclasses import dataclass
from typing import ClassVar

from verl_clipx.losses.base.parameters import Parameters, integer, number, only, optional, parameter


@dataclass(frozen=True, kw_only=True)
class Trace(Parameters):
    """Which prompts are traced, and when. A trace has what the loss knew of every token of the responses to them.

    Raises:
        ValueError: when built with a value outside a parameter's range.
    """

    node_key: ClassVar[str] = "clipx.trace"

    fraction: float = parameter(
        0.01,
        number(above=0, at_most=1),
        "share of the prompts that are traced; a hash of seed and prompt chooses them, so they are the same in every "
        "run",
    )
    every: int = parameter(10, integer(at_least=1, at_most=1_000_000), "one of this many rollout batches is traced")
    seed: int = parameter(
        0, integer(at_least=0, at_most=2**31 - 1), "seed of this choice: another seed traces other prompts"
    )
    folder: str | None = parameter(
        None,
        optional(only("a path", lambda value: isinstance(value, str) and value != "")),
        "where the files go; null: traces beside metrics.jsonl, NAME.traces beside another log of verl's file logger",
    )

    def includes(self, step: int) -> bool:
        """Return whether a training step is traced: step 1, and from there on one in every `every` steps.

        Args:
            step: the step's number, from 1.
        """
        return (step - 1) % self.every == 0
