r"""How many answers the mathematics rewards judge in a second, by kind of answer.

Each problem has one right answer and eight responses, half of them right, as in a rollout group. Every problem has
numbers of its own, so that no verdict is there before. Reported is the processor time of the comparison processes
beside the wall time, since other work on the machine slows the latter.

    python benchmarks/math_reward.py [--problems 60]
"""

import time
from collections.abc import Callable
from typing import Annotated

import psutil
import typer

from verl_clipx.papers.tasks.math import equality, processes
from verl_clipx.papers.tasks.math.reward import compute_score

# Right answer, spellings of it, wrong answers, for a problem's number.
Kind = Callable[[int], tuple[str, list[str], list[str]]]


def integer(i: int) -> tuple[str, list[str], list[str]]:
    return str(i), [f"{i}", f"{i}.0", f"0{i}", f"+{i}"], [str(i + k) for k in range(1, 5)]


def fraction(i: int) -> tuple[str, list[str], list[str]]:
    right = [rf"\frac{{{i}}}{{7}}", f"{i}/7", rf"\dfrac{{{2 * i}}}{{14}}", rf"\frac {{{i}}} {{7}}"]
    return right[0], right, [rf"\frac{{{i}}}{{{7 + k}}}" for k in range(1, 5)]


def unit(i: int) -> tuple[str, list[str], list[str]]:
    right = [rf"{i}\text{{ cm}}", f"x={i}", rf"{i}^\circ", rf"{i} \text{{ units}}"]
    return str(i), right, [rf"{i + k}\text{{ cm}}" for k in range(1, 5)]


def root(i: int) -> tuple[str, list[str], list[str]]:
    right = [
        rf"\frac{{{i}\sqrt{{3}}}}{{2}}",
        rf"{i}\sqrt{{3}}/2",
        rf"\frac{{{3 * i}}}{{2\sqrt{{3}}}}",
        rf"\sqrt{{3}}\cdot\frac{{{i}}}{{2}}",
    ]
    return right[0], right, [rf"\frac{{{i + k}\sqrt{{3}}}}{{2}}" for k in range(1, 5)]


def polynomial(i: int) -> tuple[str, list[str], list[str]]:
    right = [f"x^2-{i}x+1", f"1-{i}x+x^2", f"x(x-{i})+1", rf"x^2 - {i} x + \frac{{2}}{{2}}"]
    return right[0], right, [f"x^2-{i + k}x+1" for k in range(1, 5)]


def pair(i: int) -> tuple[str, list[str], list[str]]:
    right = [
        rf"({i},\frac{{\pi}}{{2}})",
        rf"\left({i}, \frac{{\pi}}{{2}}\right)",
        rf"({i},\pi/2)",
        rf"({i}.0,\frac{{\pi}}{{2}})",
    ]
    return right[0], right, [rf"({i + k},\frac{{\pi}}{{2}})" for k in range(1, 5)]


def interval(i: int) -> tuple[str, list[str], list[str]]:
    right = [rf"(-\infty,{i}]", rf"\left(-\infty, {i}\right]", rf"(-\infty,{2 * i}/2]", rf"(-\infty,{i}.0]"]
    return right[0], right, [rf"(-\infty,{i + k}]" for k in range(1, 5)]


def numbers(i: int) -> tuple[str, list[str], list[str]]:
    right = [f"{i},{i + 3}", f"{i + 3}, {i}", rf"\{{{i},{i + 3}\}}", rf"{i} \text{{ and }} {i + 3}"]
    return right[0], right, [f"{i},{i + 3 + k}" for k in range(1, 5)]


KINDS: tuple[Kind, ...] = (integer, fraction, unit, root, polynomial, pair, interval, numbers)

# Of a hundred answers to MATH500's, DeepScaleR's and OlympiadBench's problems some 75 are plain numbers.
ORDINARY: tuple[Kind, ...] = (integer,) * 10 + (fraction,) * 5 + (unit, root, polynomial, pair, interval)


def measure(kinds: tuple[Kind, ...], problems: int) -> tuple[int, int, float, float, int]:
    """Score eight responses a problem; return responses, right ones, wall and worker seconds, and the worker's MB."""
    equality._ask.cache_clear()
    processes.compare((("1", "1"),), False)
    workers = [child for child in psutil.Process().children() if "spawn_main" in str(child.cmdline())]
    before = sum(sum(process.cpu_times()[:2]) for process in workers)
    count = right = 0
    started = time.perf_counter()
    for index in range(problems):
        gold, equal, unequal = kinds[index % len(kinds)](11 + index)
        for answer in equal + unequal:
            right += compute_score("math", rf"So it is \boxed{{{answer}}}.", gold)["score"] == 1.0
            count += 1
    wall = time.perf_counter() - started
    after = sum(sum(process.cpu_times()[:2]) for process in workers)
    return count, right, wall, after - before, max(process.memory_info().rss for process in workers) >> 20


def main(problems: Annotated[int, typer.Option(help="Problems of each kind; each has eight responses.")] = 60) -> None:
    """Print answers a second by kind; "pool" counts the processor time of the comparison processes alone."""
    typer.echo(f"{'kind':<12}{'answers':>8}{'right':>7}{'a wall second':>15}{'a pool CPU second':>19}{'MB':>5}")
    rows = [(kind.__name__, (kind,), problems) for kind in KINDS] + [("ordinary mix", ORDINARY, 10 * problems)]
    for name, kinds, number in rows:
        count, right, wall, cpu, megabytes = measure(kinds, number)
        of_pool = f"{count / cpu:.0f}" if cpu > 0.05 else "none used"
        typer.echo(f"{name:<12}{count:>8}{right:>7}{count / wall:>15.0f}{of_pool:>19}{megabytes:>5}")


if __name__ == "__main__":
    typer.run(main)
