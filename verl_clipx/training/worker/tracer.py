"""Collects what the loss knows about traced responses, in the training thread, and hands it to the writer.

The host knows beforehand which rows are traced. Their values are copied to it without waiting.
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

# The field of verl's mini-batch in which the worker keeps each row's response number: its index among the rollout
# batch's traced responses, or NOT_TRACED.
ROW = "clipx_traced_row"
NOT_TRACED = -1

# Fields with one value for each token of the response. One of the last two contains the reward.
RESPONSE_FIELDS = ("responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores")


def prompt_name(prompt: numpy.ndarray) -> str:
    """Return the name of a prompt in every run: a hash of its tokens, in hexadecimal.

    Args:
        prompt: the token ids, (length,), of any integer dtype.
    """
    return blake2b(prompt.astype(numpy.int64).tobytes(), digest_size=8).hexdigest()


def is_chosen(prompt: str, trace: Trace) -> bool:
    """Return whether a prompt, by its `prompt_name`, is traced; the same on every rank and in every run."""
    digest = blake2b(prompt.encode(), digest_size=8, key=trace.seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") < trace.fraction * 2**64


def select_rows(values: Tensor, row_indices: list[int]) -> Tensor:
    """Return some rows of a tensor, (rows, ...), without a copy of their indices to the accelerator."""
    return torch.stack([values[row_index] for row_index in row_indices])


def select_inputs(inputs: Inputs, row_indices: list[int]) -> Inputs:
    """Return some rows of a micro-batch's inputs. A field that is None stays None."""
    fields = {}
    for name, values in inputs._asdict().items():
        fields[name] = None if values is None else select_rows(values, row_indices)
    return Inputs(**fields)


def trace_method(applied: AppliedMethod, row_indices: list[int]) -> dict[str, Tensor]:
    """Trace what a method of the plugin did to the tokens of some rows.

    Tokens that bypass mode rejects or +clipx/mask takes out are traced as if they had been kept, except that their
    weight is 0.

    Args:
        applied: what the method did to a micro-batch.
        row_indices: the rows, by their indices in the micro-batch.

    Returns:
        The columns by name, (rows, response length) each: those of `TokenTrace`, and further columns of
        `trace_format.SCHEMA` as far as they apply.
    """
    rows = select_inputs(applied.inputs, row_indices)
    # What the method's weight of each token is multiplied by.
    factor = torch.ones((), device=rows.mask.device)
    columns = {"unshaped_advantage": rows.advantages}
    if applied.correction is not None:
        factor = select_rows(applied.correction, row_indices)
        columns["correction"] = factor
    if rows.counted is not None:
        columns["counted"] = rows.counted
    if applied.kept_may_lack_tokens:
        # Also without entropy selection, if bypass mode or +clipx/mask may take tokens out.
        columns["selected"] = select_rows(applied.kept, row_indices)
        factor = factor * columns["selected"]
    method = applied.settings.method
    shaping = applied.settings.shaping
    trace = token_trace(method, apply(method, shaping, rows, applied.decision), factor)
    if applied.mask_may_lack_tokens:
        whole_rows = rows._replace(mask=select_rows(applied.whole, row_indices))
        columns["rejected"] = whole_rows.mask & ~rows.mask
        trace_of_whole = token_trace(method, apply(method, shaping, whole_rows, applied.decision), factor)
        # Tokens in the mask keep their trace. Rejected ones get the trace that they would have had.
        fields = {}
        for name, values_of_whole in trace_of_whole._asdict().items():
            fields[name] = torch.where(rows.mask, getattr(trace, name), values_of_whole)
        trace = TokenTrace(**fields)
    return {**trace._asdict(), **columns}


def trace_verls_loss(applied: AppliedLoss, row_indices: list[int]) -> dict[str, Tensor]:
    """Trace what one of verl's losses did to the tokens of some rows.

    A rollout correction is a part of the traced weight.

    Args:
        applied: what the loss did to a micro-batch.
        row_indices: the rows, by their indices in the micro-batch.

    Returns:
        The columns by name, (rows, response length) each: those of `TokenTrace`, and the advantage before shaping.
    """
    # What each token's loss is multiplied by in verl's scalar loss. The gradient is divided by it.
    loss_shares = shares_of(applied.inputs.mask, applied.loss_agg_mode, **applied.config.global_batch_info)
    trace = observed_token_trace(
        inputs=select_inputs(applied.inputs, row_indices),
        gradient=select_rows(applied.gradient, row_indices),
        bounds=applied.bounds,
        by_sequence=applied.by_sequence,
        share=select_rows(loss_shares, row_indices),
    )
    # verl's losses do not shape advantages.
    return {**trace._asdict(), "unshaped_advantage": trace.advantage}


class Tracer(Observer):
    """Traces the rollout batches of one data-parallel rank.

    Args:
        trace: which prompts and steps are traced, and to which folder.
        rank: this data-parallel rank, from 0.
        ranks: how many data-parallel ranks there are.
        tokenizer: the model's, which turns tokens into text; None: as for `TokenTexts`.
        batches_a_step: how many rollout batches verl logs as one step.
        batch_count: how many rollout batches the whole run has; None if unknown. If it is unknown, the worker does not
            wait for the traces at the end of the run, and the last ones may be lost.
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
        batch_count: int | None = None,
        observers: Observers | None = None,
    ):
        if trace.folder is None:
            raise ValueError(
                f"{trace.node_key}.folder=None: the run's driver fills it in; outside verl's trainers set it."
            )
        self.trace = trace
        self.folder = Path(trace.folder)
        self.rank = rank
        self.ranks = ranks
        self.texts = TokenTexts(tokenizer)
        self.batches_a_step = batches_a_step
        self.batch_count = batch_count
        self.writer = TraceWriter(observers=observers)
        # verl counts steps from 1; updates of a step and micro-batches of an update are counted from 0.
        self._step = 1
        self._update = 0
        self._micro_batch = 0
        self._responses: list[Response] = []
        self._parts: list[TracedRows] = []
        self._has_removed_old_shards = False

    def begin_rollout_batch(self, data: Any, batch: RolloutBatch) -> None:
        """Choose the traced rows of a rollout batch, and add the field ROW with each row's response number to its data.

        If the step of the rollout batch is not traced, nothing is added. The first call also has the writer remove this
        rank's share of the files of this step and of later ones, which an earlier start of the run may have left. The
        trainer's process removes only files beside a file log that the plugin keeps.

        Args:
            data: verl's rollout batch.
            batch: which of the run's rollout batches it is.
        """
        self._step = batch.number // self.batches_a_step + 1
        if not self._has_removed_old_shards:
            self.writer.put(partial(remove_shards, self.folder, self._step, self.rank, self.ranks))
            self._has_removed_old_shards = True
        # An update that ended in an exception may have left parts. They are dropped.
        self._parts = []
        self._micro_batch = 0
        # Updates are numbered through all rollout batches of a step, because a file is named by step and update.
        is_first_of_step = batch.number % self.batches_a_step == 0
        if is_first_of_step:
            self._update = 0
        if self.trace.includes(self._step):
            # Each step makes one version of the weights, and step 1 trains from version 0.
            self._responses, response_numbers = collect_responses(
                data, self.trace, self.rank, self.ranks, version=self._step - 1
            )
            tu.assign_non_tensor_stack(data, ROW, response_numbers)

    def end_micro_batch(
        self, micro_batch: MicroBatch, loss: Tensor, model_output: Any, data: Any, dp_group: Any
    ) -> None:
        """Keep the columns of the micro-batch's traced rows until the update ends."""
        if ROW not in data:
            return
        number = self._micro_batch
        self._micro_batch += 1
        response_numbers = [_unwrap_number(wrapped) for wrapped in data[ROW]]
        row_indices = [index for index, response_number in enumerate(response_numbers) if response_number != NOT_TRACED]
        applied = micro_batch.applied
        if not row_indices or applied is None:
            return
        with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
            if isinstance(applied, AppliedMethod):
                columns = trace_method(applied, row_indices)
                decision = applied.decision
            else:
                columns = trace_verls_loss(applied, row_indices)
                decision = None
            if micro_batch.entropy is not None:
                columns["entropy"] = select_rows(micro_batch.entropy, row_indices)
            responses = [self._responses[response_numbers[row_index]] for row_index in row_indices]
            self._keep(columns, responses, number=number, decision=decision)

    def _keep(
        self, columns: dict[str, Tensor], responses: list[Response], *, number: int, decision: Tensor | None
    ) -> None:
        """Keep the columns of a micro-batch's rows and the method's decision until the update ends.

        Args:
            columns: by name, (rows, response length) each.
            responses: the response of each row.
            number: the number of the micro-batch within the update, from 0.
            decision: what the method decided for the micro-batch; None if there is no method.
        """
        values = torch.stack([column.to(torch.float32) for column in columns.values()], 1)
        decision_copy = None
        if decision is not None:
            # Cloned, because on a CPU `HostCopy` holds the tensor itself, and the step's tensor is not to be kept.
            decision_copy = HostCopy(decision.detach().clone())
        self._parts.append(
            TracedRows(
                responses=responses,
                names=tuple(columns),
                values=HostCopy(values),
                micro_batch=number,
                decision=decision_copy,
            )
        )

    def end_update(self, step: OptimizerStep) -> None:
        """Hand the rows that the update's micro-batches kept to the writer."""
        parts = self._parts
        self._parts = []
        self._micro_batch = 0
        shard = Shard(step=self._step, update=self._update, rank=self.rank)
        self._update += 1

        def write() -> None:
            """Write the update's file, in the writer's thread."""
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
        """After the run's last rollout batch, wait until all traces are written, as `flush` does.

        Returns:
            No metrics.
        """
        # `batch.number` counts from 0.
        if batch.number + 1 == self.batch_count:
            # Here, because Ray ends a worker without running its exit handlers. Waiting delays nothing, since the
            # training is over.
            self.writer.close()
        return {}

    def flush(self) -> None:
        """Wait until all traces so far are written, and warn if some are not after `trace_writer.PATIENCE` seconds."""
        self.writer.flush()


def collect_responses(
    data: Any, trace: Trace, rank: int, ranks: int, *, version: int
) -> tuple[list[Response], list[int]]:
    """Collect the traced responses of a rollout batch.

    Args:
        data: verl's, jagged or padded.
        trace: which prompts are traced.
        rank: this data-parallel rank, from 0.
        ranks: how many data-parallel ranks there are. Where verl gives responses no numbers, rank and ranks make those
            that are given here differ from those of other ranks.
        version: the version of the weights from which the training on the batch starts.

    Returns:
        The traced responses; and for each row of the batch the index of its response among them, or NOT_TRACED.
    """
    fields_on_host = {key: list(data[key].cpu().unbind()) for key in RESPONSE_FIELDS if key in data}
    scores = fields_on_host.get("rm_scores", fields_on_host.get("token_level_scores"))
    rollout_log_probs = fields_on_host.get("rollout_log_probs")
    age = ages(data, version)
    groups = prompt_groups(data).tolist() if "uid" in data else None
    responses = []
    response_numbers = []
    # How many traced responses to each prompt came before.
    seen = Counter()
    for row_index, prompt in enumerate(rows_in(data, "prompts")):
        name = prompt_name(prompt)
        mask = fields_on_host["response_mask"][row_index].bool()
        # verl may fill up a batch with rows that have no tokens.
        is_filler = not mask.any()
        if is_filler or not is_chosen(name, trace):
            response_numbers.append(NOT_TRACED)
            continue
        # Where verl gives no numbers, rank r gives r, r + ranks, r + 2 * ranks and so on.
        sample = rank + ranks * seen[name]
        if "session_id" in data:
            sample = _unwrap_number(data["session_id"][row_index])
        seen[name] += 1
        response_numbers.append(len(responses))
        responses.append(
            Response(
                prompt=name,
                prompt_ids=prompt,
                sample=sample,
                score=None if scores is None else float(scores[row_index].sum()),
                # Of the first token, which is the oldest.
                age=None if age is None else int(age[row_index, 0]),
                token_ids=fields_on_host["responses"][row_index],
                mask=mask,
                rollout_log_prob=None if rollout_log_probs is None else rollout_log_probs[row_index],
                group=None if groups is None else groups[row_index],
            )
        )
    return responses, response_numbers


def _unwrap_number(number: Any) -> int:
    """Return a number of verl's data as an int. verl may have wrapped it in TensorDict's NonTensorData."""
    return int(getattr(number, "data", number))
