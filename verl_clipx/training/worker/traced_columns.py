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
        prompt, prompt_ids: the prompt's hash and its tokens, an array, int64, (length of the prompt,).
        sample: the response's number among the responses to the prompt in this step. It is verl's where verl numbers
            them. Two groups of responses to equal prompts then have the same numbers, and differ in `group`.
        score: the reward, or None.
        age: weight versions since the response's first token was sampled, or None.
        token_ids, mask: the response's tokens, int64, and those that the loss counts, bool, (length,).
        rollout_log_prob: log-probabilities under the policy that sampled, (length,), or None.
        group: the number of verl's group of responses, or None.
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
    """A tensor, which nothing else may write to, on its way to the host. Only reading it waits for the copy."""

    def __init__(self, values: Tensor):
        self._values = values
        self._arrived = None
        if values.device.type != "cpu":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.get_device_module(values.device).Event()
            self._arrived.record()

    @property
    def size(self) -> int:
        return self._values.nbytes

    def numpy(self) -> numpy.ndarray:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.numpy()


@dataclass(frozen=True)
class TracedRows:
    """The traced rows of one micro-batch, by its number within the update, from 0.

    Args:
        responses: the response of each row.
        names, values: the columns, float32, (rows, columns, response length).
        decision: what the method decided for the micro-batch, float64; None if there is no method.
    """

    responses: list[Response]
    names: tuple[str, ...]
    values: HostCopy
    micro_batch: int = 0
    decision: HostCopy | None = None


class TokenTexts:
    """The texts of tokens, each decoded once; without a tokenizer of transformers, a token's text is its number."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.of = functools.cache(self._decoded)

    def whole(self, tokens: Sequence[int]) -> str | None:
        """Returns the text of several tokens; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    def _decoded(self, token: int) -> str:
        """Returns a token's text as within a longer text, so including a leading space."""
        if self._tokenizer is None:
            return f"[{token}]"
        # Some tokenizers leave out a space at the beginning of a text.
        return self.whole([token, token])[len(self.whole([token])) :]


# Columns with the values true and false.
FLAGS = frozenset({"selected", "counted", "rejected"})


def decisions_of(parts: list[TracedRows]) -> dict[int, list[float]]:
    """Returns what the method decided for each micro-batch, by its number; nothing for parts without a method."""
    return {part.micro_batch: part.decision.numpy().tolist() for part in parts if part.decision is not None}


def columns_of(parts: list[TracedRows], texts: TokenTexts) -> dict[str, Any]:
    """Makes the columns of `traces.SCHEMA`, except for those that follow from the shard; all parts have the same."""
    # One of each for every traced response.
    responses: list[Response] = []
    numbers: list[numpy.ndarray] = []
    micro_batches: list[int] = []
    for part in parts:
        for response, row in zip(part.responses, part.values.numpy(), strict=True):
            mask = response.mask.numpy()
            responses.append(response)
            numbers.append(row[:, : mask.size][:, mask])
            micro_batches.append(part.micro_batch)
    lengths = [int(response.mask.sum()) for response in responses]
    columns: dict[str, Any] = dict(zip(parts[0].names, numpy.concatenate(numbers, axis=1), strict=True))

    def of_response(value: Callable[[Response], Any]) -> pyarrow.Array:
        """Return a column in which every token has the value of its response."""
        places = numpy.repeat(numpy.arange(len(responses)), lengths)
        return pyarrow.array([value(response) for response in responses]).take(pyarrow.array(places))

    def of_token(values: Callable[[Response], Any]) -> numpy.ndarray:
        """Return a column of the counted tokens' values, which a response has for each of its tokens."""
        return numpy.concatenate([numpy.asarray(values(response))[response.mask.numpy()] for response in responses])

    # Each token is decoded once.
    tokens, places = numpy.unique(of_token(attrgetter("token_ids")), return_inverse=True)
    columns["token_id"] = tokens[places].astype(numpy.int32)
    columns["text"] = pyarrow.array([texts.of(token) for token in tokens.tolist()]).take(pyarrow.array(places))
    columns["position"] = of_token(lambda response: numpy.arange(len(response.mask), dtype=numpy.int32))
    if all(response.rollout_log_prob is not None for response in responses):
        columns["rollout_log_prob"] = of_token(lambda response: response.rollout_log_prob.float())
    for name in ("prompt", "sample", "score", "age", "group"):
        columns[name] = of_response(attrgetter(name))
    columns["prompt_text"] = of_response(lambda response: texts.whole(response.prompt_ids.tolist()))
    contexts, turns = zip(*map(contexts_and_turns, responses), strict=True)
    columns["context"] = list(itertools.chain(*contexts))
    columns["turn"] = numpy.concatenate(turns)
    columns["micro_batch"] = numpy.repeat(numpy.array(micro_batches, dtype=numpy.int32), lengths)
    for name in FLAGS & columns.keys():
        columns[name] = columns[name] > 0
    columns["region"] = regions_of(columns["bounded"], columns["low"], columns["high"], columns["advantage"])
    return columns


def contexts_and_turns(response: Response) -> tuple[list[list[int] | None], numpy.ndarray]:
    """Returns what stands before each counted token of a response, and the token's turn.

    Returns:
        For each counted token the tokens between it and the counted one before, None if there are none; the first one
        has the prompt before it. And the number of each token's turn, from 0, int32. A turn ends where tokens stand
        that the policy did not sample, which have no log-probability; those that a rollout correction rejects are the
        policy's own.
    """
    places = numpy.flatnonzero(response.mask)
    since = numpy.concatenate([[0], places[:-1] + 1])
    contexts: list[list[int] | None] = [None] * len(places)
    begins = numpy.zeros(len(places), dtype=numpy.int32)
    for place in numpy.flatnonzero(places > since):
        between = slice(since[place], places[place])
        contexts[place] = response.token_ids[between].tolist()
        sampled = None if response.rollout_log_prob is None else response.rollout_log_prob[between]
        begins[place] = place > 0 and (sampled is None or bool((sampled == 0).any()))
    contexts[0] = [*response.prompt_ids.tolist(), *(contexts[0] or [])]
    return contexts, begins.cumsum(dtype=numpy.int32)
