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

# The columns that must be finite: verl would have skipped an update with another value in one of them.
FINITE_COLUMNS = ("log_prob", "old_log_prob", "unshaped_advantage", "weight", "advantage")


class TokenBatch(NamedTuple):
    """The traced tokens of an update as padded whole responses.

    Args:
        inputs: what the loss gets. The advantages are those before shaping. The mask is without the tokens that bypass
            mode rejected or that +clipx/mask took out. Optional fields are None if the trace lacks them.
        traced_mask: the mask of all traced tokens, also of those that were rejected or taken out, bool,
            (sequences, length).
        correction: the factor by which rollout correction multiplies F, (sequences, length); None if the run had none.
        weighted: F * A of the run, (sequences, length).
        micro_batch: number of each sequence's micro-batch over all ranks, int64, (sequences,).
        prompt: number of each sequence's prompt, from 0, int64, (sequences,).
    """

    inputs: Inputs
    traced_mask: Tensor
    correction: Tensor | None
    weighted: Tensor
    micro_batch: Tensor
    prompt: Tensor

    def rows(self, chosen: Tensor) -> "TokenBatch":
        """Return some of the sequences.

        Args:
            chosen: the indices of the sequences, int64, in the order in which they are returned. An index may occur
                several times.
        """
        correction = None
        if self.correction is not None:
            correction = self.correction[chosen]
        return TokenBatch(
            inputs=inputs_at(self.inputs, chosen),
            traced_mask=self.traced_mask[chosen],
            correction=correction,
            weighted=self.weighted[chosen],
            micro_batch=self.micro_batch[chosen],
            prompt=self.prompt[chosen],
        )


def inputs_at(inputs: Inputs, rows: Tensor) -> Inputs:
    """Return some sequences of a loss's inputs; a field that is None stays None.

    Args:
        inputs: the inputs of all sequences.
        rows: the indices of the sequences, int64.
    """
    fields = {}
    for name, values in inputs._asdict().items():
        fields[name] = None if values is None else values[rows]
    return Inputs(**fields)


@dataclass(frozen=True)
class TracedTokens(TracedTable):
    """A traced update as a table and as tensors.

    Args:
        batch: the tokens. The rows of `table` are the tokens of `batch.traced_mask`, in its row-major order.
        decisions: from a micro-batch's number, as in `TokenBatch`, to what the run's method decided for it.
    """

    batch: TokenBatch
    decisions: dict[int, Tensor]


def read_traced_updates(run: Run, step: int | None) -> list[TracedTokens]:
    """Read the updates of a step that a run traced.

    Args:
        run: the run.
        step: the number of the step. None takes the last traced step in which a token has an advantage other than 0.
            If there is none, it takes the last traced step of which an update can be replayed.

    Returns:
        The updates of the step that have tokens and only finite numbers; an empty list if there is none.

    Raises:
        ValueError: the run has no traces, or the step was not traced, or a file of the traces cannot be read.
    """
    steps = sorted({shard.step for shard in run.shards})
    if not steps:
        raise ValueError(
            f"{run.traces or run.name}: no traces. Train with +clipx/trace=prompts. It traces every token if "
            "clipx.trace.every=1 and clipx.trace.fraction=1."
        )
    if step is not None:
        if step not in steps:
            raise ValueError(f"step {step} was not traced. The traced steps are {', '.join(map(str, steps))}.")
        return _read_updates_at(run, step)
    last_updates: list[TracedTokens] = []
    for candidate in reversed(steps):
        updates = _read_updates_at(run, candidate)
        if any((update.table.advantage != 0).any() for update in updates):
            return updates
        if not last_updates:
            last_updates = updates
    return last_updates


def _read_updates_at(run: Run, step: int) -> list[TracedTokens]:
    """Read the updates of a step that have tokens and only finite numbers."""
    updates = []
    for traced in tables_at(run, step):
        if len(traced.table) and traced.is_finite(FINITE_COLUMNS):
            updates.append(_add_tensors(traced))
    return updates


def _add_tensors(traced: TracedTable) -> TracedTokens:
    """Return a traced update with its tokens as tensors."""
    batch, number_by_place = _make_batch(traced.table)
    decisions = {}
    for shard, facts in zip(traced.shards, traced.facts, strict=True):
        for micro_batch, decision in facts.decisions.items():
            place = (shard.rank, micro_batch)
            if place in number_by_place:
                decisions[number_by_place[place]] = torch.tensor(decision, dtype=torch.float64)
    return TracedTokens(**vars(traced), batch=batch, decisions=decisions)


def _make_batch(table: pandas.DataFrame) -> tuple[TokenBatch, dict[tuple[int, int], int]]:
    """Return the tokens of an update as tensors.

    Args:
        table: a row for each token; those of a response are adjacent and in order.

    Returns:
        The tokens, and the numbers that the batch gives to micro-batches: from a rank and a micro-batch's number on
        that rank to its number over all ranks.
    """
    response = table[["rank", "micro_batch", "prompt", "sample"]].fillna(-1)
    is_other_response = response.ne(response.shift()).any(axis=1)
    # Equal prompts in a rollout batch have the same name, and their samples may have the same numbers. The second of
    # two such responses begins where the position does not rise.
    position_falls = table.position <= table.position.shift(fill_value=-1)
    is_first_token = is_other_response | position_falls
    row = is_first_token.cumsum().to_numpy() - 1
    column = numpy.arange(len(table)) - numpy.flatnonzero(is_first_token)[row]
    shape = (int(row[-1]) + 1, int(column.max()) + 1)
    first_tokens = table[is_first_token]

    def pad(name: str) -> Tensor:
        """Return a column of the table, (sequences, length), padded with 0."""
        padded = torch.zeros(shape, dtype=torch.float32)
        padded[row, column] = torch.tensor(table[name].fillna(0.0).to_numpy(dtype=numpy.float32))
        return padded

    def pad_if_complete(name: str) -> Tensor | None:
        """Return a column of the table, (sequences, length), padded with 0; None if it lacks a value."""
        if table[name].isna().any():
            return None
        return pad(name)

    traced_mask = torch.zeros(shape, dtype=torch.bool)
    traced_mask[row, column] = True
    rejected = pad_if_complete("rejected")
    mask = traced_mask if rejected is None else traced_mask & (rejected == 0)
    counted = pad_if_complete("counted")
    group = None
    if not first_tokens.group.isna().any():
        group = torch.tensor(first_tokens.group.to_numpy(dtype=numpy.int64))
    inputs = Inputs(
        log_prob=pad("log_prob"),
        old_log_prob=pad("old_log_prob"),
        advantages=pad("unshaped_advantage"),
        mask=mask,
        counted=None if counted is None else counted > 0,
        rollout_log_prob=pad_if_complete("rollout_log_prob"),
        entropy=pad_if_complete("entropy"),
        group=group,
    )
    places = list(zip(first_tokens["rank"], first_tokens.micro_batch, strict=True))
    number_by_place = {place: number for number, place in enumerate(dict.fromkeys(places))}
    batch = TokenBatch(
        inputs=inputs,
        traced_mask=traced_mask,
        correction=pad_if_complete("correction"),
        weighted=pad("weight") * pad("advantage"),
        micro_batch=torch.tensor([number_by_place[place] for place in places]),
        prompt=torch.tensor(pandas.factorize(first_tokens.prompt)[0], dtype=torch.int64),
    )
    return batch, number_by_place
