"""`clipx eval compare`: is a difference real?"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from verl_clipx.papers.evaluation.console import All, console, errors, shown_metrics

if TYPE_CHECKING:
    from verl_clipx.common.statistics.comparison import Comparison
    from verl_clipx.papers.evaluation.comparison import Compared

METHOD = "Folder of an evaluation, or a quoted pattern of a method's folders, one for each training seed"


def compare(
    first: Annotated[str, typer.Argument(help=f"{METHOD}: 'runs/grpo-seed*/evaluation/aime24'.")],
    second: Annotated[
        str, typer.Argument(help="The same for another method; differences are this one minus the first.")
    ],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison to this JSON file.")] = None,
    all_metrics: All = False,
) -> None:
    """Say whether one method is better than another, or one checkpoint than another.

    With at least 3 trainings of each, the interval covers seeds and questions together and is about the methods. With
    one evaluation of each, it covers questions and is about these two checkpoints. Otherwise there is no interval.
    """
    with errors():
        from verl_clipx.common.files import write_json
        from verl_clipx.papers.evaluation.comparison import compare_evaluations, find_evaluations

        folders = find_evaluations(first), find_evaluations(second)
        compared = compare_evaluations(*folders)
        for benchmark, one in compared.items():
            _print_compared(benchmark, one, all_metrics)
        for line in verdicts(compared):
            console.print(line, markup=False, soft_wrap=True, highlight=False)
        if out is not None:
            written: dict[str, Any] = {
                side: [str(folder.path) for folder in method]
                for side, method in zip(("first", "second"), folders, strict=True)
            }
            written["benchmarks"] = {
                name: {metric: asdict(value) for metric, value in one.metrics.items()} for name, one in compared.items()
            }
            written["variance"] = {name: one.variance() for name, one in compared.items()}
            write_json(out, written)


def _print_compared(benchmark: str, compared: "Compared", all_metrics: bool) -> None:
    table = Table(title=escape(f"{benchmark}: second minus first"), box=SIMPLE, pad_edge=False)
    for heading in ("metric", "first", "second", "difference [95 %]", "p", "+/-/="):
        table.add_column(heading, no_wrap=True)
    for metric in shown_metrics(compared.metrics, all_metrics):
        one = compared.metrics[metric]
        interval = "" if one.low is None else f" [{one.low:+.3f}, {one.high:+.3f}]"
        p_value = "" if one.p_value is None else f"{one.p_value:.4f}"
        counts = f"{one.wins}/{one.losses}/{one.ties}"
        means = f"{one.first:.3f}", f"{one.second:.3f}"
        table.add_row(escape(metric), *means, f"{one.difference:+.3f}{interval}", p_value, counts)
    console.print(table)
    for line in dict.fromkeys(_meaning(one, compared.questions) for one in compared.metrics.values()):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    console.print("+/-/=: questions on which the second is higher, lower, equal.", highlight=False)
    _print_variance(compared)


def _meaning(one: "Comparison", questions: int) -> str:
    from verl_clipx.common.statistics.comparison import QUESTIONS

    if one.over is None:
        return f"There is no interval: {one.refused}."
    if one.over == QUESTIONS:
        return (
            f"Intervals over {questions} questions, for these two checkpoints only. "
            f"There is no interval for the methods: {one.refused}."
        )
    return f"Intervals over {one.seeds[0]} and {one.seeds[1]} training seeds and {questions} questions together."


def verdicts(compared: Mapping[str, "Compared"]) -> list[str]:
    """Say for each benchmark whether the second method's accuracy is higher (Holm-corrected); needs 3 seeds or more."""
    from verl_clipx.common.statistics.collapse import caution
    from verl_clipx.common.statistics.comparison import corrected
    from verl_clipx.papers.evaluation.comparison import ACCURACY

    judged = corrected([one.metrics[ACCURACY] for one in compared.values()])
    lines = [
        f"{benchmark}: {ACCURACY} of the second is {one.verdict} the first ({one.p_text})."
        for benchmark, one in zip(compared, judged, strict=True)
        if one.verdict
    ]
    if len(lines) > 1:
        lines.append(f"These p are Holm’s over {len(lines)} benchmarks; those of the tables above are not corrected.")
    doubts = {caution(min(one.seeds)) for one in judged if one.verdict}
    return [*lines, *(f"{doubt}." for doubt in doubts if doubt)]


def _print_variance(compared: "Compared") -> None:
    table = Table(title="where the error of avg comes from", box=SIMPLE, pad_edge=False)
    for heading in ("part", "first: a sample", "the mean", "second: a sample", "the mean"):
        table.add_column(heading, no_wrap=True)
    sides = list(compared.variance().values())
    if None in sides:
        return
    for part in sides[0]["of_one_sample"]:
        values = [variances[part] for side in sides for variances in side.values()]
        texts = ["" if value is None else f"{value**0.5:.3f}" for value in values]
        table.add_row("question x seed" if part == "interaction" else part, *texts)
    console.print(table)
    console.print("Standard deviations. These evaluations cannot tell those of empty cells.", highlight=False)
