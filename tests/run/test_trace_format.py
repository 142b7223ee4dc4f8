"""The files of a trace: what is written is read, and wrong or broken ones are named. Not covered: who writes them."""

import pyarrow
import pyarrow.parquet
import pytest

from verl_clipx.run.decided_from import DecidedFrom
from verl_clipx.run.trace_format import (
    SCHEMA,
    Shard,
    UpdateFacts,
    read_facts,
    read_shards,
    shards_in,
    write_shard,
)

NULLABLE = [field.name for field in SCHEMA if field.nullable]
SHARD = Shard(step=3, update=1, rank=0)
FACTS = UpdateFacts(0.05, 2, DecidedFrom.LAGGED, {1: [0.1 + 0.2, float("inf")], 3: []})


def make_columns(tokens=2):
    """Values for every column of a trace that must have some."""
    values = {pyarrow.string(): "x", pyarrow.int32(): 1, pyarrow.float32(): 0.5}
    names = [field for field in SCHEMA if field.name not in ("step", "update", "rank", *NULLABLE)]
    return {field.name: [values[field.type]] * tokens for field in names}


def test_what_is_written_is_read(tmp_path):
    write_shard(
        tmp_path, SHARD, {**make_columns(), "high": [1.2, float("inf")], "text": ["</script>", "\ud7ff"]}, FACTS
    )
    table = read_shards(tmp_path, shards_in(tmp_path))
    assert table.schema.equals(SCHEMA) and all(field.metadata[b"meaning"] for field in SCHEMA)
    rows = table.to_pylist()
    assert [row["text"] for row in rows] == ["</script>", "\ud7ff"]
    assert rows[1]["high"] == float("inf") and rows[0]["step"] == 3 and rows[0]["update"] == 1
    assert all(rows[0][name] is None for name in NULLABLE)
    assert [path.suffix for path in tmp_path.iterdir()] == [".parquet"]
    # What it says of its update comes back to the last bit.
    assert read_facts(tmp_path, SHARD) == FACTS


def test_files_come_in_the_order_of_training_and_no_trace_is_an_empty_one(tmp_path):
    assert shards_in(tmp_path / "traces") == [] and len(read_shards(tmp_path, [])) == 0
    shards = [Shard(10, 0, 0), Shard(2, 1, 1), Shard(2, 1, 0), Shard(2, 0, 0)]
    for shard in shards:
        write_shard(tmp_path, shard, make_columns(), FACTS)
    assert shards_in(tmp_path) == sorted(shards)
    assert len(read_shards(tmp_path, shards_in(tmp_path))) == 8


def test_a_file_of_the_version_before_is_read_beside_one_of_today_without_what_it_lacks(tmp_path):
    later = Shard(4, 0, 0)
    path = write_shard(tmp_path, SHARD, make_columns(), FACTS)
    write_shard(tmp_path, later, {**make_columns(), "context": [[7, 8], None], "turn": [0, 0]}, FACTS)
    old = pyarrow.parquet.read_table(path).drop_columns(["context", "turn"])
    metadata = {**old.schema.metadata, b"clipx_trace_version": b"2"}
    pyarrow.parquet.write_table(old.replace_schema_metadata(metadata), path)
    table = read_shards(tmp_path, [SHARD, later])
    assert table.schema.equals(SCHEMA) and table["context"].to_pylist() == [None, None, [7, 8], None]
    assert table["turn"].to_pylist() == [None, None, 0, 0] and read_facts(tmp_path, SHARD) == FACTS


def test_wrong_columns_are_named(tmp_path):
    without_ratio = {name: values for name, values in make_columns().items() if name != "ratio"} | {"F": [1, 2]}
    with pytest.raises(ValueError, match=r"missing: \['ratio'\]"):
        write_shard(tmp_path, SHARD, without_ratio, FACTS)
    with pytest.raises(ValueError, match=r"unknown: \['F'\]"):
        write_shard(tmp_path, SHARD, make_columns() | {"F": [1, 2]}, FACTS)
    with pytest.raises(ValueError, match="'ratio' is declared non-nullable"):
        write_shard(tmp_path, SHARD, make_columns() | {"ratio": [1.0, None]}, FACTS)
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_version_or_form_or_that_is_cut_short_is_named(tmp_path):
    path = write_shard(tmp_path, SHARD, make_columns(), FACTS)
    table = pyarrow.parquet.read_table(path)

    def write_with_metadata(key, text):
        pyarrow.parquet.write_table(table.replace_schema_metadata(table.schema.metadata | {key: text}), path)

    write_with_metadata(b"clipx_trace_version", b"1")
    with pytest.raises(ValueError, match="version 1 of the trace's schema; this verl-clipx reads 2 and 3"):
        read_shards(tmp_path, [SHARD])
    # A file of today's version without its columns is no file of the version before.
    write_with_metadata(b"clipx_trace_version", b"3")
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(["turn"]), path)
    with pytest.raises(ValueError, match="no column turn"):
        read_shards(tmp_path, [SHARD])
    write_shard(tmp_path, SHARD, make_columns(), FACTS)
    for text in (b"", b"{}", b"[]", b"no JSON", b'{"fraction": 1, "ranks": 1, "decided_from": "elsewhere"}'):
        write_with_metadata(b"clipx_trace_update", text)
        with pytest.raises(ValueError, match=rf"{path.name}: clipx_trace_update cannot be read: .*Remove it"):
            read_facts(tmp_path, SHARD)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{path.name}: not a Parquet file, or cut off .* Remove it to go on"):
        read_shards(tmp_path, [SHARD])
