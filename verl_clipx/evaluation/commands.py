"""`clipx eval run|score|compare`."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from verl_clipx.evaluation.backends import GenerateOnCPU

DEFAULT_REWARD = "verl_clipx.tasks.reward:compute_score_for_evaluation"

console = Console()


def evaluation_app(generate_on_cpu: "GenerateOnCPU") -> typer.Typer:
    """The command group.

    Args:
        generate_on_cpu: the generator behind `--backend cpu`.
    """
    app = typer.Typer(no_args_is_help=True, help="Sample from checkpoints and estimate accuracy; compare runs.")
    app.command()(_run_command(generate_on_cpu))
    app.command()(score)
    app.command()(compare)
    return app


def _run_command(generate_on_cpu: "GenerateOnCPU") -> Callable[..., None]:
    def run(
        model: Annotated[
            str,
            typer.Argument(help="A run's folder of global_step_N, one of them, a Hugging Face folder, or a hub id."),
        ],
        benchmark: Annotated[
            list[str], typer.Option(help="Parquet file in verl's format, or NAME=FILE. May be repeated.")
        ],
        out: Annotated[Path, typer.Option(help="The evaluation's folder; the same command resumes what is in it.")],
        max_tokens: Annotated[int, typer.Option(help="Longest response, in tokens.")],
        protocol: Annotated[
            str, typer.Option(help="greedy, sampled, mean-of-last-three or best-validation (optimistic).")
        ] = "sampled",
        samples: Annotated[int | None, typer.Option(help="Samples a question; the protocol's by default.")] = None,
        temperature: Annotated[float | None, typer.Option(help="0 is greedy; the protocol's by default.")] = None,
        top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1 keeps all tokens.")] = 1.0,
        top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
        seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
        template: Annotated[
            str, typer.Option(help="chat, plain for a base model without a chat template, or package.module:NAME.")
        ] = "chat",
        limit: Annotated[int | None, typer.Option(help="Only the first questions of each benchmark.")] = None,
        reward: Annotated[str, typer.Option(help="Reward function, package.module:function.")] = DEFAULT_REWARD,
        correct: Annotated[
            str | None,
            typer.Option(help="Part of the reward that says what is right; correct, acc or score by default."),
        ] = None,
        correct_from: Annotated[float, typer.Option(help="Its smallest value of a right response.")] = 1.0,
        answer: Annotated[
            str | None, typer.Option(help="Function from text to answer, for maj@k; <answer> or \\boxed{} by default.")
        ] = None,
        backend: Annotated[str, typer.Option(help="vllm, or cpu.")] = "vllm",
        tensor_parallel_size: Annotated[int, typer.Option(help="vLLM: GPUs an engine.")] = 1,
        gpu_memory_utilization: Annotated[float, typer.Option(help="vLLM: share of a GPU's memory.")] = 0.9,
        dtype: Annotated[str, typer.Option(help="vLLM: type of the weights.")] = "auto",
        shard_size: Annotated[int, typer.Option(help="Completions stored at a time.")] = 256,
        merged_models: Annotated[
            Path | None, typer.Option(help="Where to keep merged FSDP checkpoints; inside the checkpoint by default.")
        ] = None,
    ) -> None:
        """Sample, score and report. Interrupted, the same command goes on where it stopped."""
        with _errors():
            from verl_clipx.evaluation.backends import cpu_backend
            from verl_clipx.evaluation.benchmark import read_benchmark
            from verl_clipx.evaluation.checkpoints import find_checkpoints
            from verl_clipx.evaluation.folder import EvaluationFolder
            from verl_clipx.evaluation.plan import Plan, sample_plan
            from verl_clipx.evaluation.protocols import PROTOCOLS
            from verl_clipx.evaluation.results import check_scoring
            from verl_clipx.evaluation.results import score as score_all
            from verl_clipx.evaluation.settings import SamplingSettings
            from verl_clipx.evaluation.vllm_backend import VLLMSettings, has_vllm, vllm_backend

            if protocol not in PROTOCOLS:
                raise ValueError(f"--protocol {protocol}: must be one of {', '.join(PROTOCOLS)}")
            chosen = PROTOCOLS[protocol]
            backends = {
                "vllm": vllm_backend(VLLMSettings(tensor_parallel_size, gpu_memory_utilization, dtype)),
                "cpu": cpu_backend(generate_on_cpu),
            }
            if backend not in backends:
                raise ValueError(f"--backend {backend}: must be one of {', '.join(backends)}")
            if backend == "vllm" and not has_vllm():
                raise ValueError(
                    "--backend vllm: vLLM is not installed here; pip install 'verl-clipx[gpu]', or --backend cpu"
                )
            named = [entry.partition("=") if "=" in entry else ("", "", entry) for entry in benchmark]
            rules = {"reward": reward, "answer": answer, "correct": correct, "correct_from": correct_from}
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
                **rules,
            )
            check_scoring(rules, plan.benchmarks)
            folder = EvaluationFolder(out)
            with _progress() as on_stage:
                sample_plan(folder, plan, backends[backend], shard_size, merged_models, on_stage)
                results = score_all(folder, on_stage("scoring"))
            _print_results(results, folder.results)

    return run


def score(
    folder: Annotated[Path, typer.Argument(help="The evaluation's folder.")],
    reward: Annotated[str | None, typer.Option(help="Another reward function, package.module:function.")] = None,
    answer: Annotated[str | None, typer.Option(help="Another function from text to answer.")] = None,
    correct: Annotated[str | None, typer.Option(help="Another part of the reward that says what is right.")] = None,
    correct_from: Annotated[float | None, typer.Option(help="Its smallest value of a right response.")] = None,
) -> None:
    """Score the stored completions again, for instance after the reward was mended."""
    with _errors():
        from verl_clipx.evaluation.folder import EvaluationFolder
        from verl_clipx.evaluation.results import benchmarks_of, check_scoring
        from verl_clipx.evaluation.results import score as score_all
        from verl_clipx.files import write_json

        evaluation = EvaluationFolder(folder)
        config = evaluation.read_config()
        given = {"reward": reward, "answer": answer, "correct": correct, "correct_from": correct_from}
        changed = {key: value for key, value in given.items() if value is not None}
        check_scoring(config | changed, benchmarks_of(config))
        if changed:
            # Scores of the old reward must not be taken for those of the new one.
            evaluation.results.unlink(missing_ok=True)
            write_json(evaluation.config, config | changed)
        with _progress() as on_stage:
            results = score_all(evaluation, on_stage("scoring"))
        _print_results(results, evaluation.results)


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of an evaluation.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one; differences are this one minus the first.")],
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the comparison to this JSON file.")] = None,
) -> None:
    """Paired bootstrap over the questions of two evaluations."""
    with _errors():
        from verl_clipx.evaluation.folder import EvaluationFolder
        from verl_clipx.evaluation.results import compare as compare_all
        from verl_clipx.files import write_json

        found = compare_all(EvaluationFolder(first), EvaluationFolder(second), seed=seed)
        for benchmark, metrics in found.items():
            table = Table(title=f"{benchmark}: second minus first", box=SIMPLE, pad_edge=False)
            for heading in ("metric", "first", "second", "difference [95 %]", "p", "+/-/="):
                table.add_column(heading, no_wrap=True)
            for metric, one in metrics.items():
                difference = f"{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
                counts = f"{one.wins}/{one.losses}/{one.ties}"
                table.add_row(metric, f"{one.first:.3f}", f"{one.second:.3f}", difference, f"{one.p_value:.4f}", counts)
            console.print(table)
        console.print(
            "Paired bootstrap over questions, 10,000 resamples. "
            "+/-/=: questions on which the second is higher, lower, equal."
        )
        if out is not None:
            as_json = {
                name: {metric: asdict(one) for metric, one in metrics.items()} for name, metrics in found.items()
            }
            write_json(out, {"first": str(first), "second": str(second), "seed": seed, "benchmarks": as_json})


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors that a user can mend into their message."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        console.print(f"[red]{escape(str(error))}[/]", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("interrupted; finished shards are kept, the same command goes on from there")
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A progress display; gives a function from a stage's name to its callback of (done, total)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:

        def on_stage(name: str) -> Callable[[int, int], None]:
            task = progress.add_task(name, total=None)
            return lambda done, total: progress.update(task, completed=done, total=total)

        yield on_stage


def _print_results(results: dict[str, Any], path: Path) -> None:
    config = results["config"]
    for name, found in results["benchmarks"].items():
        table = Table(title=f"{name}: {found['questions']} questions, {config['protocol']}")
        table.add_column("metric")
        table.add_column(", ".join(found["from_checkpoints"]))
        for metric, one in found["result"].items():
            table.add_row(metric, f"{one['mean']:.3f} [{one['low']:.3f}, {one['high']:.3f}]")
        console.print(table)
    if config["protocol"] == "best-validation":
        console.print("best-validation is optimistic: the checkpoint was chosen on the questions it is reported on.")
    console.print(f"Intervals: {results['interval']}. All results: {path}", soft_wrap=True)
