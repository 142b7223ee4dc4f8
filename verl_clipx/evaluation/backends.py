"""The back ends that generate: vLLM on GPUs, or a CPU generator that the caller provides.

A back end is a context manager; inside it, a function takes shards of requests and yields finished ones in any order.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.evaluation.settings import SamplingSettings


@dataclass(frozen=True)
class SampleRequest:
    """One completion to generate."""

    prompt_ids: list[int]
    seed: int


Tokens = list[int]
GenerateShards = Callable[[Sequence[list[SampleRequest]]], Iterator[tuple[int, list[Tokens]]]]
"""From shards to (index of the shard, tokens of each of its requests, a stop token included), as they finish."""


@dataclass(frozen=True)
class Model:
    """What a back end needs to know of the model."""

    folder: Path
    stop_token_ids: frozenset[int]
    vocabulary_size: int
    """Number of the tokenizer's tokens; later rows of the output layer only pad it."""
    longest: int
    """Largest number of tokens of a prompt and its response."""


OpenBackend = Callable[[Model, SamplingSettings], contextlib.AbstractContextManager[GenerateShards]]


GenerateOnCPU = Callable[..., list[Tokens]]
"""From a Hugging Face model, a list of requests, settings, and the keywords stop_token_ids and vocabulary_size, to the
tokens of every request, a stop token included. Each request has random numbers of its own seed."""


def cpu_backend(generate: GenerateOnCPU) -> OpenBackend:
    """A back end in this process, in float32."""

    @contextlib.contextmanager
    def opened(model: Model, settings: SamplingSettings) -> Iterator[GenerateShards]:
        import torch
        from transformers import AutoModelForCausalLM

        policy = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32, attn_implementation="sdpa")
        policy.eval().requires_grad_(False)

        def shards(given: Sequence[list[SampleRequest]]) -> Iterator[tuple[int, list[Tokens]]]:
            known = {"stop_token_ids": model.stop_token_ids, "vocabulary_size": model.vocabulary_size}
            for index, requests in enumerate(given):
                yield index, generate(policy, requests, settings, **known)

        yield shards

    return opened
