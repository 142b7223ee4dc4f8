"""Questions from Parquet.

Not covered: the data sets themselves (tests/papers/tasks); prompts that are no messages (tests/test_wrong_files.py);
a file that is not there, two benchmarks of one name (test_mistakes.py).
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_clipx.papers.evaluation.benchmark import read_benchmark, read_benchmarks, read_clusters

ROW = {"data_source": "s", "prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": "1"}}


def test_rows_in_verls_schema_become_questions(inputs):
    _, questions = inputs
    unnamed, named = read_benchmarks([str(questions), f"countdown={questions}"])
    assert unnamed.name == "test"
    assert named.name == "countdown"
    assert len(named.sha256) == 64
    assert named.questions == pq.read_table(questions).to_pylist()
    assert len(named.questions) == 6


def test_a_row_without_extra_info_gets_an_empty_one(tmp_path):
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "bare.parquet")
    assert read_benchmark(tmp_path / "bare.parquet", "bare").questions == [ROW | {"extra_info": {}}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "x"}], "row 0: it has no data_source, reward_model"),
        ([{**ROW, "reward_model": {"style": "rule"}}], "row 0: reward_model has no ground_truth"),
        ([{**ROW, "extra_info": "x"}], "row 0: extra_info is x"),
        ([], "contains no question"),
    ],
)
def test_files_that_are_no_benchmark_are_refused(tmp_path, rows, message):
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "odd.parquet")
    with pytest.raises(ValueError, match=message):
        read_benchmark(tmp_path / "odd.parquet", "b")


@pytest.mark.parametrize("name", ["a/b", ".."])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path, name):
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "test.parquet")
    with pytest.raises(ValueError, match="a folder gets this name"):
        read_benchmark(tmp_path / "test.parquet", name)


def test_a_path_with_an_equals_sign_is_a_path_with_and_without_a_name(tmp_path):
    path = tmp_path / "lr=1e-6" / "test.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist([ROW]), path)
    benchmarks = read_benchmarks([str(path), f"sums={path}"])
    assert [(benchmark.name, benchmark.path) for benchmark in benchmarks] == [("test", path), ("sums", path)]


def test_a_file_of_another_format_has_changed(tmp_path):
    path = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist([ROW]), path)
    sha256 = read_benchmark(path, "test").sha256
    pq.write_table(pa.table({"other": [1]}), path)
    with pytest.raises(ValueError, match="has changed since benchmark test was evaluated"):
        read_benchmark(path, "test", sha256)


def test_a_question_without_any_source_says_so(tmp_path):
    path = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist([ROW]), path)
    with pytest.raises(ValueError, match="row 0; there are no keys"):
        read_clusters(read_benchmark(path, "test"), "family")


def test_a_key_that_only_other_questions_have_is_not_listed_for_a_question(tmp_path):
    """A column of Parquet has the keys of all rows in each row."""
    path = tmp_path / "test.parquet"
    rows = [{**ROW, "extra_info": {"family": "f"}}, {**ROW, "extra_info": {"level": "2"}}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r"--cluster family: not in extra_info of .*, row 1; there are level$"):
        read_clusters(read_benchmark(path, "test"), "family")
