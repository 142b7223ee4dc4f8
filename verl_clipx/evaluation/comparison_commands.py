"""`clipx eval compare` and `clipx eval power`: is a difference real, and what does it take to detect one?"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from verl_clipx.evaluation.console import console, errors

if TYPE_CHECKING:
    from verl_clipx.common.statistics.comparison import Comparison
    from verl_clipx.common.statistics.power import Design, Parts
    from verl_clipx.evaluation.comparison import Compared

METHOD = "Folder of an evaluation, or a quoted pattern of a method's folders, one for each training seed"


def compare(
    first: Annotated[str, typer.Argument(help=f"{METHOD}: 'runs/grpo-seed*/evaluation/aime24'.")],
    second: Annotated[
        str, typer.Argument(help="The same for another method; differences are this one minus the first.")
    ],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison to this JSON file.")] = None,
) -> None:
    """Say whether one method is better than another, or one checkpoint than another.

    With at least 3 trainings of each, the interval covers seeds and questions together and is about the methods. With
    one evaluation of each, it covers questions and is about these two checkpoints. Otherwise there is no interval.
    """
    with errors():
        from verl_clipx.common.files import write_json
        from verl_clipx.evaluation.comparison import compare_evaluations, find_evaluations

        folders = find_evaluations(first), find_evaluations(second)
        found = compare_evaluations(*folders)
        for benchmark, one in found.items():
            _print_compared(benchmark, one)
        for line in verdicts(found):
            console.print(line, markup=False, soft_wrap=True, highlight=False)
        if out is not None:
            names = [[str(folder.path) for folder in method] for method in folders]
            written: dict[str, Any] = {"first": names[0], "second": names[1]}
            written["benchmarks"] = {
                name: {metric: asdict(value) for metric, value in one.metrics.items()} for name, one in found.items()
            }
            written["variance"] = {name: one.variance_as_dict() for name, one in found.items()}
            write_json(out, written)


def _print_compared(benchmark: str, found: "Compared") -> None:
    table = Table(title=escape(f"{benchmark}: second minus first"), box=SIMPLE, pad_edge=False)
    for heading in ("metric", "first", "second", "difference [95 %]", "p", "+/-/="):
        table.add_column(heading, no_wrap=True)
    for metric, one in found.metrics.items():
        interval = "" if one.low is None else f" [{one.low:+.3f}, {one.high:+.3f}]"
        p_value = "" if one.p_value is None else f"{one.p_value:.4f}"
        counts = f"{one.wins}/{one.losses}/{one.ties}"
        means = f"{one.first:.3f}", f"{one.second:.3f}"
        table.add_row(escape(metric), *means, f"{one.difference:+.3f}{interval}", p_value, counts)
    console.print(table)
    for line in dict.fromkeys(_meaning(one, found.questions) for one in found.metrics.values()):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    console.print("+/-/=: questions on which the second is higher, lower, equal.", highlight=False)
    _print_variance(found)


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


def verdicts(found: Mapping[str, "Compared"]) -> list[str]:
    """Say for each benchmark whether the second method's accuracy is higher (Holm-corrected); needs 3 seeds or more."""
    from verl_clipx.common.statistics.collapse import caution
    from verl_clipx.common.statistics.comparison import corrected
    from verl_clipx.evaluation.comparison import ACCURACY

    judged = corrected([one.metrics[ACCURACY] for one in found.values()])
    lines = [
        f"{benchmark}: {ACCURACY} of the second is {one.verdict} the first ({one.p_text})."
        for benchmark, one in zip(found, judged, strict=True)
        if one.verdict
    ]
    if len(lines) > 1:
        lines.append(f"These p are Holm’s over {len(lines)} benchmarks; those of the tables above are not corrected.")
    doubts = {caution(min(one.seeds)) for one in judged if one.verdict}
    return [*lines, *(f"{doubt}." for doubt in doubts if doubt)]


def _print_variance(found: "Compared") -> None:
    table = Table(title="where the error of avg comes from", box=SIMPLE, pad_edge=False)
    for heading in ("part", "first: a sample", "the mean", "second: a sample", "the mean"):
        table.add_column(heading, no_wrap=True)
    cells: dict[str, list[str]] = {}
    for split, seeds, samples in zip(found.variance.values(), found.seeds, found.samples, strict=True):
        if split is None:
            return
        parts, of_mean = asdict(split), split.of_mean(found.questions, seeds, samples or 1)
        for part in parts:
            texts = ["" if value is None else f"{value**0.5:.3f}" for value in (parts[part], of_mean[part])]
            cells.setdefault(part, []).extend(texts)
    for part, texts in cells.items():
        table.add_row("question x seed" if part == "interaction" else part, *texts)
    console.print(table)
    console.print("Standard deviations. These evaluations cannot tell those of empty cells.", highlight=False)


def power(
    points: Annotated[float, typer.Option(help="The difference to detect, in points (hundredths) of accuracy.")],
    questions: Annotated[int, typer.Option(help="Number of questions of the benchmark.")] = 500,
    samples: Annotated[int, typer.Option(help="Samples for each question.")] = 8,
    seeds: Annotated[
        int, typer.Option(help="Trainings of each method, at least 3; or 1 to compare two checkpoints as they are.")
    ] = 3,
    accuracy: Annotated[float, typer.Option(help="The baseline's accuracy, between 0 and 1.")] = 0.5,
    spread: Annotated[
        float, typer.Option(help="Share of a score's variance that lies between questions, 0 to 1.")
    ] = 0.5,
    agreement: Annotated[
        float,
        typer.Option(help="Correlation, over questions, of two trainings' probabilities of a right answer, 0 to 1."),
    ] = 0.9,
    seed_deviation: Annotated[
        float, typer.Option(help="Standard deviation of the accuracy between trainings, in points.")
    ] = 2.0,
    prior: Annotated[
        list[str] | None,
        typer.Option(help=f"{METHOD}; its measurements replace assumptions. Give it twice for two methods."),
    ] = None,
    benchmark: Annotated[str | None, typer.Option(help="Which benchmark of the prior evaluations to use.")] = None,
    wanted: Annotated[
        float, typer.Option("--power", help="The probability of detecting it that a design should have.")
    ] = 0.8,
    out: Annotated[Path | None, typer.Option(help="Also write it to this JSON file.")] = None,
) -> None:
    """Before spending: the chance that `clipx eval compare` shows a difference, and what it takes for 80 %.

    Say what you plan and what you expect, or give prior evaluations; all assumptions are printed.
    """
    with errors():
        from verl_clipx.common.files import write_json
        from verl_clipx.common.statistics.power import Design, Parts, assumed_parts, power_of

        if not 0 < points < 100:
            raise ValueError(f"--points {points}: must be above 0 and below 100")
        if not 0 < wanted < 1:
            raise ValueError(f"--power {wanted}: must be in (0, 1)")
        design = Design(questions, samples, seeds)
        found, measured = _prior(prior or [], benchmark)
        guessed = assumed_parts(found.get("accuracy", accuracy), spread, agreement, seed_deviation / 100)
        parts = Parts(**{part: measured.get(part, value) for part, value in asdict(guessed).items()})
        _print_parts(parts, measured, found)
        chance = power_of(parts, points / 100, design)
        console.print(
            f"A true difference of {points:g} points, {questions} questions, {samples} samples, {seeds} "
            f"{'seed' if seeds == 1 else 'seeds'} of each method: it is detected with a probability of {chance:.0%}.",
            soft_wrap=True,
            highlight=False,
        )
        if seeds == 1:
            console.print("This is about these two checkpoints; one seed says nothing about the methods.")
        ways = _ways(parts, points / 100, design, wanted)
        options = _options(parts, points / 100, design, wanted)
        if out is not None:
            written = {"points": points, "wanted": wanted, "parts": asdict(parts), "measured": sorted(measured)}
            written |= {"design": asdict(design), "power": chance, "ways": ways, "options": options}
            write_json(out, written)


def _prior(patterns: list[str], benchmark: str | None) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the design of prior evaluations, and the variance components that they determine."""
    if not patterns:
        return {}, {}
    from verl_clipx.common.statistics.power import measured_parts
    from verl_clipx.evaluation.comparison import ACCURACY, find_evaluations, read_sides

    if len(patterns) > 2:
        raise ValueError("--prior: give one method or two")
    methods = [find_evaluations(pattern) for pattern in patterns]
    sides = read_sides(*methods)
    if benchmark is None and len(sides) > 1:
        raise ValueError(f"--benchmark: the prior evaluations have {', '.join(sides)}; choose one")
    name = benchmark or next(iter(sides))
    if name not in sides:
        raise ValueError(f"--benchmark {name}: the prior evaluations have {', '.join(sides)}")
    found, _ = sides[name]
    samples = found[0].samples if len({side.samples for side in found}) == 1 else None
    values = [side.values[ACCURACY] for side in found]
    parts = measured_parts(values[0], values[1] if len(values) > 1 else None, samples)
    about = {"accuracy": float(values[0].mean()), "trainings": [len(side) for side in values]}
    if not 0 < about["accuracy"] < 1:
        raise ValueError(
            f"--prior {patterns[0]}: its accuracy is {about['accuracy']:g}, from which no variance can be estimated"
        )
    return about, parts


def _print_parts(parts: "Parts", measured: dict[str, float], prior: dict[str, Any]) -> None:
    table = Table(title="what the difference varies by", box=SIMPLE, pad_edge=False)
    for heading in ("part", "standard deviation", "from"):
        table.add_column(heading, no_wrap=True)
    meaning = {
        "method": "method x question",
        "seed": "seed",
        "interaction": "seed x question",
        "sample": "sample",
    }
    trainings = " and ".join(map(str, prior.get("trainings", [])))
    for part, value in asdict(parts).items():
        source = f"prior evaluations of {trainings} trainings" if part in measured else "assumed"
        table.add_row(meaning[part], f"{value**0.5:.3f}", source)
    console.print(table)


def _ways(parts: "Parts", difference: float, design: "Design", wanted: float) -> dict[str, int | None]:
    """Print and return what each number would have to be if only it changed; None where that can never suffice."""
    from verl_clipx.common.statistics.power import MOST, needed

    found = {}
    table = Table(title=f"for {wanted:.0%}, all else as planned", box=SIMPLE, pad_edge=False)
    table.add_column("change")
    table.add_column("to", no_wrap=True)
    for what in ("questions", "samples", "seeds"):
        enough = needed(parts, difference, design, what, wanted)
        found[what] = None if enough is None else getattr(enough, what)
        table.add_row(what, f"{found[what]:,}" if enough else f"not with {MOST[what]:,}")
    console.print(table)
    return found


def _options(parts: "Parts", difference: float, design: "Design", wanted: float) -> list[dict[str, int | None]]:
    """Print and return the questions needed for that power, by seeds and samples."""
    from verl_clipx.common.statistics.power import needed

    samples = sorted({1, 8, 32, design.samples})
    table = Table(title=f"questions for {wanted:.0%}", box=SIMPLE, pad_edge=False)
    table.add_column("seeds")
    for count in samples:
        table.add_column(f"{count} {'sample' if count == 1 else 'samples'}", no_wrap=True)
    found = []
    for seeds in sorted({3, 5, 10, 20, design.seeds}):
        cells = [
            needed(parts, difference, replace(design, samples=k, seeds=seeds), "questions", wanted) for k in samples
        ]
        numbers = [None if cell is None else cell.questions for cell in cells]
        table.add_row(str(seeds), *("never" if number is None else f"{number:,}" for number in numbers))
        found += [{"seeds": seeds, "samples": k, "questions": n} for k, n in zip(samples, numbers, strict=True)]
    console.print(table)
    return found
