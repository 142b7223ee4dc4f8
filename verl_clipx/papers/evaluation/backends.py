"""The back ends that generate responses: vLLM on GPUs, or a CPU generator that the caller provides.

A back end is a context manager. It provides a function that takes shards of requests and yields finished shards in any
order.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_clipx.papers.evaluation.settings import SamplingSettings


@dataclass(frozen=True)
class SampleRequest:
    """One completion to generate."""

    prompt_ids: list[int]
    seed: int


Tokens = list[int]
GenerateShards = Callable[[Sequence[list[SampleRequest]]], Iterator[tuple[int, list[Tokens]]]]
"""Maps shards to pairs (shard index, tokens of each of its requests, including any stop token), as they finish."""


@dataclass(frozen=True)
class Model:
    """What a back end needs to know about the model."""

    folder: Path
    stop_token_ids: frozenset[int]
    vocabulary_size: int
    """Number of tokens in the tokenizer; any further rows of the output layer are padding."""
    longest: int
    """Largest number of tokens in a prompt and its response together."""


OpenBackend = Callable[[Model, SamplingSettings], contextlib.AbstractContextManager[GenerateShards]]


GenerateOnCPU = Callable[..., list[Tokens]]
"""Maps a Hugging Face model, a list of requests, settings, and the keywords stop_token_ids and vocabulary_size to the
tokens of every request, including any stop token. Each request draws random numbers from its own seed."""


def cpu_backend(generate: GenerateOnCPU) -> OpenBackend:
    """Return a back end that generates in this process, in float32."""

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
