"""Collects what the loss knows about traced responses, in the training thread, and passes it to the writer.

The host knows beforehand which rows are traced, and their values are copied to it without waiting.
"""

from collections import Counter
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_clipx.losses.applying.loss import apply
from verl_clipx.losses.applying.token_trace import TokenTrace, observed_token_trace, token_trace
from verl_clipx.losses.base.tokens import Inputs
from verl_clipx.run.trace import Trace
from verl_clipx.run.trace_format import Shard, UpdateFacts, remove_shards, write_shard
from verl_clipx.training.observing import Observers
from verl_clipx.training.worker.aggregation import shares_of
from verl_clipx.training.worker.fingerprints import rows_in
from verl_clipx.training.worker.layout import ages, prompt_groups
from verl_clipx.training.worker.step import (
    AppliedLoss,
    AppliedMethod,
    MicroBatch,
    Observer,
    OptimizerStep,
    RolloutBatch,
)
from verl_clipx.training.worker.trace_writer import TraceWriter
from verl_clipx.training.worker.traced_columns import (
    HostCopy,
    Response,
    TokenTexts,
    TracedRows,
    columns_of,
    decisions_of,
)

# The field of verl's mini-batch in which the worker keeps the number of each row's response. NONE: it is not traced.
ROW = "clipx_traced_row"
NONE = -1

# Fields with one value for each token of the response. One of the last two contains the reward.
RESPONSE_FIELDS = ("responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores")


def prompt_name(prompt: numpy.ndarray) -> str:
    """Returns a hash of a prompt's tokens, int64, (length,), which names the prompt in every run, in hexadecimal."""
    return blake2b(prompt.tobytes(), digest_size=8).hexdigest()


def is_chosen(prompt: str, trace: Trace) -> bool:
    """Returns whether a prompt, by its `prompt_name`, is traced; the same on every rank and in every run."""
    digest = blake2b(prompt.encode(), digest_size=8, key=trace.seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") < trace.fraction * 2**64


def rows_of(values: Tensor, places: list[int]) -> Tensor:
    """Returns some rows of a tensor. An index tensor would have to be copied to the accelerator."""
    return torch.stack([values[place] for place in places])


def inputs_at(inputs: Inputs, places: list[int]) -> Inputs:
    """Returns some rows of a micro-batch; a field that it lacks stays None."""
    fields = {}
    for name, values in inputs._asdict().items():
        fields[name] = None if values is None else rows_of(values, places)
    return Inputs(**fields)


def tokens_of_method(applied: AppliedMethod, places: list[int]) -> dict[str, Tensor]:
    """Returns the columns of what a method of the plugin did to the tokens of some rows, (rows, response length) each.

    Tokens that bypass mode rejects are traced as if they had been kept, except that their weight is 0.
    """
    settings, inputs, decision, correction, kept, _, whole = applied
    factor = torch.ones((), device=inputs.mask.device) if correction is None else rows_of(correction, places)
    rows = inputs_at(inputs, places)
    others = {"unshaped_advantage": rows.advantages}
    if correction is not None:
        others["correction"] = factor
    if rows.counted is not None:
        others["counted"] = rows.counted
    if kept is not whole:
        others["selected"] = rows_of(kept, places)
        factor = factor * others["selected"]
    method = settings.method
    shaping = settings.shaping
    trace = token_trace(method, apply(method, shaping, rows, decision), factor)
    if whole is not inputs.mask:
        every = rows._replace(mask=rows_of(whole, places))
        others["rejected"] = every.mask & ~rows.mask
        with_rejected = token_trace(method, apply(method, shaping, every, decision), factor)
        columns = zip(trace, with_rejected, strict=True)
        trace = TokenTrace(*[torch.where(rows.mask, column, of_every) for column, of_every in columns])
    return {**trace._asdict(), **others}


def tokens_of_loss(applied: AppliedLoss, places: list[int]) -> dict[str, Tensor]:
    """Returns the same columns of what one of verl's losses did to the tokens of some rows."""
    share = shares_of(applied.inputs.mask, applied.loss_agg_mode, **applied.config.global_batch_info)
    rows = inputs_at(applied.inputs, places)
    gradient = rows_of(applied.gradient, places)
    trace = observed_token_trace(rows, gradient, applied.bounds, applied.by_sequence, rows_of(share, places))
    return {**trace._asdict(), "unshaped_advantage": trace.advantage}


class Tracer(Observer):
    """Traces the rollout batches of one data-parallel rank.

    Args:
        trace: which prompts and steps are traced, and to which folder.
        rank: this data-parallel rank, from 0.
        ranks: how many data-parallel ranks there are.
        tokenizer: the model's, which turns tokens into text; None: a token's number stands for its text.
        batches_a_step: how many rollout batches verl logs as one step.
        last_batch: the number of the run's last rollout batch, counted from 1; None if unknown.
        observers: as for `TraceWriter`.

    Raises:
        ValueError: `trace` has no folder.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        rank: int,
        ranks: int,
        tokenizer: Any,
        batches_a_step: int = 1,
        last_batch: int | None = None,
        observers: Observers | None = None,
    ):
        if trace.folder is None:
            raise ValueError(f"{trace.node}.folder=None: the run's driver fills it in; outside verl's trainers set it.")
        self.trace = trace
        self.folder = Path(trace.folder)
        self.rank = rank
        self.ranks = ranks
        self.texts = TokenTexts(tokenizer)
        self.batches_a_step = batches_a_step
        self.last_batch = last_batch
        self.writer = TraceWriter(observers=observers)
        # verl counts steps from 1; updates of a step and micro-batches of an update are counted from 0.
        self._step = 1
        self._update = 0
        self._micro_batch = 0
        self._responses: list[Response] = []
        self._parts: list[TracedRows] = []
        self._has_removed_old_shards = False

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Chooses the rows that are traced. The first call removes shards of its step and of later ones."""
        self._step = batch.number // self.batches_a_step + 1
        if not self._has_removed_old_shards:
            self.writer.put(partial(remove_shards, self.folder, self._step, self.rank, self.ranks))
            self._has_removed_old_shards = True
        # Drops what an update that did not end has left.
        self._parts = []
        self._micro_batch = 0
        if batch.number % self.batches_a_step == 0:
            self._update = 0
        if self.trace.includes(self._step):
            self._responses, rows = responses_in(data, self.trace, self.rank, self.ranks, version=self._step - 1)
            tu.assign_non_tensor_stack(data, ROW, rows)

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Keeps the columns of the micro-batch's traced rows."""
        if ROW not in data:
            return
        number = self._micro_batch
        self._micro_batch = self._micro_batch + 1
        rows = [_plain(row) for row in data[ROW]]
        places = [place for place, row in enumerate(rows) if row != NONE]
        if not places or micro_batch.applied is None:
            return
        with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
            if isinstance(micro_batch.applied, AppliedMethod):
                columns = tokens_of_method(micro_batch.applied, places)
                decision = micro_batch.applied.decision
            else:
                columns = tokens_of_loss(micro_batch.applied, places)
                decision = None
            if micro_batch.entropy is not None:
                columns["entropy"] = rows_of(micro_batch.entropy, places)
            self._keep(columns, [self._responses[rows[place]] for place in places], number, decision)

    def _keep(
        self, columns: dict[str, Tensor], responses: list[Response], number: int = 0, decision: Tensor | None = None
    ) -> None:
        """Keeps the columns of some rows, each with its response, and the method's decision until the update ends."""
        values = torch.stack([values.to(torch.float32) for values in columns.values()], 1)
        # Cloned, so that the step's tensor is not kept here; on a CPU, `HostCopy` would hold that tensor itself.
        copy = None if decision is None else HostCopy(decision.detach().clone())
        self._parts.append(
            TracedRows(
                responses=responses, names=tuple(columns), values=HostCopy(values), micro_batch=number, decision=copy
            )
        )

    def end_update(self, step: OptimizerStep) -> None:
        """Passes what the update's micro-batches added to the writer."""
        parts = self._parts
        self._parts = []
        self._micro_batch = 0
        shard = Shard(step=self._step, update=self._update, rank=self.rank)
        self._update += 1

        def write() -> None:
            facts = UpdateFacts(
                fraction=self.trace.fraction,
                ranks=self.ranks,
                decided_from=step.decided_from,
                decisions=decisions_of(parts),
            )
            write_shard(self.folder, shard, columns_of(parts, self.texts), facts)

        if parts:
            self.writer.put(write, sum(part.values.size for part in parts))

    def end_rollout_batch(self, batch: RolloutBatch) -> dict[str, list[float]]:
        """After the run's last rollout batch, waits until everything is written."""
        # Batches are numbered from 0.
        if batch.number + 1 == self.last_batch:
            # Ray ends a worker without its exit handlers, and nothing is left to train.
            self.writer.close()
        return {}

    def flush(self) -> None:
        """Waits until everything so far is written."""
        self.writer.flush()


def responses_in(data: Any, trace: Trace, rank: int, ranks: int, *, version: int) -> tuple[list[Response], list[int]]:
    """Returns a rollout batch's traced responses and, for each row, jagged or padded, its response's number or NONE.

    `version` is that of the weights from which the training on the batch starts.
    """
    known = {key: list(data[key].cpu().unbind()) for key in RESPONSE_FIELDS if key in data}
    scores = known.get("rm_scores", known.get("token_level_scores"))
    age = ages(data, version)
    groups = prompt_groups(data).tolist() if "uid" in data else None
    responses = []
    rows = []
    seen = Counter()
    for place, prompt in enumerate(rows_in(data, "prompts")):
        name = prompt_name(prompt)
        mask = known["response_mask"][place].bool()
        # verl may fill up a batch with rows that have no tokens.
        if not is_chosen(name, trace) or not mask.any():
            rows.append(NONE)
            continue
        rows.append(len(responses))
        responses.append(
            Response(
                name,
                prompt,
                # If verl gives no number, one is chosen that no other rank uses.
                sample=_plain(data["session_id"][place]) if "session_id" in data else rank + ranks * seen[name],
                score=None if scores is None else float(scores[place].sum()),
                age=None if age is None else int(age[place].max()),
                token_ids=known["responses"][place],
                mask=mask,
                rollout_log_prob=known["rollout_log_probs"][place] if "rollout_log_probs" in known else None,
                group=None if groups is None else groups[place],
            )
        )
        seen[name] += 1
    return responses, rows


def _plain(number: Any) -> int:
    """Returns a number of verl's data, which may be wrapped in an object of its own."""
    return int(getattr(number, "data", number))
