"""Whether a printed number can come out of the estimator, questions and samples that a table states."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from verl_clipx.reproduction.tables_definition import BENCHMARK, VALIDATION, Column, Row, Table


@dataclass(frozen=True)
class Printed:
    """A number that a paper prints for one benchmark.

    Args:
        text: as printed.
        share: the same as a fraction of 1.
        digit: one in its last digit, as a fraction of 1.
        metric: avg@k, best@k or pass@k.
        checkpoints: over which the number is a mean.
    """

    row: Row
    column: Column
    text: str
    share: Fraction
    digit: Fraction
    metric: str
    samples: int
    questions: int
    checkpoints: int

    @property
    def is_reachable(self) -> bool:
        """Whether some counts of right answers give the number, rounded."""
        name, draws = self.metric.split("@")
        if name == "best":
            return _best_reaches(int(draws), self.samples, self.questions, self.share, self.digit / 2)
        return abs(Fraction(round(self.share * self._parts), self._parts) - self.share) <= self.digit / 2

    @property
    def is_cut_off(self) -> bool:
        """Whether some counts of right answers give the number, its further digits cut off."""
        if self.metric.startswith("best"):
            return False
        above = Fraction(-(-self.share * self._parts // 1), self._parts)
        return above - self.share < self.digit

    @property
    def _parts(self) -> int:
        """In how many parts the number divides 1."""
        # pass@k of k samples is 0 or 1 for every question.
        return self.questions * self.checkpoints * (1 if self.metric.startswith("pass") else self.samples)


def printed_numbers(table: Table) -> Iterator[Printed]:
    """Every printed number of one benchmark that this project could measure."""
    digit = Fraction(1, 10**table.digits * (100 if table.unit == "percent" else 1))
    for row in table.rows:
        for column in table.columns:
            number, how = table.expected(row, column), table.measure_of(row, column)
            benchmark = how.get(BENCHMARK) or how.get(VALIDATION)
            if row.quoted or number is None or not isinstance(benchmark, str):
                continue
            settings: Mapping[str, Any] = {"samples": how.get("samples"), **table.benchmarks[benchmark]}
            yield Printed(
                row,
                column,
                text=f"{number:.{table.digits}f}",
                share=Fraction(str(number)) / (100 if table.unit == "percent" else 1),
                digit=digit,
                metric=how.get("metric") or f"avg@{settings['samples']}",
                samples=settings["samples"],
                questions=settings["questions"],
                checkpoints=3 if settings.get("protocol") == "mean-of-last-three" and not row.model else 1,
            )


def _best_reaches(draws: int, samples: int, questions: int, share: Fraction, tolerance: Fraction) -> bool:
    """Whether a choice of right samples a question gives the share: all right in as few questions as reach it, then
    the largest losses that still fit. Exact where it finds one."""
    total = share * questions
    solved = -(-total.numerator // total.denominator)
    if solved > questions:
        return False
    excess = solved - total
    for right in range(1, samples):
        loss = Fraction(samples - right, samples) ** draws
        times = min(solved, excess // loss)
        excess, solved = excess - times * loss, solved - times
    return excess <= tolerance * questions
