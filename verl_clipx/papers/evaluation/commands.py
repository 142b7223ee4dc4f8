"""The commands `clipx eval run` and `clipx eval score`, and the group `clipx eval`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from verl_clipx.common.command_line import progress_bar
from verl_clipx.common.suggestions import did_you_mean
from verl_clipx.papers.evaluation.comparison_commands import compare
from verl_clipx.papers.evaluation.console import All, console, errors, messages, shown_metrics

Correct = Annotated[
    str | None, typer.Option(help="Part of the reward that says what is right; by default correct, acc or score.")
]
Answer = Annotated[
    str | None, typer.Option(help="Function from text to answer, for maj@k; by default <answer> or \\boxed{}.")
]
Cluster = Annotated[
    str | None,
    typer.Option(help="Key of extra_info that is equal for questions of one source: intervals are then over sources."),
]

DEFAULT_REWARD = "verl_clipx.papers.tasks.reward:compute_score_for_evaluation"

app = typer.Typer(no_args_is_help=True, help="Sample from checkpoints, estimate accuracy, and compare runs.")
app.command()(compare)


@app.command()
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
    max_tokens: Annotated[int, typer.Option(help="Longest response, in tokens.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Hydra overrides of verl's configuration: +hardware=cpu, trainer.n_gpus_per_node=4, …"),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="greedy, sampled, mean-of-last-three or best-validation (optimistic).")
    ] = "sampled",
    samples: Annotated[
        int | None, typer.Option(help="Samples for each question and seed; by default the protocol's.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature, 0 for greedy; by default the protocol's.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Top-p of nucleus sampling; 1 keeps all tokens.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Top-k: sample from this many tokens; 0 keeps all.")] = 0,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed of the samples, 0 by default. Each further one adds samples.")
    ] = None,
    template: Annotated[
        str, typer.Option(help="chat; plain, for a base model without a chat template; or package.module:NAME.")
    ] = "chat",
    limit: Annotated[int | None, typer.Option(help="Only the first questions of each benchmark.")] = None,
    reward: Annotated[str, typer.Option(help="Reward function, package.module:function.")] = DEFAULT_REWARD,
    correct: Correct = None,
    correct_from: Annotated[float, typer.Option(help="The smallest value of this part in a right response.")] = 1.0,
    answer: Answer = None,
    cluster: Cluster = None,
    chunk_size: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Completions of one run of verl: what an interruption can lose.")
    ] = 4096,
    merged_models: Annotated[
        Path | None, typer.Option(help="Folder of merged FSDP checkpoints; by default inside the checkpoint.")
    ] = None,
    all_metrics: All = False,
) -> None:
    """Let verl sample, then score and report. After an interruption, the same command continues where it stopped."""
    with errors():
        from verl_clipx.papers.evaluation.benchmark import read_benchmark
        from verl_clipx.papers.evaluation.checkpoints import find_checkpoints
        from verl_clipx.papers.evaluation.folder import EvaluationFolder
        from verl_clipx.papers.evaluation.protocols import PROTOCOLS
        from verl_clipx.papers.evaluation.results import check_scoring
        from verl_clipx.papers.evaluation.sampling import Plan, sample_plan
        from verl_clipx.papers.evaluation.settings import SamplingSettings

        if protocol not in PROTOCOLS:
            raise ValueError(
                f"--protocol {protocol}: must be one of {', '.join(PROTOCOLS)}.{did_you_mean(protocol, PROTOCOLS)}"
            )
        chosen = PROTOCOLS[protocol]
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
                seeds=tuple(seed or (0,)),
                template=template,
            ),
            overrides=overrides or [],
            rules=rules,
        )
        check_scoring(rules, plan.benchmarks)
        # The processes of the run may have other working folders.
        folder = EvaluationFolder(out.resolve())
        sample_plan(folder, plan, chunk_size, merged_models, messages.print_line)
        _score_and_print(folder, all_metrics)


@app.command()
def score(
    folder: Annotated[Path, typer.Argument(help="The evaluation's folder.")],
    reward: Annotated[str | None, typer.Option(help="Another reward function, package.module:function.")] = None,
    answer: Answer = None,
    correct: Correct = None,
    correct_from: Annotated[
        float | None, typer.Option(help="The smallest value of this part in a right response.")
    ] = None,
    cluster: Cluster = None,
    all_metrics: All = False,
) -> None:
    """Score the stored completions again, for instance after the reward was fixed."""
    with errors():
        from verl_clipx.common.files import write_json
        from verl_clipx.papers.evaluation.benchmark import sources_of
        from verl_clipx.papers.evaluation.folder import EvaluationFolder
        from verl_clipx.papers.evaluation.results import benchmarks_of, check_scoring

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
        _score_and_print(evaluation, all_metrics)


def _score_and_print(folder: Any, all_metrics: bool) -> None:
    from verl_clipx.common.statistics.estimate import Estimate
    from verl_clipx.papers.evaluation.results import score as score_all

    with progress_bar() as progress:
        task = progress.add_task("scoring", total=None)
        results = score_all(folder, lambda done, total: progress.update(task, completed=done, total=total))
    config = results["config"]
    for name, reported in results["benchmarks"].items():
        table = Table(title=escape(f"{name}: {reported['questions']} questions, {config['protocol']}"))
        table.add_column("metric")
        table.add_column(escape(", ".join(reported["from_checkpoints"])))
        for metric in shown_metrics(reported["result"], all_metrics):
            table.add_row(escape(metric), str(Estimate(**reported["result"][metric])))
        console.print(table)
        if reported["no_interval"]:
            console.print(f"No intervals: {reported['no_interval']}.", markup=False, soft_wrap=True)
    if config["protocol"] == "best-validation":
        console.print(
            "best-validation is optimistic, because the checkpoint was chosen on the questions that are reported."
        )
    console.print(f"Intervals: {results['interval']}. All results: {folder.results}", markup=False, soft_wrap=True)
