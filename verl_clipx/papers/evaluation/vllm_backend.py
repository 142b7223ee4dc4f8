"""Runs vLLM's offline engine on every GPU, or group of GPUs, of a Ray cluster.

vLLM and Ray are imported only when a back end opens, so that a machine without them can still score and compare.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_clipx.papers.evaluation.backends import GenerateShards, Model, OpenBackend, SampleRequest, Tokens
from verl_clipx.papers.evaluation.settings import SamplingSettings


def has_vllm() -> bool:
    """Return whether vLLM is installed, without importing it, which would take seconds and may touch the GPUs."""
    return importlib.util.find_spec("vllm") is not None


@dataclass(frozen=True)
class VLLMSettings:
    """How vLLM runs.

    Raises:
        ValueError: a value is outside its range; the message names the option.
    """

    tensor_parallel_size: int = 1
    """GPUs per engine, all on one node."""

    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory that vLLM may use; in (0, 1]."""

    dtype: str = "auto"
    """Type of weights and activations; "auto" uses the checkpoint's."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ValueError(f"--tensor-parallel-size {self.tensor_parallel_size}: must be at least 1")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: must be in (0, 1]")


class VLLMEngine:
    """One engine; lives in a Ray actor that owns its GPUs."""

    def __init__(self, model: Model, sampling: SamplingSettings, settings: VLLMSettings):
        from vllm import LLM

        self._model = model
        self._sampling = sampling
        self._llm = LLM(
            model=str(model.folder),
            dtype=settings.dtype,
            tensor_parallel_size=settings.tensor_parallel_size,
            # By default, vLLM in a Ray actor would ask Ray for the GPUs that this actor already holds.
            distributed_executor_backend="mp" if settings.tensor_parallel_size > 1 else "uni",
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_len=model.longest,
            # Otherwise the sampling defaults in the model's generation_config.json would override the settings.
            generation_config="vllm",
            seed=sampling.seed % 2**31,
        )

    def generate(self, requests: list[SampleRequest]) -> list[Tokens]:
        """Return the tokens of every request, including any stop token."""
        parameters = [sampling_parameters(self._model, self._sampling, request.seed) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def sampling_parameters(model: Model, sampling: SamplingSettings, seed: int) -> Any:
    """Return vLLM's sampling parameters for one request. Its own seed lets shards be sampled in any order."""
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
        stop_token_ids=sorted(model.stop_token_ids),
        detokenize=False,
    )


def vllm_backend(settings: VLLMSettings, engine: type = VLLMEngine, device: str = "GPU") -> OpenBackend:
    """Return a back end on all GPUs of the existing Ray cluster, or of this machine if there is none.

    Args:
        device: name of the Ray resource of which each engine takes `tensor_parallel_size`.
    """

    @contextlib.contextmanager
    def opened(model: Model, sampling: SamplingSettings) -> Iterator[GenerateShards]:
        import ray

        started_here = not ray.is_initialized()
        if started_here:
            # This joins a cluster named by RAY_ADDRESS or started by `ray start` on this node.
            ray.init(ignore_reinit_error=True, log_to_driver=False)
        devices = int(ray.cluster_resources().get(device, 0))
        count = devices // settings.tensor_parallel_size
        if count < 1:
            raise RuntimeError(
                f"--tensor-parallel-size {settings.tensor_parallel_size}: Ray sees {devices} {device}s, too few for "
                "one engine. Lower it, or evaluate on the CPU with --backend cpu"
            )
        needs = settings.tensor_parallel_size
        options = {"num_gpus": needs} if device == "GPU" else {"resources": {device: needs}}
        actors: list[Any] = []

        def shards(given: Sequence[list[SampleRequest]]) -> Iterator[tuple[int, list[Tokens]]]:
            while len(actors) < min(count, len(given)):
                actors.append(ray.remote(engine).options(**options).remote(model, sampling, settings))
            waiting = list(enumerate(given))[::-1]
            running: dict[Any, tuple[int, Any]] = {}
            idle = list(actors)
            while waiting or running:
                while waiting and idle:
                    index, requests = waiting.pop()
                    actor = idle.pop()
                    running[actor.generate.remote(requests)] = (index, actor)
                (done, *_), _ = ray.wait(list(running))
                index, actor = running.pop(done)
                idle.append(actor)
                yield index, ray.get(done)

        try:
            yield shards
        finally:
            for actor in actors:
                ray.kill(actor)
            if started_here:
                ray.shutdown()

    return opened
