"""Samples the missing part of an evaluation, shard by shard."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_clipx.common.command_line import installed_version
from verl_clipx.common.files import remove_partials
from verl_clipx.papers.evaluation.backends import Model, OpenBackend, SampleRequest, Tokens
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.checkpoints import fingerprint_of_folder
from verl_clipx.papers.evaluation.folder import EvaluationFolder, claim
from verl_clipx.papers.evaluation.prompts import check_context, encode_prompts, stop_token_ids
from verl_clipx.papers.evaluation.samples import Sample, finished_samples, pending_shards, write_shard
from verl_clipx.papers.evaluation.settings import SamplingSettings, sample_seed

if TYPE_CHECKING:
    from verl_clipx.papers.evaluation.plan import Plan

BACKEND_PACKAGES = {"vllm": ("torch", "transformers", "vllm"), "cpu": ("torch", "transformers", "verl-clipx")}


def sample_checkpoint(
    folder: EvaluationFolder,
    label: str,
    model_folder: Path,
    plan: "Plan",
    open_backend: OpenBackend,
    shard_size: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Sample every missing completion of a checkpoint, and store each shard as it finishes.

    Args:
        open_backend: the back end; it is opened only if something is missing.

    Raises:
        ValueError: the folder holds completions of another model, benchmark, setting or version, or the model cannot
            process these questions.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    benchmarks, settings = plan.benchmarks, plan.sampling
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    context = getattr(AutoConfig.from_pretrained(model_folder).get_text_config(), "max_position_embeddings", None)
    has_generation_config = (model_folder / "generation_config.json").is_file()
    stops = stop_token_ids(tokenizer, GenerationConfig.from_pretrained(model_folder) if has_generation_config else None)
    prompts = {benchmark.name: encode_prompts(tokenizer, benchmark, settings.template) for benchmark in benchmarks}
    fingerprint = fingerprint_of_folder(model_folder)
    shards: list[tuple[Benchmark, list[tuple[int, int]]]] = []
    done = total = 0
    for benchmark in benchmarks:
        check_context(benchmark, prompts[benchmark.name], settings.max_tokens, context)
        completions = folder.completions(label, benchmark.name)
        completions.mkdir(parents=True, exist_ok=True)
        remove_partials(completions)
        finished = finished_samples(completions)
        if not finished:
            # An evaluation that stopped before its first shard does not commit later ones to its settings.
            folder.origin(label, benchmark.name).unlink(missing_ok=True)
        claim(folder.origin(label, benchmark.name), origin(fingerprint, benchmark, settings, plan.backend))
        pending = pending_shards(finished, len(benchmark.questions), settings.samples, shard_size)
        shards += [(benchmark, pairs) for pairs in pending]
        total += len(benchmark.questions) * settings.samples
        done += len(benchmark.questions) * settings.samples - sum(map(len, pending))
    on_progress(done, total)
    if not shards:
        return

    longest = max(len(prompt) for encoded in prompts.values() for prompt in encoded) + settings.max_tokens
    model = Model(model_folder, stops, len(tokenizer), longest)
    requests = [
        [
            SampleRequest(
                prompts[benchmark.name][question], sample_seed(settings.seed, benchmark.name, question, sample)
            )
            for question, sample in pairs
        ]
        for benchmark, pairs in shards
    ]
    with open_backend(model, settings) as generate:
        for index, generated in generate(requests):
            benchmark, pairs = shards[index]
            completions = folder.completions(label, benchmark.name)
            write_shard(completions, to_samples(pairs, requests[index], generated, tokenizer, stops))
            done += len(pairs)
            on_progress(done, total)


def to_samples(
    pairs: list[tuple[int, int]],
    requests: list[SampleRequest],
    generated: list[Tokens],
    tokenizer: Any,
    stops: frozenset[int],
) -> list[Sample]:
    """Return completions in the form in which they are stored."""
    return [
        Sample(
            question=question,
            sample=sample,
            seed=request.seed,
            text=tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=tokens,
            length=len(tokens),
            truncated=not tokens or tokens[-1] not in stops,
        )
        for (question, sample), request, tokens in zip(pairs, requests, generated, strict=True)
    ]


def origin(fingerprint: str, benchmark: Benchmark, settings: SamplingSettings, backend_name: str) -> dict[str, Any]:
    """Return what a benchmark's completions depend on. The number of samples is excluded: more can be added later."""
    return {
        "model": fingerprint,
        "benchmark": benchmark.sha256,
        "template": settings.template,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "seed": settings.seed,
        "backend": backend_name,
        "versions": versions_of(BACKEND_PACKAGES[backend_name]),
    }


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return versions of distributions, "not installed" for those that are missing."""
    return {package: installed_version(package) or "not installed" for package in packages}
