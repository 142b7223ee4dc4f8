"""A traced update as the tensors that a loss takes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy
import pandas
import torch
from torch import Tensor

from verl_clipx.analysis.replay.traced_numbers import TracedTable, tables_at
from verl_clipx.analysis.runs.run import Run
from verl_clipx.losses.base.tokens import Inputs

# What the loss computes from; verl would have skipped an update with a value here that is not finite.
FINITE = ("log_prob", "old_log_prob", "unshaped_advantage", "weight", "advantage")


class TokenBatch(NamedTuple):
    """The traced tokens of an update as padded whole responses.

    Args:
        inputs: as the loss gets them: advantages before shaping, and a mask without what bypass mode rejected; optional
            fields are None if the trace lacks them.
        whole: the mask with what was rejected, bool, (sequences, length).
        correction: factor on F by which rollout correction changes it, (sequences, length), or None.
        weighted: F * A of the run, (sequences, length).
        micro_batch: number of each sequence's micro-batch over all ranks, int64, (sequences,).
        prompt: number of each sequence's prompt, from 0, int64, (sequences,).
    """

    inputs: Inputs
    whole: Tensor
    correction: Tensor | None
    weighted: Tensor
    micro_batch: Tensor
    prompt: Tensor

    def rows(self, chosen: Tensor) -> "TokenBatch":
        """Returns some of the sequences.

        Args:
            chosen: their indices, int64, in the order in which they are returned; an index may occur several times.
        """
        return TokenBatch(
            inputs=inputs_at(self.inputs, chosen),
            whole=self.whole[chosen],
            correction=None if self.correction is None else self.correction[chosen],
            weighted=self.weighted[chosen],
            micro_batch=self.micro_batch[chosen],
            prompt=self.prompt[chosen],
        )


def inputs_at(inputs: Inputs, rows: Tensor) -> Inputs:
    """Returns some sequences of a loss's inputs, by their indices, int64; a field that is missing stays None."""
    fields = {}
    for name, values in inputs._asdict().items():
        fields[name] = None if values is None else values[rows]
    return Inputs(**fields)


@dataclass(frozen=True)
class TracedTokens(TracedTable):
    """One traced update with its tokens as tensors too.

    Args:
        batch: the tokens, in whose mask's order the table is.
        decisions: a micro-batch's number, as in `TokenBatch`, to what the run's method decided for it.
    """

    batch: TokenBatch
    decisions: dict[int, Tensor]


def traced_step(run: Run, step: int | None) -> list[TracedTokens]:
    """Reads the updates of a step that a run traced.

    Args:
        step: the step; None: the last one in which a traced token has an advantage, or else the last one.

    Returns:
        Those that have tokens, and whose numbers are finite.

    Raises:
        ValueError: the run has no traces, or none of that step, or one cannot be read.
    """
    steps = sorted({shard.step for shard in run.shards})
    if not steps:
        raise ValueError(
            f"{run.traces}: no traces. Train with +clipx/trace=prompts, whose clipx.trace.every=1 and "
            "clipx.trace.fraction=1 trace every token."
        )
    if step is not None and step not in steps:
        raise ValueError(f"--step {step}: not traced. The traced steps are {', '.join(map(str, steps))}.")
    if step is not None:
        return _updates_at(run, step)
    for candidate in reversed(steps):
        updates = _updates_at(run, candidate)
        if any((update.table.advantage != 0).any() for update in updates):
            return updates
    return _updates_at(run, steps[-1])


def _updates_at(run: Run, step: int) -> list[TracedTokens]:
    """Reads those updates of a step that have tokens, and whose numbers are finite."""
    updates = []
    for traced in tables_at(run, step):
        if len(traced.table) and traced.is_finite(FINITE):
            updates.append(_with_tensors(traced))
    return updates


def _with_tensors(traced: TracedTable) -> TracedTokens:
    """Returns a traced update with its tokens as tensors."""
    batch, numbers = _batch(traced.table)
    decisions = {}
    for shard, facts in zip(traced.shards, traced.facts, strict=True):
        for micro_batch, decision in facts.decisions.items():
            place = (shard.rank, micro_batch)
            if place in numbers:
                decisions[numbers[place]] = torch.tensor(decision, dtype=torch.float64)
    return TracedTokens(**vars(traced), batch=batch, decisions=decisions)


def _batch(table: pandas.DataFrame) -> tuple[TokenBatch, dict[tuple[int, int], int]]:
    """Returns the tokens as tensors, and the numbers of micro-batches by rank and place on it."""
    same = table[["rank", "micro_batch", "prompt", "sample"]].fillna(-1)
    # Equal prompts in a rollout batch have the same name, and their samples may have the same numbers.
    first = same.ne(same.shift()).any(axis=1) | (table.position <= table.position.shift(fill_value=-1))
    row = first.cumsum().to_numpy() - 1
    column = numpy.arange(len(table)) - numpy.flatnonzero(first)[row]
    shape = int(row[-1]) + 1, int(column.max()) + 1
    starts = table[first]

    def values(name: str) -> Tensor:
        """Return a column of the table, padded with 0."""
        padded = torch.zeros(shape, dtype=torch.float32)
        padded[row, column] = torch.tensor(table[name].fillna(0.0).to_numpy(dtype=numpy.float32))
        return padded

    def optional(name: str) -> Tensor | None:
        """Return a column of the table, padded with 0; None if it lacks a value."""
        return None if table[name].isna().any() else values(name)

    whole = torch.zeros(shape, dtype=torch.bool)
    whole[row, column] = True
    rejected = optional("rejected")
    counted = optional("counted")
    mask = whole if rejected is None else whole & (rejected == 0)
    group = None if starts.group.isna().any() else torch.tensor(starts.group.to_numpy(dtype=numpy.int64))
    inputs = Inputs(
        log_prob=values("log_prob"),
        old_log_prob=values("old_log_prob"),
        advantages=values("unshaped_advantage"),
        mask=mask,
        counted=None if counted is None else counted > 0,
        rollout_log_prob=optional("rollout_log_prob"),
        entropy=optional("entropy"),
        group=group,
    )
    places = list(zip(starts["rank"], starts.micro_batch, strict=True))
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    micro_batch = torch.tensor([numbers[place] for place in places])
    batch = TokenBatch(
        inputs=inputs,
        whole=whole,
        correction=optional("correction"),
        weighted=values("weight") * values("advantage"),
        micro_batch=micro_batch,
        prompt=torch.tensor(pandas.factorize(starts.prompt)[0], dtype=torch.int64),
    )
    return batch, numbers
