"""One evaluation: its questions, its checkpoints, and the runs of verl that sample what is missing."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from verl_clipx.common.command_line import installed_version
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.checkpoints import Checkpoint, Weights, find_weights
from verl_clipx.papers.evaluation.completions import chunk_folder, pending_chunks
from verl_clipx.papers.evaluation.folder import EvaluationFolder
from verl_clipx.papers.evaluation.settings import GREEDY, Protocol, SamplingSettings
from verl_clipx.papers.versions import versions_here


@dataclass(frozen=True)
class Plan:
    """What to evaluate, and how.

    Args:
        checkpoints: those that the protocol chose.
        overrides: Hydra overrides of verl's configuration.
        reward: the name of the function that scores completions.
        cluster: the key of extra_info that questions of one source share, or None.

    Raises:
        ValueError: two benchmarks have the same name, or the protocol "greedy" does not sample greedily.
    """

    model: str
    checkpoints: list[Checkpoint]
    protocol: Protocol
    benchmarks: list[Benchmark]
    sampling: SamplingSettings
    overrides: list[str]
    reward: str
    cluster: str | None

    def __post_init__(self) -> None:
        names = [benchmark.name for benchmark in self.benchmarks]
        if len(set(names)) < len(names):
            raise ValueError(f"--benchmark {', '.join(names)}: each needs a name of its own; write NAME=FILE")
        if self.protocol is GREEDY and self.sampling.temperature > 0:
            raise ValueError(
                f"--protocol greedy --temperature {self.sampling.temperature}: greedy always takes the most likely "
                "token. Use --protocol sampled"
            )


def sample_plan(folder: EvaluationFolder, plan: Plan, chunk_size: int, say: Callable[[str], None]) -> None:
    """Find or merge the models, record the configuration, and sample what is missing.

    Args:
        chunk_size: responses of one run of verl, and so what an interruption can lose.
        say: takes a line about what happens now.

    Raises:
        ValueError: the folder holds completions of another configuration, or the model cannot process these questions.
    """
    from verl_clipx.papers.evaluation.prompts import read_prompt_format
    from verl_clipx.papers.evaluation.validation_run import LOG, ValidationRun, base_model, compose_base, ranks_of

    base, sampling = compose_base(plan.overrides), plan.sampling
    model = base_model(base, plan.overrides)
    weights = {one.label: find_weights(one, ranks_of(base), model) for one in plan.checkpoints}
    prompts = {
        (label, benchmark.name): read_prompt_format(one.tokenizer, benchmark, sampling.template, sampling.max_tokens)
        for label, one in weights.items()
        for benchmark in plan.benchmarks
    }
    folder.claim(describe(plan, weights))
    for label, benchmark in [(label, benchmark) for label in weights for benchmark in plan.benchmarks]:
        completions = folder.completions(label, benchmark.name)
        questions, size = len(benchmark.questions), max(1, chunk_size // sampling.samples)
        for seed in sampling.seeds:
            for chunk in pending_chunks(completions, seed, questions, sampling.samples, size):
                of_prompts = prompts[label, benchmark.name]
                run = ValidationRun(base, weights[label], benchmark, chunk, of_prompts, sampling, seed)
                path = chunk_folder(completions, seed, chunk)
                say(
                    f"{label} on {benchmark.name}, seed {seed}: {len(chunk)} of {questions} questions, from number "
                    f"{chunk[0]} on; verl's log is {run.unfinished(path) / LOG}"
                )
                run.run(path)


def describe(plan: Plan, weights: dict[str, Weights]) -> dict[str, Any]:
    """Return the configuration as JSON: enough to interpret a number and to score the completions again."""
    sampling = asdict(plan.sampling) | {"samples": plan.sampling.samples_per_question}
    return {
        "model": plan.model,
        "checkpoints": {
            one.label: {
                "source": one.source,
                "step": one.step,
                "fingerprint": weights[one.label].fingerprint,
                "loaded": "as saved" if weights[one.label].resume_from else "in Hugging Face format",
            }
            for one in plan.checkpoints
        },
        "protocol": plan.protocol.name,
        "sampling": sampling,
        "overrides": plan.overrides,
        "benchmarks": {
            one.name: {"path": str(one.path.resolve()), "sha256": one.sha256, "questions": len(one.questions)}
            for one in plan.benchmarks
        },
        "reward": plan.reward,
        "cluster": plan.cluster,
        "versions": versions_here() | {"math-verify": installed_version("math-verify")},
    }
