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
    typer.Option(help="Key of extra_info that is equal for questions of one source: intervals are then over sources."),
]
All = Annotated[bool, typer.Option("--all", help="Show all metrics, not just the five that matter most.")]
METHOD = "Folder of an evaluation, or a quoted pattern of a method's folders, one for each training seed"

DEFAULT_REWARD = "verl_clipx.papers.tasks.reward:compute_score_for_evaluation"
SHOWN = ("avg", "pass", "maj", "length", "truncated")

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
    benchmark: Annotated[
        list[str], typer.Option(help="Parquet file in verl's format, or NAME=FILE. You can repeat it.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the evaluation; the same command continues an evaluation that is in it.")
    ],
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Hydra overrides of verl's configuration: +hardware=cpu, trainer.n_gpus_per_node=4, …"),
    ] = None,
    protocol: Annotated[str, typer.Option(help="greedy, sampled or mean-of-last-three.")] = "sampled",
    samples: Annotated[
        int | None,
        # More than any published pass@k uses, and few enough that all responses fit in memory.
        typer.Option(min=1, max=1 << 14, help="Samples for each question and seed; by default the protocol's."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Sampling temperature, 0 for greedy; by default the protocol's.")
    ] = None,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Top-p; 1 keeps all tokens.")] = 1.0,
    seed: Annotated[
        list[int] | None,
        typer.Option(min=0, max=(1 << 31) - 1, help="Seed of the samples, 0 by default. Repeat it for more samples."),
    ] = None,
    template: Annotated[
        str, typer.Option(help="chat; plain, for a base model without a chat template; or package.module:NAME.")
    ] = "chat",
    reward: Annotated[str, typer.Option(help="Reward function, package.module:function.")] = DEFAULT_REWARD,
    cluster: Cluster = None,
    chunk_size: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Completions of one run of verl: what an interruption can lose.")
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
        chosen = PROTOCOLS[protocol]
        if chosen is GREEDY and temperature:
            raise ValueError(
                f"--protocol greedy --temperature {temperature}: greedy always takes the most likely token. "
                "Use --protocol sampled"
            )
        sampling = SamplingSettings(
            samples=chosen.samples if samples is None else samples,
            max_tokens=max_tokens,
            temperature=chosen.temperature if temperature is None else temperature,
            top_p=top_p,
            seeds=tuple(seed or (0,)),
            template=template,
        )
        checkpoints = chosen.choose(find_checkpoints(model))
        benchmarks = read_benchmarks(benchmark)
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


def _score_and_print(folder: "EvaluationFolder", all_metrics: bool, *rules: str | None) -> None:
    from verl_clipx.common.statistics.estimate import Estimate
    from verl_clipx.papers.evaluation.scores import score as score_all

    with messages.status("scoring"):
        results = score_all(folder, *rules)
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
    console.print_line(f"Intervals: {results['interval']}. All results: {folder.results}")


def shown_metrics(metrics: Iterable[str], all_metrics: bool) -> list[str]:
    """Return the metrics that a table shows: `avg`, `pass` and `maj` of the most samples, `length` and `truncated`."""
    names = list(metrics)
    # Of several pass@j the last has the most draws.
    by_kind = {name.partition("@")[0]: name for name in names}
    return names if all_metrics else [by_kind[kind] for kind in SHOWN if kind in by_kind]


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
        from verl_clipx.papers.evaluation.comparison import compare_evaluations, find_evaluations, verdicts

        folders = {"first": find_evaluations(first), "second": find_evaluations(second)}
        compared = compare_evaluations(*folders.values())
        for benchmark, metrics in compared.items():
            _print_compared(benchmark, metrics, all_metrics)
        for line in verdicts(compared):
            console.print_line(line)
        if out is not None:
            written: dict[str, Any] = {side: list(map(str, paths)) for side, paths in folders.items()}
            written["benchmarks"] = {}
            for name, metrics in compared.items():
                written["benchmarks"][name] = {metric: asdict(comparison) for metric, comparison in metrics.items()}
            write_json(out, written)


def _print_compared(benchmark: str, metrics: dict[str, "Comparison"], all_metrics: bool) -> None:
    table = Table(title=escape(f"{benchmark}: second minus first"), box=SIMPLE, pad_edge=False)
    for heading in ("metric", "first", "second", "difference [95 %]", "p", "+/-/="):
        table.add_column(heading, no_wrap=True)
    for metric in shown_metrics(metrics, all_metrics):
        comparison = metrics[metric]
        interval = "" if comparison.low is None else f" [{comparison.low:+.3f}, {comparison.high:+.3f}]"
        p_value = "" if comparison.p_value is None else f"{comparison.p_value:.4f}"
        counts = f"{comparison.wins}/{comparison.losses}/{comparison.ties}"
        means = f"{comparison.first:.3f}", f"{comparison.second:.3f}"
        table.add_row(escape(metric), *means, f"{comparison.difference:+.3f}{interval}", p_value, counts)
    console.print(table)
    console.print_line("+/-/=: questions on which the second is higher, lower, equal.")
