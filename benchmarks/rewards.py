"""Prints how many completions a second each rule reward scores on one core.

Run: python benchmarks/rewards.py

Completions of two lengths: an ordinary one, and one whose reasoning fills a response of 4,096 tokens (about 16,000
characters). A third of them are right, a third wrong, a third in the wrong form. Time is that of the process, so a busy
machine changes it little; the best of three rounds counts.
"""

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from verl_clipx.papers.tasks.countdown import reward as countdown
from verl_clipx.papers.tasks.hitab import reward as hitab
from verl_clipx.papers.tasks.knights_and_knaves import reward as knights_and_knaves

TARGET = 2000
COMPLETIONS = 3000
LENGTHS = {"200 characters": 200, "16,000 characters": 16_000}


class Task(NamedTuple):
    """A reward with one ground truth and what completions of it end in."""

    score: Callable[..., dict[str, float]]
    ground_truth: Any
    endings: tuple[str, str, str]
    """A right one, a wrong one, one in the wrong form."""


COUNTDOWN_TRUTH = {"numbers": [25, 3, 7, 4], "target": 103}
KINDS = "(1) Zoey is a knight\n(2) Liam is a knave\n(3) Ava is a knight\n(4) Noah is a knave\n(5) Mia is a knave"
TASKS = {
    "countdown": Task(
        countdown.compute_score,
        COUNTDOWN_TRUTH,
        ("</think><answer>25*3+7*4</answer>", "</think><answer>25+3*7-4</answer>", "</think>25+3*7-4"),
    ),
    "countdown, boxed": Task(
        lambda _, *rest: countdown.compute_score("countdown_boxed", *rest),
        COUNTDOWN_TRUTH,
        (r"</think>\boxed{25*3+7*4}", r"</think>\boxed{25+3*7-4}", r"</think>25+3*7-4"),
    ),
    "knights_and_knaves": Task(
        knights_and_knaves.compute_score,
        KINDS,
        (
            f"</think><answer>{KINDS}</answer>",
            f"</think><answer>{KINDS.replace('Mia is a knave', 'Mia is a knight')}</answer>",
            f"<answer>{KINDS}</answer>",
        ),
    ),
    "hitab": Task(
        hitab.compute_score,
        {"answers": ["12.4", "1,305"], "ratio": False, "rounding": True},
        (r"</think>\boxed{12.4, 1305}", r"</think>\boxed{12.5, 1305}", "</think>12.4, 1305"),
    ),
}


def completions(task: Task, length: int) -> list[str]:
    """Completions of about `length` characters, with reasoning of words, numbers and parentheses."""
    rng = random.Random(0)
    words = ["so", "Zoey", "is", "a", "knight", "(3+4)*7", "=", "49", "<", "{", "}", "then,", "12.4%", "\n", "\\frac"]
    return [" ".join(rng.choices(words, k=length // 5)) + rng.choice(task.endings) for _ in range(COMPLETIONS)]


def completions_a_second(task: Task, texts: list[str]) -> float:
    """Completions a second of processor time, the best of three rounds."""
    seconds = []
    for _ in range(3):
        started = time.process_time()
        for text in texts:
            task.score("benchmark", text, task.ground_truth, {})
        seconds.append(time.process_time() - started)
    return len(texts) / min(seconds)


def main() -> None:
    table = Table("reward", *LENGTHS, "share right", f"at least {TARGET:,}", title="completions a second on one core")
    for name, task in TASKS.items():
        rates, right = [], 0.0
        for length in LENGTHS.values():
            texts = completions(task, length)
            rates.append(completions_a_second(task, texts))
            right = sum(task.score("benchmark", text, task.ground_truth, {})["acc"] for text in texts) / len(texts)
        verdict = "yes" if min(rates) >= TARGET else "no"
        table.add_row(name, *(f"{rate:,.0f}" for rate in rates), f"{right:.2f}", verdict)
    Console().print(table)


if __name__ == "__main__":
    main()
