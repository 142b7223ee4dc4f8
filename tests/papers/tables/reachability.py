"""Whether printed numbers can come out of the estimator, questions and samples that their table states, and whether
gains follow from their cells. The definitions' footnotes hold what was found."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from verl_clipx.papers.tables.definition import BENCHMARK, GAIN_OF, MEAN_OF, VALIDATION, Column, Row, Table
from verl_clipx.papers.tables.footnotes import Footnote, _grouped, _listed

OFF_BY_A_DIGIT = 0.1
"""Percentage points that a printed gain may differ from the recomputed one: one in its last digit."""


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


def out_of_reach(table: Table) -> Iterator[Footnote]:
    """Printed numbers that questions and samples cannot give."""

    def counts(number: Printed) -> str:
        text = f"Of {number.questions:,} questions with {number.samples} samples each"
        if number.samples == 1:
            text = f"Of {number.questions:,} questions"
        return text + (f" as the mean of {number.checkpoints} checkpoints" if number.checkpoints > 1 else "")

    doubtful = [number for number in printed_numbers(table) if not number.is_reachable]
    for how, numbers in _grouped((counts(number), number) for number in doubtful):
        cut = list(dict.fromkeys(number.text for number in numbers if number.is_cut_off))
        rest = list(dict.fromkeys(number.text for number in numbers if not number.is_cut_off))
        parts = []
        if cut:
            parts.append(f"{_listed(cut)} {'is cut' if len(cut) == 1 else 'are cut'} off, not rounded")
        if rest:
            parts.append(f"{_listed(rest)} cannot be reached")
        columns = dict.fromkeys(number.column.name for number in numbers)
        yield Footnote(f"{how}, {'; '.join(parts)}.", columns=tuple(columns))


def other_gains(table: Table) -> Iterator[Footnote]:
    """Printed gains that do not follow from the printed cells."""
    for row in table.rows:
        for column in table.columns:
            printed, of = table.expected(row, column), table.measure_of(row, column).get(GAIN_OF)
            if printed is None or not of or not row.baseline:
                continue
            gains = recomputed_gains(table, row, table.column(of))
            # The gain of the cells is the one that `collect` computes; rounded averages cannot give it exactly.
            if abs(gains["from the cells"] - printed) > OFF_BY_A_DIGIT:
                wrong = [f"{gain:.3f} % {how}" for how, gain in gains.items() if abs(gain - printed) > OFF_BY_A_DIGIT]
                text = f"The paper prints a gain of {printed} %. Recomputed: {_listed(wrong)}."
                yield Footnote(text, rows=(row.name,))


def recomputed_gains(table: Table, row: Row, average: Column) -> dict[str, float]:
    """A row's gain over its baseline in percent, from the printed cells and from the printed averages.

    Args:
        average: the column that is a mean of others.
    """
    base = table.row(row.baseline)

    def total(one: Row) -> float:
        return sum(table.expected(one, table.column(name)) for name in table.measure_of(one, average)[MEAN_OF])

    return {
        "from the cells": 100 * (total(row) / total(base) - 1),
        "from the rounded averages": 100 * (table.expected(row, average) / table.expected(base, average) - 1),
    }
