"""Collects what the loss knows about traced responses, in the training thread, and passes it to the writer.

The host knows beforehand which rows are traced, and their values are copied to it without waiting.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_clipx.base.method import Bounds
from verl_clipx.base.tokens import Inputs
from verl_clipx.common.decided_from import DecidedFrom
from verl_clipx.common.traces import Shard, UpdateFacts, remove_shards, shards_in, write_shard
from verl_clipx.loss.loss import apply
from verl_clipx.loss.observed import ObservedTokens
from verl_clipx.loss.token_trace import TokenTrace, observed_token_trace, token_trace
from verl_clipx.run.config import Settings
from verl_clipx.run.trace import Trace
from verl_clipx.worker.layout import padded, response_part
from verl_clipx.worker.rows import ages, prompt_groups
from verl_clipx.worker.trace_writer import TraceWriter
from verl_clipx.worker.traced_columns import HostCopy, Part, Response, TokenTexts, columns_of, decisions_of

# The field of verl's mini-batch in which the worker keeps the number of each row's response. NONE: it is not traced.
ROW, NONE = "clipx_traced_row", -1

# Fields with one value for each token of the response. One of the last two contains the reward.
RESPONSE_FIELDS = ("responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores")


def prompt_name(prompt: Tensor) -> str:
    """A hash of the prompt's tokens, which names the prompt in every run: hexadecimal; `prompt` is int64, (length,)."""
    return blake2b(prompt.numpy().tobytes(), digest_size=8).hexdigest()


def is_chosen(prompt: str, trace: Trace) -> bool:
    """Whether a prompt is traced. The answer is the same on every rank and in every run.

    Args:
        prompt: from `prompt_name`.
        trace: the node with the seed and the fraction.
    """
    digest = blake2b(prompt.encode(), digest_size=8, key=trace.seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") < trace.fraction * 2**64


@dataclass
class TracedRows:
    """The traced rows of a micro-batch, to which the loss adds what it knows.

    Args:
        places: the rows' positions in the micro-batch.
        responses: the response in each of these rows.
        parts: the list that receives what is added.
        entropy: the current policy's entropy, (sequences of the micro-batch, response length), or None.
        micro_batch: the micro-batch's number within the update, from 0.
    """

    places: list[int]
    responses: list[Response]
    parts: list[Part]
    entropy: Tensor | None
    micro_batch: int = 0

    def of_method(
        self,
        settings: Settings,
        inputs: Inputs,
        decision: Tensor,
        factor: Tensor | None,
        selected: Tensor | None,
        whole: Tensor,
    ) -> None:
        """Adds what a method of the plugin does to the rows' tokens.

        Args:
            decision: what the method decided.
            factor: the factor of verl's rollout correction on F, (sequences, length), or None.
            selected: the tokens that selection keeps and bypass mode does not reject, bool, (sequences, length), or
                None if these are all tokens.
            whole: the mask including the tokens that bypass mode rejects. Rejected tokens are traced as if they had
                been kept, except that their weight is 0.
        """
        with without_gradient(inputs.mask):
            of_rows = torch.ones((), device=inputs.mask.device) if factor is None else self._rows(factor)
            rows = Inputs(*(None if values is None else self._rows(values) for values in inputs))
            kept = {"unshaped_advantage": rows.advantages}
            if factor is not None:
                kept["correction"] = of_rows
            if rows.counted is not None:
                kept["counted"] = rows.counted
            if selected is not None:
                kept["selected"] = self._rows(selected)
                of_rows = of_rows * kept["selected"]
            trace = _method_trace(settings, rows, decision, of_rows)
            if whole is not inputs.mask:
                every = rows._replace(mask=self._rows(whole))
                kept["rejected"] = every.mask & ~rows.mask
                rejected = _method_trace(settings, every, decision, of_rows)
                pairs = zip(trace, rejected, strict=True)
                trace = TokenTrace(*(torch.where(rows.mask, left, other) for left, other in pairs))
            self.add(trace, kept, decision)

    def of_gradient(self, tokens: ObservedTokens, bounds: Bounds, by_sequence: bool, share: Tensor) -> None:
        """Adds what one of verl's losses does to the rows' tokens.

        Args:
            tokens, bounds, by_sequence: as for `observed.observed_sums`.
            share: the factor of each token's loss in the scalar loss, (sequences, length).
        """
        with without_gradient(tokens.mask):
            rows = ObservedTokens(*map(self._rows, tokens))
            trace = observed_token_trace(rows, bounds, by_sequence, self._rows(share))
            self.add(trace, {"unshaped_advantage": trace.advantage})

    def _rows(self, values: Tensor) -> Tensor:
        # Not with an index tensor, which would have to be copied to the accelerator.
        return torch.stack([values[place] for place in self.places])

    def add(self, trace: TokenTrace, others: dict[str, Tensor], decision: Tensor | None = None) -> None:
        """Adds the columns of the rows' tokens.

        Args:
            trace: columns, each (rows, response length).
            others: further columns of the same shape.
            decision: what the method decided, float64; None without a method.
        """
        if self.entropy is not None:
            others["entropy"] = self._rows(self.entropy)
        columns = {**trace._asdict(), **others}
        values = torch.stack([values.to(torch.float32) for values in columns.values()], 1)
        # Cloned, so that the planner's tensor is not kept here; on a CPU, `HostCopy` would hold that tensor itself.
        decided = None if decision is None else HostCopy(decision.detach().clone())
        self.parts.append(Part(self.responses, tuple(columns), HostCopy(values), self.micro_batch, decided))


def _method_trace(settings: Settings, rows: Inputs, decision: Tensor, factor: Tensor) -> TokenTrace:
    return token_trace(settings.method, apply(settings.method, settings.shaping, rows, decision), factor)


@contextmanager
def without_gradient(tokens: Tensor) -> Iterator[None]:
    """Switches gradient and autocast off, as `compiled.Functions.call` does."""
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        yield


class Tracer:
    """Traces the rollout batches of one data-parallel rank.

    Args:
        trace: what to trace, and where to.
        rank, ranks: the data-parallel rank and the number of ranks.
        tokenizer: the policy's tokenizer, or None.
        batches_a_step: how many rollout batches verl logs as one step.
        last: the number of the run's last rollout batch, or None if unknown.

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
        last: int | None = None,
    ):
        if trace.folder is None:
            raise ValueError(f"{trace.node}.folder=None: the run's driver fills it in; outside verl's trainers set it.")
        self.trace, self.folder = trace, Path(trace.folder)
        self.rank, self.ranks = rank, ranks
        self.texts = TokenTexts(tokenizer)
        self.batches_a_step, self.last = batches_a_step, last
        self.writer = TraceWriter()
        self._step, self._update, self._micro_batch = 1, 0, 0
        self._responses: list[Response] = []
        self._parts: list[Part] = []
        self._goes_on = False

    @contextmanager
    def rollout_batch(self, data: Any, before: int) -> Iterator[None]:
        """Traces the updates on a rollout batch. The first call removes shards of its step and of later ones.

        Args:
            data: this rank's share, on the host; gets a field that says which rows are traced.
            before: how many rollout batches verl counted before this one.
        """
        self._step = before // self.batches_a_step + 1
        if not self._goes_on:
            self.writer.put(partial(self._remove, self._step))
            self._goes_on = True
        # Drops what an update that did not end has left.
        self._parts, self._micro_batch = [], 0
        if before % self.batches_a_step == 0:
            self._update = 0
        if self.trace.includes(self._step):
            self._responses, rows = responses_in(data, self.trace, self.rank, self.ranks, version=self._step - 1)
            tu.assign_non_tensor_stack(data, ROW, rows)
        yield
        if before + 1 == self.last:
            # Ray ends a worker without its exit handlers, and nothing is left to train.
            self.writer.close()

    def rows(self, data: Any, model_output: Any, entropy: Tensor | None = None) -> TracedRows | None:
        """The traced rows of a micro-batch; None if there are none.

        Args:
            data: verl's micro-batch.
            model_output: the model's output for the micro-batch.
            entropy: the current policy's entropy, (sequences, response length); None: taken from the model's output
                if it is there.
        """
        if ROW not in data:
            return None
        micro_batch, self._micro_batch = self._micro_batch, self._micro_batch + 1
        numbers = [_plain(number) for number in data[ROW]]
        places = [place for place, number in enumerate(numbers) if number != NONE]
        if not places:
            return None
        if entropy is None and model_output.get("entropy", None) is not None:
            entropy = response_part(model_output["entropy"], data, padded(data["response_mask"]).shape[1])
        responses = [self._responses[numbers[place]] for place in places]
        return TracedRows(places, responses, self._parts, entropy, micro_batch)

    def end_update(self, decided_from: DecidedFrom = DecidedFrom.MICRO_BATCH) -> None:
        """Passes what the update's micro-batches added to the writer.

        Args:
            decided_from: the tokens that the update's bounds were decided from.
        """
        parts, self._parts, self._micro_batch = self._parts, [], 0
        shard = Shard(self._step, self._update, self.rank)
        self._update += 1

        def write() -> None:
            facts = UpdateFacts(self.trace.fraction, self.ranks, decided_from, decisions_of(parts))
            write_shard(self.folder, shard, columns_of(parts, self.texts), facts)

        if parts:
            self.writer.put(write, sum(part.values.size for part in parts))

    def _remove(self, step: int) -> None:
        def is_old(shard: Shard) -> bool:
            # Rank 0 also removes the shards of ranks that this run does not have.
            return shard.step >= step and (shard.rank == self.rank or (self.rank == 0 and shard.rank >= self.ranks))

        remove_shards(self.folder, [shard for shard in shards_in(self.folder) if is_old(shard)])


def responses_in(data: Any, trace: Trace, rank: int, ranks: int, *, version: int) -> tuple[list[Response], list[int]]:
    """The traced responses of a rollout batch, and for each row the number of its response, or NONE.

    Args:
        data: verl's rollout batch, jagged or padded with an attention mask.
        rank, ranks: as for `Tracer`.
        version: the version of the weights from which the training on the batch starts.
    """
    known = {key: list(data[key].cpu().unbind()) for key in RESPONSE_FIELDS if key in data}
    scores = known.get("rm_scores", known.get("token_level_scores"))
    age, groups = ages(data, version), prompt_groups(data).tolist() if "uid" in data else None
    responses, rows, seen = [], [], Counter()
    for place, prompt in enumerate(prompts_in(data)):
        name, mask = prompt_name(prompt), known["response_mask"][place].bool()
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
                age=None if age is None else int(age[place]),
                token_ids=known["responses"][place],
                mask=mask,
                rollout_log_prob=known["rollout_log_probs"][place] if "rollout_log_probs" in known else None,
                group=None if groups is None else groups[place],
            )
        )
        seen[name] += 1
    return responses, rows


def prompts_in(data: Any) -> list[Tensor]:
    """The tokens of each row's prompt, int64, (length of the prompt,)."""
    prompts = data["prompts"].cpu()
    if prompts.is_nested:
        return list(prompts.unbind())
    attention = data["attention_mask"][:, : prompts.shape[1]].bool().cpu()
    return [prompt[present] for prompt, present in zip(prompts, attention, strict=True)]


def _plain(number: Any) -> int:
    """A number from one of verl's fields that are not tensors."""
    return int(getattr(number, "data", number))
