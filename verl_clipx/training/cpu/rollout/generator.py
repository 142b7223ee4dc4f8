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
    """A prompt, how to continue it, and what has been generated."""

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
        """Returns whether a stop token or the length limit has been reached."""
        if not self.token_ids:
            return False
        return len(self.token_ids) >= self.parameters.max_tokens or self.token_ids[-1] in self.parameters.stop_token_ids


@dataclass
class _Batch:
    """The running requests and their shared state; row i of every tensor belongs to request i."""

    requests: list[Request]
    cache: kv.DynamicCache
    mask: torch.Tensor
    """[rows, length] int64: 1 where the cache holds a token of the row, 0 where it holds padding."""


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
        """Returns the number of requests that are waiting or decoding."""
        return len(self._waiting) + len(self._running)

    @property
    def _running(self) -> list[Request]:
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
        # The samples of one GRPO group share their prompt: it is computed once and its rows are repeated.
        texts = [(*request.prompt_ids, *request.token_ids) for request in requests]
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        length = max(map(len, rows))
        tokens = torch.tensor([[0] * (length - len(text)) + list(text) for text in rows])
        mask = torch.tensor([[0] * (length - len(text)) + [1] * len(text) for text in rows])
        cache = kv.DynamicCache()
        logits = self._forward(tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0), cache)
        kv.check_layers(cache, type(self.model).__name__)
        source = torch.tensor([rows[text] for text in texts])
        kv.select_rows(cache, source)
        joined = _Batch(requests, cache, mask[source])
        self._draw(joined, logits[source])
        if self._batch:
            self._merge(joined)
        else:
            self._batch = joined
        return self._remove_finished()

    def _decode(self) -> list[Request]:
        batch = self._batch
        tokens = torch.tensor([[request.token_ids[-1]] for request in batch.requests])
        positions = batch.mask.sum(-1, keepdim=True)
        batch.mask = torch.cat([batch.mask, torch.ones_like(positions)], dim=-1)
        self._draw(batch, self._forward(tokens, batch.mask, positions, batch.cache))
        return self._remove_finished()

    def _forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: kv.DynamicCache
    ) -> torch.Tensor:
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
        parameters = [request.parameters for request in batch.requests]
        tokens, log_probs = sample(
            logits,
            temperature=torch.tensor([one.temperature for one in parameters], dtype=torch.float32),
            top_k=torch.tensor([one.top_k for one in parameters], dtype=torch.int64),
            top_p=torch.tensor([one.top_p for one in parameters], dtype=torch.float32),
            uniforms=torch.tensor([request.uniforms[len(request.token_ids)] for request in batch.requests]),
            log_prob_mode=self.log_prob_mode,
        )
        for request, token, log_prob in zip(batch.requests, tokens.tolist(), log_probs.tolist(), strict=True):
            request.token_ids.append(token)
            request.log_probs.append(log_prob)

    def _merge(self, joined: _Batch) -> None:
        batch = self._batch
        length = max(batch.mask.shape[-1], joined.mask.shape[-1])
        batch.mask = torch.cat([_pad_left(batch.mask, length), _pad_left(joined.mask, length)])
        kv.append_rows(batch.cache, joined.cache)
        batch.requests += joined.requests

    def _remove_finished(self) -> list[Request]:
        finished = [request for request in self._running if request.finished]
        if finished:
            self._keep([row for row, request in enumerate(self._running) if not request.finished])
        return finished

    def _keep(self, rows: list[int]) -> None:
        batch = self._batch
        if batch is None or len(rows) == len(batch.requests):
            return
        if not rows:
            self._batch = None
            return
        index = torch.tensor(rows)
        mask = batch.mask[index]
        first_column = int(mask.argmax(-1).min())
        kv.select_rows(batch.cache, index, first_column)
        batch.mask = mask[:, first_column:]
        batch.requests = [batch.requests[row] for row in rows]


def _pad_left(mask: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(mask, (length - mask.shape[-1], 0))
