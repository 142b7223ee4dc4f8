"""Turns traced responses and the numbers of their tokens into the columns of a shard, in the writer's thread."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy
import pyarrow
import torch
from torch import Tensor

from verl_clipx.run.trace_format import regions_of


@dataclass(frozen=True)
class Response:
    """What the host knows of a traced response.

    Args:
        prompt: the prompt's name, from `tracer.prompt_name`.
        prompt_ids: the prompt's tokens, int64, (length of the prompt,).
        sample: the response's number among the responses to the prompt in this step. It is verl's where verl numbers
            them. Two groups of responses to equal prompts then have the same numbers, and differ in `group`.
        score: the reward; None if the worker does not know it.
        age: weight versions since the response's first token was sampled; None if unknown.
        token_ids: the response's tokens, int64, (length,).
        mask: those of them that the loss counts, bool, (length,).
        rollout_log_prob: log-probabilities under the policy that sampled, in nats, (length,); None if unknown.
        group: the number of verl's group of responses; None if unknown.
    """

    prompt: str
    prompt_ids: numpy.ndarray
    sample: int
    score: float | None
    age: int | None
    token_ids: Tensor
    mask: Tensor
    rollout_log_prob: Tensor | None
    group: int | None = None


class HostCopy:
    """A tensor on its way to the host, in memory that nothing else may write to. Only reading it waits for the copy."""

    def __init__(self, values: Tensor):
        self._values = values
        # Says when the copy has arrived; None if the tensor was on the host already.
        self._arrived = None
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.get_device_module(values.device).Event()
            self._arrived.record()

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self._values.nbytes

    def numpy(self) -> numpy.ndarray:
        """Return the values, after waiting until they are on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.numpy()


@dataclass(frozen=True)
class TracedRows:
    """The traced rows of one micro-batch.

    Args:
        responses: the response of each row.
        names: the names of the columns.
        values: their values, float32, (rows, columns, response length).
        micro_batch: the micro-batch's number within the update, from 0.
        decision: what the method decided for the micro-batch, float64; None if there is no method.
    """

    responses: list[Response]
    names: tuple[str, ...]
    values: HostCopy
    micro_batch: int = 0
    decision: HostCopy | None = None


class TokenTexts:
    """The texts of tokens, each decoded once.

    Args:
        tokenizer: one of transformers; None: a token's text is its number in brackets.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        # Returns the text of a token, by its id.
        self.decode_token = functools.cache(self._decode_token)

    def decode(self, tokens: Sequence[int]) -> str | None:
        """Return the text of several tokens; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _decode_token(self, token: int) -> str:
        """Return what a token adds to a text before it, with its leading space; without a tokenizer as "[5]"."""
        if self._tokenizer is None:
            return f"[{token}]"
        # Some tokenizers leave out a space at the beginning of a text. Therefore the token is decoded after itself, and
        # the text of the first one is cut off.
        once = self.decode([token])
        twice = self.decode([token, token])
        return twice[len(once) :]


# Columns with the values true and false.
FLAGS = frozenset({"selected", "counted", "rejected"})


def decisions_of(parts: list[TracedRows]) -> dict[int, list[float]]:
    """Return what the method decided for each micro-batch, by its number; nothing for parts without a method."""
    return {part.micro_batch: part.decision.numpy().tolist() for part in parts if part.decision is not None}


def columns_of(parts: list[TracedRows], texts: TokenTexts) -> dict[str, Any]:
    """Return the columns of `trace_format.SCHEMA` by name, except for those that follow from the shard.

    Args:
        parts: the traced rows of an update, at least one part. All have the same columns.
        texts: the texts of tokens.

    Returns:
        Arrays with a value for each token that counts: the tokens of each response one after the other, and the
        responses in the order of the parts.
    """
    # These three have an entry for each traced response: it, the columns of its tokens that count, and the number of
    # its micro-batch.
    responses: list[Response] = []
    values_of_responses: list[numpy.ndarray] = []
    micro_batches: list[int] = []
    for part in parts:
        for response, row in zip(part.responses, part.values.numpy(), strict=True):
            is_counted = response.mask.numpy()
            # The row may be padded to a longer response of its micro-batch.
            own_values = row[:, : len(is_counted)]
            responses.append(response)
            values_of_responses.append(own_values[:, is_counted])
            micro_batches.append(part.micro_batch)
    token_counts = [int(response.mask.sum()) for response in responses]
    values = numpy.concatenate(values_of_responses, axis=1)
    columns: dict[str, Any] = dict(zip(parts[0].names, values, strict=True))

    def of_response(value: Callable[[Response], Any]) -> pyarrow.Array:
        """Return a column in which every token has the value of its response."""
        response_indices = numpy.repeat(numpy.arange(len(responses)), token_counts)
        return pyarrow.array([value(response) for response in responses]).take(pyarrow.array(response_indices))

    def of_token(values: Callable[[Response], Any]) -> numpy.ndarray:
        """Return a column of the counted tokens' values, which a response has for each of its tokens."""
        return numpy.concatenate([numpy.asarray(values(response))[response.mask.numpy()] for response in responses])

    # Each different token is decoded once.
    unique_tokens, token_indices = numpy.unique(of_token(attrgetter("token_ids")), return_inverse=True)
    unique_texts = pyarrow.array([texts.decode_token(token) for token in unique_tokens.tolist()])
    columns["token_id"] = unique_tokens[token_indices].astype(numpy.int32)
    columns["text"] = unique_texts.take(pyarrow.array(token_indices))
    columns["position"] = of_token(lambda response: numpy.arange(len(response.mask), dtype=numpy.int32))
    if all(response.rollout_log_prob is not None for response in responses):
        columns["rollout_log_prob"] = of_token(lambda response: response.rollout_log_prob.float())
    for name in ("prompt", "sample", "score", "age", "group"):
        columns[name] = of_response(attrgetter(name))
    columns["prompt_text"] = of_response(lambda response: texts.decode(response.prompt_ids.tolist()))
    contexts, turns = zip(*map(contexts_and_turns, responses), strict=True)
    columns["context"] = list(itertools.chain(*contexts))
    columns["turn"] = numpy.concatenate(turns)
    columns["micro_batch"] = numpy.repeat(numpy.array(micro_batches, dtype=numpy.int32), token_counts)
    for name in FLAGS & columns.keys():
        columns[name] = columns[name] > 0
    columns["region"] = regions_of(columns["bounded"], columns["low"], columns["high"], columns["advantage"])
    return columns


def contexts_and_turns(response: Response) -> tuple[list[list[int] | None], numpy.ndarray]:
    """Return what stands before each counted token of a response, and the token's turn.

    Args:
        response: with at least one token that counts.

    Returns:
        For each counted token, the tokens between it and the counted one before, None if there are none. The first one
        also has the prompt before it. And the number of each counted token's turn, from 0, int32. A turn ends at tokens
        that the policy did not sample, which have a log-probability of 0. Tokens that a rollout correction rejects are
        the policy's own and end no turn. If the log-probabilities are unknown, all tokens that do not count end one.
    """
    positions = numpy.flatnonzero(response.mask)
    # Of each counted token: the position after the counted one before it.
    starts = numpy.concatenate([[0], positions[:-1] + 1])
    contexts: list[list[int] | None] = [None] * len(positions)
    begins_turn = numpy.zeros(len(positions), dtype=numpy.int32)
    for index in numpy.flatnonzero(positions > starts):
        between = slice(starts[index], positions[index])
        contexts[index] = response.token_ids[between].tolist()
        is_first = index == 0
        follows_unsampled = True
        if response.rollout_log_prob is not None:
            follows_unsampled = bool((response.rollout_log_prob[between] == 0).any())
        begins_turn[index] = follows_unsampled and not is_first
    contexts[0] = [*response.prompt_ids.tolist(), *(contexts[0] or [])]
    return contexts, begins_turn.cumsum(dtype=numpy.int32)
