"""Takes what the loss knows about traced responses, on the training thread, and passes it to the writer.

Which rows are traced is known on the host beforehand, and their numbers come to it without waiting.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
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
from verl_clipx.driver.config import Settings
from verl_clipx.driver.trace import Trace
from verl_clipx.loss.observed import ObservedTokens
from verl_clipx.loss.token_trace import TokenTrace, observed_token_trace, token_trace
from verl_clipx.worker.layout import padded, response_part
from verl_clipx.worker.rows import ages, prompt_groups
from verl_clipx.worker.trace_writer import TraceWriter
from verl_clipx.worker.traced_columns import HostCopy, Part, Response, TokenTexts, columns_of, decisions_of

# Where the worker keeps the number of a row's response in verl's mini-batch; NONE for one that is not traced.
ROW, NONE = "clipx_traced_row", -1

# A value a token of the response; the reward stands in one of the last two.
RESPONSE_FIELDS = ("responses", "response_mask", "rollout_log_probs", "rm_scores", "token_level_scores")


def prompt_name(prompt: Tensor) -> str:
    """The hash that names a prompt in every run: hexadecimal, of its tokens, int64, (length,)."""
    return blake2b(prompt.numpy().tobytes(), digest_size=8).hexdigest()


def is_chosen(prompt: str, trace: Trace) -> bool:
    """Whether a prompt is traced; the same on every rank and in every run.

    Args:
        prompt: from `prompt_name`.
        trace: with the seed and the fraction.
    """
    digest = blake2b(prompt.encode(), digest_size=8, key=trace.seed.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") < trace.fraction * 2**64


class TracedRows:
    """The traced rows of a micro-batch; the loss adds what it knows of them.

    Args:
        places: their places in the micro-batch.
        responses: a response a place.
        parts: where what is added goes.
        entropy: of the current policy, (sequences of the micro-batch, response length), or None.
        micro_batch: its number within the update, from 0.
    """

    def __init__(
        self,
        places: list[int],
        responses: list[Response],
        parts: list[Part],
        entropy: Tensor | None,
        micro_batch: int = 0,
    ):
        self.places, self.responses, self.parts, self.entropy = places, responses, parts, entropy
        self.micro_batch = micro_batch

    def of_method(
        self,
        settings: Settings,
        inputs: Inputs,
        decision: Tensor,
        factor: Tensor | None,
        selected: Tensor | None,
        whole: Tensor,
    ) -> None:
        """Adds what a method of the plugin does.

        Args:
            settings: the clipx node.
            inputs: the micro-batch.
            decision: what the method decided.
            factor: of verl's rollout correction on F, (sequences, length), or None.
            selected: what entropy selection kept and bypass mode did not reject, bool, (sequences, length), or None.
            whole: the mask, with what bypass mode rejected, which is traced as if it stayed, but for its weight of 0.
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
            trace = token_trace(settings.method, settings.shaping, rows, decision, of_rows)
            if whole is not inputs.mask:
                every = rows._replace(mask=self._rows(whole))
                kept["rejected"] = every.mask & ~rows.mask
                rejected = token_trace(settings.method, settings.shaping, every, decision, of_rows)
                pairs = zip(trace, rejected, strict=True)
                trace = TokenTrace(*(torch.where(rows.mask, left, other) for left, other in pairs))
            self.add(trace, kept, decision)

    def of_gradient(self, tokens: ObservedTokens, bounds: Bounds, by_sequence: bool, share: Tensor) -> None:
        """Adds what a loss of verl's does.

        Args:
            tokens, bounds, by_sequence: as for `observed.observed_sums`.
            share: of each token's loss in the scalar loss, (sequences, length).
        """
        with without_gradient(tokens.mask):
            rows = ObservedTokens(*map(self._rows, tokens))
            trace = observed_token_trace(rows, bounds, by_sequence, self._rows(share))
            self.add(trace, {"unshaped_advantage": trace.advantage})

    def _rows(self, values: Tensor) -> Tensor:
        # An index tensor would have to be copied to the accelerator.
        return torch.stack([values[place] for place in self.places])

    def add(self, trace: TokenTrace, others: dict[str, Tensor], decision: Tensor | None = None) -> None:
        """Adds what is known of the rows' tokens.

        Args:
            trace: (rows, response length) each.
            others: further columns, likewise.
            decision: what the method decided, float64; None without a method.
        """
        if self.entropy is not None:
            others["entropy"] = self._rows(self.entropy)
        columns = {**trace._asdict(), **others}
        values = torch.stack([values.to(torch.float32) for values in columns.values()], 1)
        # A copy: the planner's own tensor is not held here, and on a CPU `HostCopy` would be that tensor itself.
        decided = None if decision is None else HostCopy(decision.detach().clone())
        self.parts.append(Part(self.responses, tuple(columns), HostCopy(values), self.micro_batch, decided))


@contextmanager
def without_gradient(tokens: Tensor) -> Iterator[None]:
    """As `compiled.Functions.call` computes: without gradient and autocast."""
    with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
        yield


class Tracer:
    """Traces the rollout batches of one data-parallel rank.

    Args:
        trace: what to trace.
        rank, ranks: the data-parallel rank and their number.
        tokenizer: of the policy, or None.
        batches_a_step: rollout batches that verl logs as one step.
        last: the number of the run's last rollout batch, if known.

    Raises:
        ValueError: there is no folder.
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
        """Traces the updates on a rollout batch. The first one's step and later ones are written anew.

        Args:
            data: this rank's share, on the host; gets a field that says which rows are traced.
            before: rollout batches that verl counts before this one.
        """
        self._step = before // self.batches_a_step + 1
        if not self._goes_on:
            self.writer.put(partial(self._remove, self._step))
            self._goes_on = True
        # What an update left that did not end is not the next one's.
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
        """The traced rows of a micro-batch; None without any.

        Args:
            data: verl's micro-batch.
            model_output: the model's output for it.
            entropy: the current policy's, (sequences, response length), where it is at hand.
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
        """Hands what the update's micro-batches added to the writer.

        Args:
            decided_from: the tokens behind its bounds.
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
            # Of ranks that this run does not have, rank 0 takes care.
            return shard.step >= step and (shard.rank == self.rank or (self.rank == 0 and shard.rank >= self.ranks))

        remove_shards(self.folder, [shard for shard in shards_in(self.folder) if is_old(shard)])


def responses_in(data: Any, trace: Trace, rank: int, ranks: int, *, version: int) -> tuple[list[Response], list[int]]:
    """The traced responses of a rollout batch, and for each of its rows the number of its response, or NONE.

    Args:
        data: verl's rollout batch, jagged or padded with an attention mask.
        trace: what to trace.
        rank, ranks: as for `Tracer`.
        version: of the weights that its training starts from.
    """
    known = {key: list(data[key].cpu().unbind()) for key in RESPONSE_FIELDS if key in data}
    scores = known.get("rm_scores", known.get("token_level_scores"))
    age, groups = ages(data, version), prompt_groups(data).tolist() if "uid" in data else None
    responses, rows, seen = [], [], Counter()
    for place, prompt in enumerate(prompts_in(data)):
        name, mask = prompt_name(prompt), known["response_mask"][place].bool()
        # verl fills a batch up with rows without tokens.
        if not is_chosen(name, trace) or not mask.any():
            rows.append(NONE)
            continue
        rows.append(len(responses))
        responses.append(
            Response(
                name,
                prompt,
                # Where verl gives no number, one that no other rank gives.
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
    """A number out of verl's fields that are no tensors."""
    return int(getattr(number, "data", number))
