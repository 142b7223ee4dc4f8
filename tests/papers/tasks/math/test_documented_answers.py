r"""Every row of the tables in docs/tasks/math_answers.md, through the three rewards as verl calls them.

Not covered: boxes that are cut off, and several boxes in a response (test_reward.py).
"""

import re
from pathlib import Path

import pytest

from verl_clipx.papers.tasks.math.reward import compute_score, compute_score_for_evaluation, compute_score_strict

PAGE = Path(__file__).parents[4] / "docs" / "tasks" / "math_answers.md"

COLUMNS = ["right answer", "box", "training", "evaluation", "why"]

# The score and whether there is no verdict.
OUTCOMES = {"1": (1.0, 0.0), "0": (0.0, 0.0), "none": (0.0, 1.0)}


def documented_rows():
    rows = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            assert not line.startswith("|") or line.startswith("|---") or line == f"| {' | '.join(COLUMNS)} |", line
            continue
        gold, box, training, evaluation, why = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        gold, box = (cell.strip().strip("`").replace(r"\|", "|") for cell in (gold, box))
        assert why.strip()
        rows.append((gold, box, training.strip(), evaluation.strip()))
    return rows


ROWS = documented_rows()


def test_the_page_has_rows_of_every_outcome():
    assert len(ROWS) >= 70
    assert {row[2] for row in ROWS} == {row[3] for row in ROWS} == set(OUTCOMES)


@pytest.mark.parametrize(("gold", "box", "training", "evaluation"), ROWS)
def test_a_row_is_so(gold, box, training, evaluation):
    response = rf"So it is \boxed{{{box}}}."

    def outcome(function):
        result = function("math500", response, gold, extra_info={"index": 0})
        assert result["format"] == 1.0
        return result["score"], result["undecided"]

    score, undecided = OUTCOMES[training]
    assert outcome(compute_score) == (score, undecided)
    assert outcome(compute_score_strict) == (1.0 if score else -1.0, undecided)
    assert outcome(compute_score_for_evaluation) == OUTCOMES[evaluation]
