"""Shards: what is pending, what is read back, what a killed writer leaves.

Not covered: the kill itself (test_run.py).
"""

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_clipx.common.files import remove_partials, replacing
from verl_clipx.papers.evaluation.samples import (
    SCHEMA,
    Sample,
    finished_samples,
    pending_shards,
    read_samples,
    write_shard,
)


def sample(question: int, number: int) -> Sample:
    return Sample(question, number, 2**62 + number, f"é {question}\n{number}", [question, number], 2, number == 0)


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))),
)
def test_shards_hold_exactly_what_is_missing(questions, samples, size, finished):
    shards = pending_shards(finished, questions, samples, size)
    pairs = [pair for shard in shards for pair in shard]
    wanted = {(q, s) for q in range(questions) for s in range(samples)}
    assert len(pairs) == len(set(pairs)) and set(pairs) == wanted - finished
    assert all(1 <= len(shard) <= size for shard in shards)


def test_shards_of_no_completions_are_refused():
    with pytest.raises(ValueError, match="--shard-size 0"):
        pending_shards(set(), 1, 1, 0)


def test_what_is_written_is_read_back_in_order(tmp_path):
    write_shard(tmp_path, [sample(1, 0), sample(1, 1)])
    write_shard(tmp_path, [sample(0, 0), sample(0, 1)])
    assert finished_samples(tmp_path) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    table = read_samples(tmp_path, questions=2, samples=2)
    assert list(table["text"]) == ["é 0\n0", "é 0\n1", "é 1\n0", "é 1\n1"]
    assert [list(tokens) for tokens in table["tokens"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert list(table["seed"]) == [2**62, 2**62 + 1] * 2
    assert list(table["truncated"]) == [True, False] * 2
    assert pq.read_schema(next(tmp_path.glob("*.parquet"))).equals(SCHEMA)
    # Fewer samples a question may be asked for than there are.
    assert list(read_samples(tmp_path, questions=2, samples=1)["sample"]) == [0, 0]


def test_missing_and_doubled_completions_are_refused(tmp_path):
    write_shard(tmp_path, [sample(0, 0)])
    with pytest.raises(ValueError, match="1 of 2 completions"):
        read_samples(tmp_path, questions=2, samples=1)
    write_shard(tmp_path, [sample(1, 0), sample(0, 0)])
    with pytest.raises(ValueError, match="a completion twice"):
        read_samples(tmp_path, questions=2, samples=1)
    with pytest.raises(ValueError, match="0 of 2 completions"):
        read_samples(tmp_path / "elsewhere", questions=2, samples=1)


def test_a_damaged_shard_is_named(tmp_path):
    path = write_shard(tmp_path, [sample(0, 0)])
    path.write_bytes(path.read_bytes()[:-20])
    for read in (finished_samples, lambda folder: read_samples(folder, questions=1, samples=1)):
        with pytest.raises(ValueError, match=r"000000-00000.parquet: cannot be read .* remove it"):
            read(tmp_path)


def test_an_interrupted_write_leaves_nothing_that_counts(tmp_path):
    write_shard(tmp_path, [sample(0, 0)])
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "000001-00000.parquet") as partial:
        partial.write_bytes(b"PAR1 half a file")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["000000-00000.parquet"]
    # A killed process has no time to remove what it was writing.
    (tmp_path / ".000001-00000.parquet.4711.partial").write_bytes(b"PAR1 half a file")
    assert finished_samples(tmp_path) == {(0, 0)}
    remove_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["000000-00000.parquet"]
