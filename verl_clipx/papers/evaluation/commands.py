"""The commands `clipx eval run` and `clipx eval score`, and the group `clipx eval`."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.common.terminal import TerminalConsole
from verl_clipx.papers.evaluation.comparison_commands import compare
from verl_clipx.papers.evaluation.console import console, errors

if TYPE_CHECKING:
    from verl_clipx.papers.evaluation.backends import GenerateOnCPU, OpenBackend
    from verl_clipx.papers.evaluation.vllm_backend import VLLMSettings

Cluster = Annotated[
    str | None,
    typer.Option(help="Key of extra_info that is equal for questions of one source: intervals are then over sources."),
]

DEFAULT_REWARD = "verl_clipx.papers.tasks.reward:compute_score_for_evaluation"


def evaluation_app(generate_on_cpu: "GenerateOnCPU") -> typer.Typer:
    """Return the command group `clipx eval`, whose commands find the generator of the CPU back end in their context."""
    app = typer.Typer(
        no_args_is_help=True,
        help="Sample from checkpoints, estimate accuracy, and compare runs.",
        context_settings={"obj": generate_on_cpu},
    )
    for command in (run, score, compare):
        app.command()(command)
    return app


def run(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A run's folder of global_step_N, one of them, a Hugging Face folder, or an id on the hub."
        ),
    ],
    benchmark: Annotated[
        list[str], typer.Option(help="Parquet file in verl's format, or NAME=FILE. You can repeat it.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the evaluation; the same command continues an evaluation that is in it.")
    ],
    max_tokens: Annotated[int, typer.Option(help="Longest response, in tokens.")],
    protocol: Annotated[
        str, typer.Option(help="greedy, sampled, mean-of-last-three or best-validation (optimistic).")
    ] = "sampled",
    samples: Annotated[int | None, typer.Option(help="Samples for each question; by default the protocol's.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature, 0 for greedy; by default the protocol's.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Top-p of nucleus sampling; 1 keeps all tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k: sample from this many tokens; 0 keeps all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    template: Annotated[
        str, typer.Option(help="chat; plain, for a base model without a chat template; or package.module:NAME.")
    ] = "chat",
    limit: Annotated[int | None, typer.Option(help="Only the first questions of each benchmark.")] = None,
    reward: Annotated[str, typer.Option(help="Reward function, package.module:function.")] = DEFAULT_REWARD,
    correct: Annotated[
        str | None,
        typer.Option(help="Part of the reward that says what is right; by default correct, acc or score."),
    ] = None,
    correct_from: Annotated[float, typer.Option(help="The smallest value of this part in a right response.")] = 1.0,
    answer: Annotated[
        str | None, typer.Option(help="Function from text to answer, for maj@k; by default <answer> or \\boxed{}.")
    ] = None,
    cluster: Cluster = None,
    backend: Annotated[str, typer.Option(help="vllm or cpu.")] = "vllm",
    tensor_parallel_size: Annotated[int, typer.Option(help="vLLM: GPUs for each engine.")] = 1,
    gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM: share of a GPU's memory that it may use.")] = 0.9,
    dtype: Annotated[str, typer.Option(help="vLLM: type of the weights.")] = "auto",
    shard_size: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Completions that are sampled and stored at a time.")
    ] = 256,
    merged_models: Annotated[
        Path | None, typer.Option(help="Folder of merged FSDP checkpoints; by default inside the checkpoint.")
    ] = None,
) -> None:
    """Sample, score and report. After an interruption, the same command continues where it stopped."""
    with errors():
        from verl_clipx.papers.evaluation.benchmark import read_benchmark
        from verl_clipx.papers.evaluation.checkpoints import find_checkpoints
        from verl_clipx.papers.evaluation.folder import EvaluationFolder
        from verl_clipx.papers.evaluation.plan import Plan, sample_plan
        from verl_clipx.papers.evaluation.protocols import PROTOCOLS
        from verl_clipx.papers.evaluation.results import check_scoring
        from verl_clipx.papers.evaluation.results import score as score_all
        from verl_clipx.papers.evaluation.settings import SamplingSettings
        from verl_clipx.papers.evaluation.vllm_backend import VLLMSettings

        if protocol not in PROTOCOLS:
            raise ValueError(
                f"--protocol {protocol}: must be one of {', '.join(PROTOCOLS)}.{did_you_mean(protocol, PROTOCOLS)}"
            )
        chosen = PROTOCOLS[protocol]
        opened = _backend(backend, VLLMSettings(tensor_parallel_size, gpu_memory_utilization, dtype), context.obj)
        named = [entry.partition("=") if "=" in entry else ("", "", entry) for entry in benchmark]
        rules = {
            "reward": reward,
            "answer": answer,
            "correct": correct,
            "correct_from": correct_from,
            "cluster": cluster,
        }
        plan = Plan(
            model=model,
            checkpoints=find_checkpoints(model),
            protocol=chosen,
            benchmarks=[read_benchmark(Path(path), name or None, limit=limit) for name, _, path in named],
            limit=limit,
            sampling=SamplingSettings(
                samples=chosen.samples if samples is None else samples,
                max_tokens=max_tokens,
                temperature=chosen.temperature if temperature is None else temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                template=template,
            ),
            backend=backend,
            rules=rules,
        )
        check_scoring(rules, plan.benchmarks)
        folder = EvaluationFolder(out)
        with _progress() as on_stage:
            sample_plan(folder, plan, opened, shard_size, merged_models, on_stage)
            results = score_all(folder, on_stage("scoring"))
        _print_results(results, folder.results)


def _backend(name: str, settings: "VLLMSettings", generate_on_cpu: "GenerateOnCPU") -> "OpenBackend":
    """Return the back end of that name."""
    from verl_clipx.papers.evaluation.backends import cpu_backend
    from verl_clipx.papers.evaluation.vllm_backend import has_vllm, vllm_backend

    if name == "cpu":
        return cpu_backend(generate_on_cpu)
    if name != "vllm":
        raise ValueError(f"--backend {name}: must be one of vllm, cpu")
    if not has_vllm():
        raise ValueError(
            "--backend vllm: vLLM is not installed here. Run pip install 'verl-clipx[gpu]', or use --backend cpu"
        )
    return vllm_backend(settings)


def score(
    folder: Annotated[Path, typer.Argument(help="The evaluation's folder.")],
    reward: Annotated[str | None, typer.Option(help="Another reward function, package.module:function.")] = None,
    answer: Annotated[str | None, typer.Option(help="Another function from text to answer.")] = None,
    correct: Annotated[str | None, typer.Option(help="Another part of the reward that says what is right.")] = None,
    correct_from: Annotated[
        float | None, typer.Option(help="The smallest value of this part in a right response.")
    ] = None,
    cluster: Cluster = None,
) -> None:
    """Score the stored completions again, for instance after the reward was fixed."""
    with errors():
        from verl_clipx.common.files import write_json
        from verl_clipx.papers.evaluation.benchmark import sources_of
        from verl_clipx.papers.evaluation.folder import EvaluationFolder
        from verl_clipx.papers.evaluation.results import benchmarks_of, check_scoring
        from verl_clipx.papers.evaluation.results import score as score_all

        evaluation = EvaluationFolder(folder)
        config = evaluation.read_config()
        given = {"reward": reward, "answer": answer, "correct": correct, "correct_from": correct_from}
        given["cluster"] = cluster
        changed = {key: value for key, value in given.items() if value is not None}
        benchmarks = benchmarks_of(config)
        check_scoring(config | changed, benchmarks)
        if cluster:
            for benchmark in benchmarks:
                config["benchmarks"][benchmark.name]["clusters"] = sources_of(benchmark, cluster)
        if changed:
            # Scores of the old reward must not be mistaken for those of the new one.
            evaluation.results.unlink(missing_ok=True)
            write_json(evaluation.config, config | changed)
        with _progress() as on_stage:
            results = score_all(evaluation, on_stage("scoring"))
        _print_results(results, evaluation.results)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Show progress; yields a function that maps a stage's name to its callback, which takes (done, total)."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=TerminalConsole(stderr=True)
    ) as progress:

        def on_stage(name: str) -> Callable[[int, int], None]:
            task = progress.add_task(name, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield on_stage


def _print_results(results: dict[str, Any], path: Path) -> None:
    from verl_clipx.common.statistics.estimate import Estimate

    config = results["config"]
    for name, found in results["benchmarks"].items():
        table = Table(title=escape(f"{name}: {found['questions']} questions, {config['protocol']}"))
        table.add_column("metric")
        table.add_column(escape(", ".join(found["from_checkpoints"])))
        for metric, one in found["result"].items():
            table.add_row(escape(metric), str(Estimate(**one)))
        console.print(table)
        if found["no_interval"]:
            console.print(f"No intervals: {found['no_interval']}.", markup=False, soft_wrap=True)
    if config["protocol"] == "best-validation":
        console.print(
            "best-validation is optimistic, because the checkpoint was chosen on the questions that are reported."
        )
    console.print(f"Intervals: {results['interval']}. All results: {path}", markup=False, soft_wrap=True)
