"""Runs verl on the questions of an evaluation that have no responses yet."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from verl_clipx.common.command_line import installed_version
from verl_clipx.papers.evaluation.benchmark import Benchmark
from verl_clipx.papers.evaluation.checkpoints import Checkpoint, find_weights
from verl_clipx.papers.evaluation.folder import UNFINISHED, EvaluationFolder, pending_chunks
from verl_clipx.papers.evaluation.prompts import load_template, read_prompt_format
from verl_clipx.papers.evaluation.settings import SamplingSettings
from verl_clipx.papers.evaluation.validation_run import LOG, ValidationRun, compose_base, ranks_of
from verl_clipx.papers.versions import versions_here


def sample(
    folder: EvaluationFolder,
    checkpoints: list[Checkpoint],
    benchmarks: list[Benchmark],
    sampling: SamplingSettings,
    overrides: list[str],
    recorded: dict[str, Any],
    chunk_size: int,
    say: Callable[[str], None],
) -> None:
    """Find or merge the models, record the configuration, and sample what is missing.

    Args:
        overrides: Hydra overrides of verl's configuration.
        recorded: what does not matter here but belongs to the configuration: model, protocol, reward and cluster.
        chunk_size: responses of one run of verl, and so what an interruption can lose.
        say: takes a line about what happens now.

    Raises:
        ValueError: the folder holds completions of another configuration, or the model cannot process these questions.
    """
    base, template = compose_base(overrides), load_template(sampling.template)
    # verl loads a checkpoint's shards on the model that the user names.
    named = any(override.startswith("actor_rollout_ref.model.path=") for override in overrides)
    trained = base.actor_rollout_ref.model.path if named else None
    weights = {one.label: find_weights(one, ranks_of(base), trained) for one in checkpoints}
    runs = {}
    for label, one in weights.items():
        for benchmark in benchmarks:
            prompts = read_prompt_format(one.tokenizer, benchmark, template, sampling.max_tokens)
            runs[label, benchmark.name] = ValidationRun(base, one, benchmark, prompts, sampling)
    # Enough to interpret a number and to score the completions again.
    config = {
        **recorded,
        "overrides": overrides,
        "checkpoints": {
            one.label: {
                "source": one.source,
                "step": one.step,
                "fingerprint": weights[one.label].fingerprint,
                "loaded": "as saved" if weights[one.label].resume_from else "in Hugging Face format",
            }
            for one in checkpoints
        },
        "sampling": asdict(sampling) | {"samples": sampling.samples_per_question},
        "benchmarks": {
            one.name: {"path": str(one.path.resolve()), "sha256": one.sha256, "questions": len(one.questions)}
            for one in benchmarks
        },
        "versions": versions_here() | {"math-verify": installed_version("math-verify")},
    }
    folder.claim(config)
    for (label, name), run in runs.items():
        questions = len(run.benchmark.questions)
        for seed in sampling.seeds:
            completions = folder.completions(label, name, seed)
            for chunk in pending_chunks(completions, questions, sampling.samples, chunk_size):
                say(
                    f"{label} on {name}, seed {seed}: {len(chunk)} of {questions} questions, from number {chunk[0]} "
                    f"on; verl's log is {completions / UNFINISHED / LOG}"
                )
                run.run(completions, seed, chunk)
