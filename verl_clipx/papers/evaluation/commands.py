"""The commands `clipx papers eval run`, `score` and `compare`."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from verl_clipx.common.command_line import end_help, reporting_errors
from verl_clipx.common.terminal import TerminalConsole

if TYPE_CHECKING:
    from verl_clipx.common.statistics.comparison import Comparison
    from verl_clipx.papers.evaluation.folder import EvaluationFolder

Cluster = Annotated[
    str | None,
    typer.Option(
        help="A key of extra_info that is equal for questions of one source; intervals are over sources then."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Show all metrics, not just the five that matter most.")]
METHOD = "The folder of an evaluation, or a quoted pattern of a method's folders, one for each training seed"

DEFAULT_REWARD = "verl_clipx.papers.tasks.reward:compute_score_for_evaluation"
SHOWN = ("avg", "pass", "maj", "length", "truncated")
"""The kinds of metrics that a table shows without --all; a kind is a metric's name before its @."""

app = typer.Typer(no_args_is_help=True, help="Sample from checkpoints, estimate accuracy, and compare runs.")
console = TerminalConsole()
messages = TerminalConsole(stderr=True)


@app.command(
    epilog=end_help(
        reads="the checkpoints, the benchmarks' Parquet files, and what is already in the folder of the evaluation",
        examples=(
            "clipx papers eval run runs/acpo/checkpoints --benchmark aime24.parquet --out eval --max-tokens 8192",
            "clipx papers eval run base_model --benchmark amc=amc.parquet --out eval --protocol greedy --max-tokens 9",
        ),
    ),
)
def run(
    model: Annotated[
        str,
        typer.Argument(
            help="A run's folder of global_step_N, one of them, a Hugging Face folder, or an id on the hub."
        ),
    ],
    benchmark_files: Annotated[
        list[str],
        typer.Option("--benchmark", help="A Parquet file in verl's format, or NAME=FILE; you can repeat the option."),
    ],
    out: Annotated[
        Path,
        typer.Option(help="The folder of the evaluation. If one is there, the same command goes on with it."),
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="The length at which a response is cut off, in tokens.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Hydra overrides of verl's configuration: +hardware=cpu, trainer.n_gpus_per_node=4, …"),
    ] = None,
    protocol: Annotated[str, typer.Option(help="How to sample: greedy, sampled or mean-of-last-three.")] = "sampled",
    samples: Annotated[
        int | None,
        # More than any published pass@k uses, and few enough that all responses fit in memory.
        typer.Option(min=1, max=1 << 14, help="Samples for each question and seed. Without it, the protocol's."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="The temperature, 0 for greedy. Without it, the protocol's.")
    ] = None,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="The top-p; 1 keeps all tokens.")] = 1.0,
    seeds: Annotated[
        list[int] | None,
        typer.Option(
            "--seed",
            min=0,
            max=(1 << 31) - 1,
            help="A seed of the samples; repeat the option for more samples. Without it, the seed is 0.",
        ),
    ] = None,
    template: Annotated[
        str,
        typer.Option(
            help="The chat template: chat, the model's own; plain, for a base model; or one in package.module:NAME."
        ),
    ] = "chat",
    reward: Annotated[str, typer.Option(help="The reward function, package.module:function.")] = DEFAULT_REWARD,
    cluster: Cluster = None,
    chunk_size: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Completions of one run of verl, which an interruption can lose.")
    ] = 4096,
    all_metrics: All = False,
) -> None:
    """Let verl sample, then score and report. After an interruption, the same command continues where it stopped."""
    with reporting_errors(RuntimeError):
        from verl_clipx.papers.evaluation.benchmark import read_benchmarks
        from verl_clipx.papers.evaluation.checkpoints import find_checkpoints
        from verl_clipx.papers.evaluation.folder import EvaluationFolder
        from verl_clipx.papers.evaluation.scores import load_reward
        from verl_clipx.papers.evaluation.settings import GREEDY, PROTOCOLS, SamplingSettings
        from verl_clipx.papers.evaluation.validation_run import sample

        if protocol not in PROTOCOLS:
            raise ValueError(f"--protocol {protocol}: must be one of {', '.join(PROTOCOLS)}")
        settings = PROTOCOLS[protocol]
        if settings is GREEDY and temperature:
            raise ValueError(
                f"--protocol greedy --temperature {temperature}: greedy always takes the most likely token. "
                "Use --protocol sampled"
            )
        sampling = SamplingSettings(
            samples=settings.samples if samples is None else samples,
            max_tokens=max_tokens,
            temperature=settings.temperature if temperature is None else temperature,
            top_p=top_p,
            seeds=tuple(seeds or (0,)),
            template=template,
        )
        checkpoints = settings.choose(find_checkpoints(model))
        benchmarks = read_benchmarks(benchmark_files)
        # A reward that cannot be used stops the command before anything is sampled.
        load_reward(reward, benchmarks, cluster)
        # The processes of the run may have other working folders.
        folder = EvaluationFolder(out.resolve())
        recorded = {"model": model, "protocol": protocol, "reward": reward, "cluster": cluster}
        sample(folder, checkpoints, benchmarks, sampling, overrides or [], recorded, chunk_size, messages.print_line)
        _score_and_print(folder, all_metrics)


@app.command(
    epilog=end_help(
        reads="the completions and the settings in the evaluation's folder",
        examples=(
            "clipx papers eval score eval/acpo",
            "clipx papers eval score eval/acpo --reward my_rewards:compute_score",
        ),
    ),
)
def score(
    folder: Annotated[Path, typer.Argument(help="The evaluation's folder.")],
    reward: Annotated[str | None, typer.Option(help="Another reward function, package.module:function.")] = None,
    cluster: Cluster = None,
    all_metrics: All = False,
) -> None:
    """Score the stored completions again. Use it after you fixed a reward."""
    with reporting_errors(RuntimeError):
        from verl_clipx.papers.evaluation.folder import EvaluationFolder

        _score_and_print(EvaluationFolder(folder), all_metrics, reward, cluster)


def _score_and_print(
    folder: "EvaluationFolder", all_metrics: bool, reward: str | None = None, cluster: str | None = None
) -> None:
    """Score an evaluation's completions and print a table for each benchmark.

    Args:
        reward, cluster: in place of those that the evaluation was made with; None for these.
    """
    from verl_clipx.common.statistics.estimate import Estimate
    from verl_clipx.papers.evaluation.scores import score as score_all

    with messages.status("scoring"):
        results = score_all(folder, reward, cluster)
    protocol = results["config"]["protocol"]
    for name, reported in results["benchmarks"].items():
        table = Table(title=escape(f"{name}: {reported['questions']} questions, {protocol}"))
        table.add_column("metric")
        table.add_column(escape(", ".join(reported["checkpoints"])))
        for metric in shown_metrics(reported["result"], all_metrics):
            table.add_row(escape(metric), str(Estimate(**reported["result"][metric])))
        console.print(table)
        if reported["no_interval"]:
            console.print_line(f"No intervals: {reported['no_interval']}.")
    console.print_line(f"Intervals: {results['interval']}. All results: {folder.results_path}")


def shown_metrics(metrics: Iterable[str], all_metrics: bool) -> list[str]:
    """Return the metrics that a table shows: all, or one of each kind in SHOWN, that of the most samples."""
    names = list(metrics)
    if all_metrics:
        return names
    # A later name replaces an earlier one of its kind: of several pass@j the last has the most samples.
    by_kind = {name.partition("@")[0]: name for name in names}
    return [by_kind[kind] for kind in SHOWN if kind in by_kind]


@app.command(
    epilog=end_help(
        reads="the scores in the evaluations' folders",
        examples=(
            "clipx papers eval compare eval/grpo eval/acpo",
            "clipx papers eval compare 'runs/grpo-seed*/evaluation/aime24' 'runs/acpo-seed*/evaluation/aime24'",
        ),
    ),
)
def compare(
    first: Annotated[str, typer.Argument(help=f"{METHOD}: 'runs/grpo-seed*/evaluation/aime24'.")],
    second: Annotated[
        str, typer.Argument(help="The same for another method; differences are this one minus the first.")
    ],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison to this JSON file.")] = None,
    all_metrics: All = False,
) -> None:
    """Say which of two methods or checkpoints is better.

    With at least 3 trainings of each, the interval covers seeds and questions together and is about the methods. With
    one evaluation of each, it covers questions and is about these two checkpoints. Otherwise there is no interval.
    """
    with reporting_errors(RuntimeError):
        from verl_clipx.common.files import write_json
        from verl_clipx.papers.evaluation.comparison import (
            compare_evaluations,
            describe_different_sampling,
            find_evaluations,
            verdicts,
        )

        first_folders = find_evaluations(first)
        second_folders = find_evaluations(second)
        compared = compare_evaluations(first_folders, second_folders)
        for benchmark, metrics in compared.items():
            _print_compared(benchmark, metrics, all_metrics)
        for line in verdicts(compared):
            console.print_line(line)
        for line in describe_different_sampling([*first_folders, *second_folders]):
            console.print_line(line)
        if out is not None:
            benchmarks: dict[str, Any] = {}
            for name, metrics in compared.items():
                benchmarks[name] = {metric: asdict(comparison) for metric, comparison in metrics.items()}
            write_json(
                out,
                {
                    "first": list(map(str, first_folders)),
                    "second": list(map(str, second_folders)),
                    "benchmarks": benchmarks,
                },
            )


def _print_compared(benchmark: str, metrics: dict[str, "Comparison"], all_metrics: bool) -> None:
    """Print the differences of two methods on a benchmark, a metric a line."""
    table = Table(title=escape(f"{benchmark}: second minus first"), box=SIMPLE, pad_edge=False)
    for heading in ("metric", "first", "second", "difference [95 %]", "p", "+/-/="):
        table.add_column(heading, no_wrap=True)
    for metric in shown_metrics(metrics, all_metrics):
        comparison = metrics[metric]
        difference = f"{comparison.difference:+.3f}"
        if comparison.low is not None:
            difference += f" [{comparison.low:+.3f}, {comparison.high:+.3f}]"
        table.add_row(
            escape(metric),
            f"{comparison.first:.3f}",
            f"{comparison.second:.3f}",
            difference,
            "" if comparison.p_value is None else f"{comparison.p_value:.4f}",
            f"{comparison.wins}/{comparison.losses}/{comparison.ties}",
        )
    console.print(table)
    console.print_line("+/-/=: questions on which the second is higher, lower, equal.")
