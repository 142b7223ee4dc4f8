"""One evaluation: its questions, its checkpoints, and the runs of verl that sample what is missing."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.command_line import installed_version
from verl_clipx.common.files import write_json
from verl_clipx.papers.evaluation.benchmark import Benchmark, sources_of
from verl_clipx.papers.evaluation.checkpoints import Checkpoint, Weights, find_weights
from verl_clipx.papers.evaluation.completions import chunk_folder, pending_chunks, remove_unfinished
from verl_clipx.papers.evaluation.folder import EvaluationFolder, claim
from verl_clipx.papers.evaluation.protocols import GREEDY, Protocol, choose_checkpoints
from verl_clipx.papers.evaluation.settings import SamplingSettings

SAMPLING_PACKAGES = ("verl-clipx", "verl", "torch", "transformers", "vllm")
PACKAGES = (*SAMPLING_PACKAGES, "ray", "math-verify")


@dataclass(frozen=True)
class Plan:
    """What to evaluate, and how.

    Args:
        checkpoints: all checkpoints that the name stands for; the protocol chooses among them.
        limit: number of questions that each benchmark was cut to.
        overrides: Hydra overrides of verl's configuration.
        rules: how completions are scored: the names of `reward` and of `answer`, which maps a text to its answer, or
            None for `extract_answer`; `correct`, the part of the reward that decides correctness, or None for the first
            that exists; `correct_from`, its smallest value in a correct response; `cluster`, the key of extra_info that
            questions of one source share, or None.

    Raises:
        ValueError: two benchmarks have the same name, or the protocol "greedy" does not sample greedily.
    """

    model: str
    checkpoints: list[Checkpoint]
    protocol: Protocol
    benchmarks: list[Benchmark]
    limit: int | None
    sampling: SamplingSettings
    overrides: list[str]
    rules: dict[str, Any]

    def __post_init__(self) -> None:
        names = [benchmark.name for benchmark in self.benchmarks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"--benchmark: two benchmarks are called {', '.join(twice)}; name them with --benchmark NAME=FILE"
            )
        if self.protocol is GREEDY and self.sampling.temperature > 0:
            raise ValueError(
                f"--protocol greedy --temperature {self.sampling.temperature}: greedy always takes the most likely "
                "token. Use --protocol sampled"
            )

    def chosen(self) -> list[Checkpoint]:
        """The checkpoints that the protocol evaluates, in training order."""
        by_step = {checkpoint.step: checkpoint for checkpoint in self.checkpoints}
        if None in by_step:
            # This model is not a run's checkpoint: protocols over several checkpoints have nothing to choose from.
            return [by_step[None] for _ in choose_checkpoints(self.protocol, [0])]
        return [by_step[step] for step in choose_checkpoints(self.protocol, list(by_step))]


def sample_plan(
    folder: EvaluationFolder, plan: Plan, chunk_size: int, merged_models: Path | None, say: Callable[[str], None]
) -> None:
    """Find or merge the models, sample what is missing, and record the configuration.

    Args:
        chunk_size: responses of one run of verl, and so what an interruption can lose.
        merged_models: where to keep merged checkpoints; None keeps each inside its own checkpoint.
        say: takes a line about what happens now.

    Raises:
        ValueError: the folder holds completions of another model, benchmark, setting or version, or the model cannot
            process these questions.
    """
    from verl_clipx.papers.evaluation.prompts import read_prompt_format
    from verl_clipx.papers.evaluation.validation_run import (
        ValidationRun,
        base_model,
        compose_base,
        ranks_of,
        require_engine,
    )

    base, sampling = compose_base(plan.overrides), plan.sampling
    require_engine(base)
    weights = {
        one.label: find_weights(one, ranks_of(base), base_model(base, plan.overrides), merged_models)
        for one in plan.chosen()
    }
    for label, benchmark in [(label, benchmark) for label in weights for benchmark in plan.benchmarks]:
        prompts = read_prompt_format(weights[label].tokenizer, benchmark, sampling.template, sampling.max_tokens)
        completions, claimed = folder.completions(label, benchmark.name), folder.origin(label, benchmark.name)
        completions.mkdir(parents=True, exist_ok=True)
        remove_unfinished(completions)
        if not any(completions.glob("seed-*/*")):
            # An evaluation that stopped before its first chunk does not commit later ones to its settings.
            claimed.unlink(missing_ok=True)
        claim(claimed, origin(weights[label], benchmark, plan))
        questions, size = len(benchmark.questions), max(1, chunk_size // sampling.samples)
        for seed in sampling.seeds:
            for chunk in pending_chunks(completions, seed, questions, sampling.samples, size):
                path = chunk_folder(completions, seed, chunk)
                say(
                    f"{label} on {benchmark.name}, seed {seed}: {len(chunk)} of {questions} questions, from number "
                    f"{chunk[0]} on; verl's log is {path}.unfinished/run.log"
                )
                ValidationRun(base, weights[label], benchmark, chunk, prompts, sampling, seed).run(path)
    # Results of an earlier configuration do not belong to this one.
    folder.results.unlink(missing_ok=True)
    write_json(folder.config, describe(plan, weights))


def origin(weights: Weights, benchmark: Benchmark, plan: Plan) -> dict[str, Any]:
    """Return what a benchmark's completions depend on. Seeds are excluded: more can be added later."""
    return {
        "model": weights.fingerprint,
        "loaded": "as saved" if weights.resume_from else "in Hugging Face format",
        "benchmark": benchmark.sha256,
        **{key: value for key, value in asdict(plan.sampling).items() if key != "seeds"},
        # Nodes, GPUs and the like may differ when an evaluation goes on.
        "overrides": [override for override in plan.overrides if not override.startswith("trainer.")],
        "versions": versions_of(SAMPLING_PACKAGES),
    }


def describe(plan: Plan, weights: dict[str, Weights]) -> dict[str, Any]:
    """Return the configuration as JSON: enough to interpret a number and to score the completions again."""
    samples = {"samples": plan.sampling.samples_per_question, "seeds": list(plan.sampling.seeds)}
    return {
        "model": plan.model,
        "checkpoints": {
            one.label: {"source": one.source, "step": one.step, "fingerprint": weights[one.label].fingerprint}
            for one in plan.chosen()
        },
        "protocol": plan.protocol.name,
        "sampling": {**asdict(plan.sampling), **samples},
        "overrides": plan.overrides,
        "benchmarks": {
            benchmark.name: {
                "path": str(benchmark.path.resolve()),
                "sha256": benchmark.sha256,
                "questions": len(benchmark.questions),
                "limit": plan.limit,
                "clusters": sources_of(benchmark, plan.rules["cluster"]) if plan.rules["cluster"] else None,
            }
            for benchmark in plan.benchmarks
        },
        **plan.rules,
        "versions": versions_of(PACKAGES),
    }


def versions_of(packages: Sequence[str]) -> dict[str, str]:
    """Return versions of distributions, "not installed" for those that are missing."""
    return {package: installed_version(package) or "not installed" for package in packages}
