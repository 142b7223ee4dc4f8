"""One evaluation: its questions, its checkpoints, how they are sampled, and the sampling itself."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_clipx.common.files import write_json
from verl_clipx.papers.evaluation.backends import OpenBackend
from verl_clipx.papers.evaluation.benchmark import Benchmark, sources_of
from verl_clipx.papers.evaluation.checkpoints import Checkpoint, fingerprint_of_folder, model_folder
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.protocols import GREEDY, Protocol, choose_checkpoints
from verl_clipx.papers.evaluation.sampling import sample_checkpoint, versions_of
from verl_clipx.papers.evaluation.settings import SamplingSettings

PACKAGES = ("verl-clipx", "verl", "torch", "transformers", "vllm", "ray", "math-verify")


@dataclass(frozen=True)
class Plan:
    """What to evaluate, and how.

    Args:
        checkpoints: all checkpoints that the name stands for; the protocol chooses among them.
        limit: number of questions that each benchmark was cut to.
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
    backend: str
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
    folder: EvaluationFolder,
    plan: Plan,
    open_backend: OpenBackend,
    shard_size: int,
    merged_models: Path | None,
    on_stage: Callable[[str], Callable[[int, int], None]],
) -> None:
    """Find or merge the models, record the configuration, and sample what is missing.

    Args:
        merged_models: where to keep merged checkpoints; None keeps each inside its own checkpoint.
    """
    chosen = plan.chosen()
    models = {}
    preparing = on_stage("model in Hugging Face format")
    for done, checkpoint in enumerate(chosen):
        preparing(done, len(chosen))
        models[checkpoint.label] = model_folder(checkpoint, merged_models)
    preparing(len(chosen), len(chosen))
    config = describe(plan, chosen, models)
    for label, model in models.items():
        sample_checkpoint(folder, label, model, plan, open_backend, shard_size, on_stage(f"sampling {label}"))
    # Results of an earlier configuration do not belong to this one.
    folder.results.unlink(missing_ok=True)
    write_json(folder.config, config)


def describe(plan: Plan, chosen: list[Checkpoint], models: dict[str, Path]) -> dict[str, Any]:
    """Return the configuration as JSON: enough to interpret a number and to score the completions again."""
    return {
        "model": plan.model,
        "checkpoints": {
            checkpoint.label: {
                "source": checkpoint.source,
                "step": checkpoint.step,
                "fingerprint": fingerprint_of_folder(models[checkpoint.label]),
            }
            for checkpoint in chosen
        },
        "protocol": plan.protocol.name,
        "protocol_summary": plan.protocol.summary,
        "sampling": asdict(plan.sampling),
        "backend": plan.backend,
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
