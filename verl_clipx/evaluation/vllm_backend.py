"""vLLM's offline engine, one on every GPU (or group of GPUs) of a Ray cluster.

vLLM and Ray are imported when a back end opens: a machine without them can still score and compare.
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_clipx.evaluation.backends import GenerateShards, Model, OpenBackend, SampleRequest, Tokens
from verl_clipx.evaluation.settings import SamplingSettings


def has_vllm() -> bool:
    """Whether vLLM is installed; importing it would take seconds and may touch the GPUs."""
    return importlib.util.find_spec("vllm") is not None


@dataclass(frozen=True)
class VLLMSettings:
    """How vLLM runs.

    Raises:
        ValueError: a value is outside its range; the message names the option.
    """

    tensor_parallel_size: int = 1
    """GPUs an engine, all on one node."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that vLLM may take; in (0, 1]."""

    dtype: str = "auto"
    """Type of weights and activations; auto takes the checkpoint's."""

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
            # Inside a Ray actor vLLM would otherwise ask Ray for the GPUs that this actor already holds.
            distributed_executor_backend="mp" if settings.tensor_parallel_size > 1 else "uni",
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_len=model.longest,
            # Sampling defaults of the model's generation_config.json would change what was asked for.
            generation_config="vllm",
            seed=sampling.seed % 2**31,
        )

    def generate(self, requests: list[SampleRequest]) -> list[Tokens]:
        """Tokens of every request, a stop token included."""
        parameters = [sampling_parameters(self._model, self._sampling, request.seed) for request in requests]
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def sampling_parameters(model: Model, sampling: SamplingSettings, seed: int) -> Any:
    """vLLM's sampling parameters of one request; its own seed, so that shards can be sampled in any order."""
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
    """A back end on all GPUs of the Ray cluster that is there, or of this machine.

    Args:
        device: name of the Ray resource that an engine takes `tensor_parallel_size` of.
    """

    @contextlib.contextmanager
    def opened(model: Model, sampling: SamplingSettings) -> Iterator[GenerateShards]:
        import ray

        started_here = not ray.is_initialized()
        if started_here:
            # A cluster named by RAY_ADDRESS or started by `ray start` on this node is joined.
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
