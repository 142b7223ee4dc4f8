"""Continuous batching for a Hugging Face causal language model on the CPU.

Requests join while others decode, and finished ones leave at once. A request's tokens do not depend on its neighbours
beyond the model's rounding (1e-5 in a log-probability in float32): padding is masked, and every request has its own
random numbers.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from verl_clipx.training.cpu.rollout import cache as kv
from verl_clipx.training.cpu.rollout.parameters import SamplingParameters
from verl_clipx.training.cpu.rollout.sampling import draw_uniforms, sample


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and what has been generated.

    Args:
        request_id: names the request for the server.
        prompt_ids: token ids of the prompt, at least one.
        parameters: how to sample the response.
        seed: of the random numbers, non-negative and below 2**128.
        token_ids, log_probs: the tokens generated so far and their log-probabilities in nats.

    Attributes:
        uniforms: the random number of each token that may be generated, ``[max_tokens]`` float64.
    """

    request_id: str
    prompt_ids: list[int]
    parameters: SamplingParameters
    seed: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    uniforms: np.ndarray = field(init=False, repr=False)

    def __post_init__(self):
        self.uniforms = draw_uniforms(self.seed, len(self.prompt_ids), self.parameters.max_tokens)

    @property
    def finished(self) -> bool:
        """Return whether a stop token or the length limit has been reached."""
        if not self.token_ids:
            return False
        return len(self.token_ids) >= self.parameters.max_tokens or self.token_ids[-1] in self.parameters.stop_token_ids


@dataclass
class _Batch:
    """The running requests and their shared state; row i of every tensor belongs to request i.

    Args:
        requests: the requests, of which each has at least one token.
        cache: the keys and values of all tokens but the last one of each request, padded on the left.
        mask: ``[rows, length]`` int64, as long as the cache: 1 where the cache holds a token of the row, 0 where it
            holds padding.
    """

    requests: list[Request]
    cache: kv.DynamicCache
    mask: torch.Tensor


class Generator:
    """Generates responses for all submitted requests, one token each per `step`.

    Args:
        model: causal language model in float32 or float64, in evaluation mode.
        vocabulary_size: tokens from this id on are never generated (rows of the output layer that only pad it).
        max_rows: largest number of requests that decode together; the others wait their turn.
        max_prefill_tokens: largest padded size of one prefill, in tokens. A longer prompt is prefilled alone.
        log_prob_mode: one of `sampling.LOG_PROB_MODES`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocabulary_size: int,
        max_rows: int = 256,
        max_prefill_tokens: int = 8192,
        log_prob_mode: str = "processed_logprobs",
    ):
        self.model = model
        self.vocabulary_size = vocabulary_size
        self.max_rows = max_rows
        self.max_prefill_tokens = max_prefill_tokens
        self.log_prob_mode = log_prob_mode
        self._waiting: deque[Request] = deque()
        self._batch: _Batch | None = None

    @property
    def pending(self) -> int:
        """Return the number of requests that are waiting or decoding."""
        return len(self._waiting) + len(self._running)

    @property
    def _running(self) -> list[Request]:
        """Return the requests that are decoding."""
        return self._batch.requests if self._batch else []

    def submit(self, request: Request) -> None:
        """Queue a request; it joins at the next `step` that has room."""
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Generate one token for every running request and the first for those that join.

        Returns:
            The requests that this step finished.
        """
        finished = []
        if self._batch:
            finished += self._decode()
        joining = self._take_joining()
        if joining:
            finished += self._prefill(joining)
        return finished

    def forget_cache(self) -> None:
        """Drop the key-value cache; running requests are prefilled again, including their tokens so far.

        Needed whenever the weights change, so that no request attends to states of an older model.
        """
        self._waiting.extendleft(reversed(self._running))
        self._batch = None

    def abort(self) -> list[Request]:
        """Remove all requests and return them with the tokens generated so far."""
        aborted = [*self._running, *self._waiting]
        self._waiting.clear()
        self._batch = None
        return aborted

    def _take_joining(self) -> list[Request]:
        """Take from the waiting requests the first ones, as many as there is room for and fit into one prefill.

        A request that alone is larger than a prefill may be is taken alone.
        """
        joining: list[Request] = []
        longest = 0
        while self._waiting and len(self._running) + len(joining) < self.max_rows:
            request = self._waiting[0]
            longest = max(longest, len(request.prompt_ids) + len(request.token_ids))
            if joining and longest * (len(joining) + 1) > self.max_prefill_tokens:
                break
            joining.append(self._waiting.popleft())
        return joining

    def _prefill(self, requests: list[Request]) -> list[Request]:
        """Compute the tokens of requests that join, and generate the next one of each; return the finished requests."""
        # The samples of one GRPO group share their prompt: it is computed once and its rows are repeated.
        sequences = [(*request.prompt_ids, *request.token_ids) for request in requests]
        unique_sequences = list(dict.fromkeys(sequences))
        row_of_sequence = {sequence: row for row, sequence in enumerate(unique_sequences)}
        length = max(map(len, unique_sequences))
        tokens = torch.tensor([[0] * (length - len(sequence)) + list(sequence) for sequence in unique_sequences])
        mask = torch.tensor([[0] * (length - len(sequence)) + [1] * len(sequence) for sequence in unique_sequences])
        # Counted from 0 at each row's first token.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = kv.DynamicCache()
        logits = self._forward(tokens, mask, positions, cache)
        kv.check_layers(cache, type(self.model).__name__)
        row_of_request = torch.tensor([row_of_sequence[sequence] for sequence in sequences])
        kv.select_rows(cache, row_of_request)
        newcomers = _Batch(requests=requests, cache=cache, mask=mask[row_of_request])
        self._draw(newcomers, logits[row_of_request])
        if self._batch:
            self._merge(newcomers)
        else:
            self._batch = newcomers
        return self._remove_finished()

    def _decode(self) -> list[Request]:
        """Generate the next token of each running request; return those that are finished by it."""
        batch = self._batch
        tokens = torch.tensor([[request.token_ids[-1]] for request in batch.requests])
        positions = batch.mask.sum(-1, keepdim=True)
        # The forward pass adds these tokens to the cache.
        batch.mask = torch.cat([batch.mask, torch.ones_like(positions)], dim=-1)
        self._draw(batch, self._forward(tokens, batch.mask, positions, batch.cache))
        return self._remove_finished()

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: kv.DynamicCache
    ) -> torch.Tensor:
        """Return the logits of the token after each row, and add the rows' tokens to the cache.

        Args:
            tokens: ``[rows, new tokens]`` int64, padded on the left.
            mask: ``[rows, cached and new tokens]`` int64, 0 where there is padding.
            positions: of the new tokens in their rows, of the shape of ``tokens``.
            cache: the keys and values of the tokens before.

        Returns:
            ``[rows, vocabulary]`` float32, minus infinity for tokens that are never generated.
        """
        output = self.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float()
        if self.vocabulary_size < logits.shape[-1]:
            logits[:, self.vocabulary_size :] = -torch.inf
        return logits

    def _draw(self, batch: _Batch, logits: torch.Tensor) -> None:
        """Draw the next token of each request, and append it and its log-probability to the request.

        Args:
            batch: the requests.
            logits: of their next tokens, ``[rows, vocabulary]`` float32.
        """
        requests = batch.requests
        tokens, log_probs = sample(
            logits,
            temperature=torch.tensor([request.parameters.temperature for request in requests], dtype=torch.float32),
            top_k=torch.tensor([request.parameters.top_k for request in requests], dtype=torch.int64),
            top_p=torch.tensor([request.parameters.top_p for request in requests], dtype=torch.float32),
            uniforms=torch.tensor([request.uniforms[len(request.token_ids)] for request in requests]),
            log_prob_mode=self.log_prob_mode,
        )
        for request, token, log_prob in zip(requests, tokens.tolist(), log_probs.tolist(), strict=True):
            request.token_ids.append(token)
            request.log_probs.append(log_prob)

    def _merge(self, newcomers: _Batch) -> None:
        """Add requests that have joined to the running ones."""
        batch = self._batch
        length = max(batch.mask.shape[-1], newcomers.mask.shape[-1])
        batch.mask = torch.cat([_pad_left(batch.mask, length), _pad_left(newcomers.mask, length)])
        # Pads the caches on the left to the same length, because each mask is as long as its cache.
        kv.append_rows(batch.cache, newcomers.cache)
        batch.requests += newcomers.requests

    def _remove_finished(self) -> list[Request]:
        """Remove the finished requests from the running ones, and return them."""
        finished = [request for request in self._running if request.finished]
        if finished:
            self._keep([row for row, request in enumerate(self._running) if not request.finished])
        return finished

    def _keep(self, rows: list[int]) -> None:
        """Keep some of the running requests, by their row numbers, and drop columns that are now only padding."""
        batch = self._batch
        if batch is None or len(rows) == len(batch.requests):
            return
        if not rows:
            self._batch = None
            return
        index = torch.tensor(rows)
        mask = batch.mask[index]
        # `argmax` finds each row's first 1.
        first_column = int(mask.argmax(-1).min())
        kv.select_rows(batch.cache, index, first_column)
        batch.mask = mask[:, first_column:]
        batch.requests = [batch.requests[row] for row in rows]


def _pad_left(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return a mask, ``[rows, any length]``, padded with 0 on the left, ``[rows, length]``."""
    return torch.nn.functional.pad(mask, (length - mask.shape[-1], 0))
