"""Shards over Ray actors with a stand-in for the engine, and what is handed to vLLM.

Not covered: vLLM itself and GPUs, which the machines that run the tests have not. The stand-in for the `vllm` module
accepts only the names that vLLM 0.24 has, so a misspelt one shows.
"""

import sys
import time
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray

from verl_clipx.papers.evaluation.backends import Model, SampleRequest
from verl_clipx.papers.evaluation.settings import SamplingSettings
from verl_clipx.papers.evaluation.vllm_backend import VLLMEngine, VLLMSettings, vllm_backend

pytestmark = pytest.mark.slow

MODEL = Model(Path("/model"), frozenset({7, 3}), 100, 64)
SAMPLING = SamplingSettings(samples=2, max_tokens=8, temperature=0.6, top_p=0.9, top_k=5, seed=2**40)


class Echo:
    """Gives a request's prompt and seed back, the first shard after another one; the model's folder says which came."""

    def __init__(self, model: Model, sampling: SamplingSettings, settings: VLLMSettings):
        assert (replace(model, folder=MODEL.folder), sampling, settings.tensor_parallel_size) == (MODEL, SAMPLING, 1)
        self.generated = model.folder

    def generate(self, requests):
        if not requests:
            raise ValueError("an empty shard")
        wait_until(lambda: requests[0].seed != 0 or any(self.generated.iterdir()))
        (self.generated / str(requests[0].seed)).touch()
        return [[*request.prompt_ids, request.seed] for request in requests]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, resources={"pretend": 2}, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def shards(count: int) -> list[list[SampleRequest]]:
    return [[SampleRequest([shard, 1], shard), SampleRequest([shard, 2], 10 + shard)] for shard in range(count)]


def test_every_shard_comes_back_once_with_its_number(cluster, tmp_path):
    with vllm_backend(VLLMSettings(), Echo, "pretend")(replace(MODEL, folder=tmp_path), SAMPLING) as generate:
        found = list(generate(shards(5)))
    assert dict(found) == {shard: [[shard, 1, shard], [shard, 2, 10 + shard]] for shard in range(5)}
    assert len(found) == 5
    # Two engines: the others do not wait for the slow one.
    assert found[0][0] != 0


def test_engines_give_their_devices_back_and_errors_come_through(cluster):
    with (
        pytest.raises(ray.exceptions.RayTaskError, match="an empty shard"),
        vllm_backend(VLLMSettings(), Echo, "pretend")(MODEL, SAMPLING) as generate,
    ):
        list(generate([[]]))
    wait_until(lambda: ray.available_resources().get("pretend", 0) == 2)


def test_too_few_devices_is_an_error(cluster):
    backend = vllm_backend(VLLMSettings(tensor_parallel_size=4), Echo, "pretend")
    with pytest.raises(RuntimeError, match="Ray sees 2 pretends"), backend(MODEL, SAMPLING):
        pass


@pytest.mark.parametrize(("option", "value"), [("tensor_parallel_size", 0), ("gpu_memory_utilization", 1.5)])
def test_settings_out_of_range_name_the_option(option, value):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} {value}"):
        VLLMSettings(**{option: value})


@dataclass
class SamplingParams:
    """The fields of vLLM's own that are used, with its defaults."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = 16
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    detokenize: bool = True


class LLM:
    """Answers with the prompt's first token and each request's seed."""

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        distributed_executor_backend: str | None = None,
        generation_config: str = "auto",
    ):
        type(self).options = dict(locals())

    def generate(self, prompts, sampling_params, *, use_tqdm=True):
        type(self).parameters = sampling_params
        return [
            types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=(prompt["prompt_token_ids"][0], one.seed))])
            for prompt, one in zip(prompts, sampling_params, strict=True)
        ]


@pytest.mark.parametrize(("size", "executor"), [(1, "uni"), (4, "mp")])
def test_what_vllm_is_told(monkeypatch, size, executor):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams))
    engine = VLLMEngine(MODEL, SAMPLING, VLLMSettings(tensor_parallel_size=size, gpu_memory_utilization=0.5))
    assert engine.generate(shards(2)[1]) == [[1, 1], [1, 11]]
    options = LLM.options
    assert (options["model"], options["max_model_len"], options["gpu_memory_utilization"]) == ("/model", 64, 0.5)
    assert (options["tensor_parallel_size"], options["distributed_executor_backend"]) == (size, executor)
    # The model's own sampling defaults must not come in.
    assert options["generation_config"] == "vllm" and 0 <= options["seed"] < 2**31
    assert LLM.parameters[1] == SamplingParams(
        n=1, temperature=0.6, top_p=0.9, top_k=5, max_tokens=8, seed=11, stop_token_ids=[3, 7], detokenize=False
    )
