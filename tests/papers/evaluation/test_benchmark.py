"""Questions from Parquet.

Not covered: the data sets themselves (tests/papers/tasks); prompts that are no messages (test_terminal_and_files.py).
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_clipx.papers.evaluation.benchmark import read_benchmark

ROW = {"data_source": "s", "prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "1"}}


def write(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_rows_in_verls_schema_become_questions(inputs):
    row = pq.read_table(inputs[1]).to_pylist()[2]
    benchmark = read_benchmark(inputs[1])
    assert (benchmark.name, len(benchmark.questions), len(benchmark.sha256)) == ("test", 6, 64)
    question = benchmark.questions[2]
    assert (question.data_source, question.prompt) == ("countdown", row["prompt"])
    assert (question.ground_truth, question.extra_info) == (row["reward_model"]["ground_truth"], row["extra_info"])
    cut = read_benchmark(inputs[1], "countdown", limit=2)
    assert (cut.name, cut.questions, cut.sha256) == ("countdown", benchmark.questions[:2], benchmark.sha256)


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ([{"prompt": "x"}], "b", "row 0: it has no data_source, reward_model"),
        ([{**ROW, "reward_model": {"style": "rule"}}], "b", "row 0: reward_model has no ground_truth"),
        ([{**ROW, "extra_info": "x"}], "b", "row 0: extra_info is x"),
        ([], "b", "contains no question"),
        *(([ROW], name, "becomes a folder") for name in ("a/b", "..", "")),
    ],
)
def test_files_that_are_no_benchmark_are_refused(tmp_path, rows, name, message):
    with pytest.raises(ValueError, match=message):
        read_benchmark(write(tmp_path / "odd.parquet", rows), name)


def test_a_file_that_is_not_there(tmp_path):
    assert len(read_benchmark(write(tmp_path / "b.parquet", [ROW])).questions) == 1
    with pytest.raises(FileNotFoundError, match=r"none\.parquet"):
        read_benchmark(tmp_path / "none.parquet")
