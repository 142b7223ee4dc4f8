"""The released files' schema, on invented puzzles: rows, sizes, the report of leaks, what is refused.

Not covered: the release itself, of which docs/tasks/knights_and_knaves.md says what was read.
"""

import pyarrow.parquet as pq
import pytest

from tests.analysis.runs.commands import clipx
from tests.papers.tasks.knights_and_knaves.released import OTHER, REORDERED, TRAIN, make_record, write_release
from verl_clipx.papers.tasks.knights_and_knaves.reward import compute_score


def build(folder, out, *options, code=0):
    """Run `clipx papers data build` on a copy of the release, and return its output."""
    return clipx("papers", "data", "build", "knights_and_knaves", "--from", folder, "--out", out, *options, code=code)


def test_released_rows_are_built_and_leaks_reported(tmp_path):
    leak = make_record(REORDERED, (False, True, True), ["Eve", "Fay", "Gus"])
    fresh = make_record(OTHER, (False, True, True), ["Hal", "Ida", "Jon"])
    folder = write_release(tmp_path / "release", TRAIN, [leak, fresh])
    output = build(folder, tmp_path / "out")
    assert "1 of 2 test puzzles equal training puzzles, apart from names, order and wording" in output
    rows = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[0]["prompt"][1]["content"] == "You meet Eve, Fay, Gus.\n"
    assert rows[0]["data_source"] == "knights_and_knaves"
    assert rows[0]["extra_info"]["people"] == 3
    truth = rows[0]["reward_model"]["ground_truth"]
    assert truth == "(1) Eve is a knave\n(2) Fay is a knight\n(3) Gus is a knight"
    assert compute_score("knights_and_knaves", f"</think><answer>{truth}</answer>", truth)["score"] == 3.0


def test_sizes_can_be_chosen_and_nothing_leaks_silently(tmp_path):
    folder = write_release(tmp_path / "release", TRAIN, [make_record(OTHER, (False, True, True))])
    output = build(folder, tmp_path / "out", "--split", "test", "--option", "people=[3]")
    assert "equal training puzzles" not in output
    assert "1 rows" in output
    assert "no rows" in build(folder, tmp_path / "four", "--option", "people=[4]", code=1)
    assert "use --limit" in build(folder, tmp_path / "seed", "--option", "seed=1", code=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solution": [False, False, True]}, "is not the only solution of"),
        ({"statements": "(('xor', 1),)"}, "KeyError: 'xor'"),
        ({"statements": "__import__('os')"}, "malformed node"),
        ({"statements": "(" * 5000}, "at most 4096 are read"),
        ({"statements": "(('not', 1), 2, 3)"}, "test.parquet, row 0"),
        ({"quiz": None, "statements": None}, "TypeError"),
    ],
)
def test_other_records_are_refused(tmp_path, change, message):
    folder = write_release(tmp_path / "release", TRAIN, [TRAIN[0] | change])
    assert message in build(folder, tmp_path / "out", "--split", "test", code=1)
