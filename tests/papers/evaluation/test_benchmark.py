"""Questions from Parquet.

Not covered: the data sets themselves (tests/papers/tasks).
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.papers.evaluation.tiny import save_questions
from verl_clipx.papers.evaluation.benchmark import read_benchmark


def test_rows_in_verls_schema_become_questions(tmp_path):
    path = save_questions(tmp_path, 3)
    row = pq.read_table(path).to_pylist()[2]
    benchmark = read_benchmark(path)
    assert (benchmark.name, len(benchmark.questions), len(benchmark.sha256)) == ("test", 3, 64)
    question = benchmark.questions[2]
    assert question.data_source == "countdown"
    assert question.prompt == row["prompt"]
    assert question.ground_truth == row["reward_model"]["ground_truth"]
    assert question.extra_info == row["extra_info"]
    cut = read_benchmark(path, "countdown", limit=2)
    assert (cut.name, cut.questions, cut.sha256) == ("countdown", benchmark.questions[:2], benchmark.sha256)


def test_files_that_are_no_benchmark_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_benchmark(tmp_path / "none.parquet")
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "odd.parquet")
    with pytest.raises(ValueError, match="data_source, reward_model"):
        read_benchmark(tmp_path / "odd.parquet")
    pq.write_table(
        pa.table(
            {
                "data_source": ["s"],
                "prompt": [[{"role": "user", "content": "x"}]],
                "reward_model": [{"style": "rule"}],
            }
        ),
        tmp_path / "bare.parquet",
    )
    with pytest.raises(ValueError, match="has no ground_truth"):
        read_benchmark(tmp_path / "bare.parquet")
    path = save_questions(tmp_path, 1)
    pq.write_table(pq.read_table(path).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="contains no question"):
        read_benchmark(tmp_path / "empty.parquet")
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"--limit {limit}: must be at least 1"):
            read_benchmark(path, limit=limit)
    for name in ("a/b", "..", ""):
        with pytest.raises(ValueError, match="becomes a folder"):
            read_benchmark(path, name)
