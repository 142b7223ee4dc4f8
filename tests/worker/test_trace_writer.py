"""The thread that writes traces: order, too little room, a disk that fails or hangs. Not covered: a process's end."""

import logging
import threading
import time

import pytest

from verl_clipx.common.traces import shards_in
from verl_clipx.loss.token_trace import TokenTrace
from verl_clipx.worker.trace_writer import TraceWriter

from .test_tracer import batch_of, traced_batch, tracer_to


def test_jobs_are_done_in_order():
    writer, done = TraceWriter(), []
    for number in range(5):
        writer.put(lambda number=number: done.append(number))
    assert writer.flush() and done == [0, 1, 2, 3, 4]


def test_what_does_not_fit_is_dropped_and_it_says_so_once(caplog):
    writer, go, done = TraceWriter(capacity=20_000_000), threading.Event(), []
    # The first is larger than all room, and taken since nothing else waits.
    writer.put(lambda: (go.wait(), done.append("first")), 30_000_000)
    for number in range(3):
        writer.put(lambda number=number: done.append(number), 1)
    writer.put(lambda: done.append("holds nothing"))
    assert writer.dropped == 3
    go.set()
    assert writer.flush() and done == ["first", "holds nothing"]
    assert len(caplog.records) == 1 and "30 MB are waiting to be written" in caplog.text
    # Its room is free again, to the last byte and no further.
    go.clear()
    for number, size in enumerate((10_000_000, 10_000_000, 1)):
        writer.put(lambda number=number: (go.wait(), done.append(number)), size)
    go.set()
    assert writer.flush() and done[2:] == [0, 1]
    writer.close()
    assert len(caplog.records) == 2 and "4 updates were not traced" in caplog.text


def test_the_size_of_an_update_is_that_of_its_tokens(tmp_path, monkeypatch):
    tracer, sizes = tracer_to(tmp_path), []
    monkeypatch.setattr(tracer.writer, "put", lambda job, size=0: sizes.append(size))
    traced_batch(tracer, batch_of([[1], [2], [3]]))
    # Old files are removed, and then a float32 written for each of two tokens and each column; the advantage before
    # shaping has a column too.
    assert sizes == [0, 3 * 2 * (len(TokenTrace._fields) + 1) * 4]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyError("x")])
def test_a_failure_ends_the_tracing_and_says_so_once(caplog, error):
    def fail():
        raise error

    writer, done = TraceWriter(), []
    for _ in range(2):
        writer.put(fail)
    assert writer.flush() and writer.failed
    writer.put(lambda: done.append(1))
    assert writer.flush() and not done
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert "the training goes on" in caplog.text and type(error).__name__ in caplog.text


def test_a_disk_that_hangs_holds_nobody_for_long():
    writer, go = TraceWriter(), threading.Event()
    writer.put(go.wait)
    start = time.monotonic()
    assert not writer.flush(0.1)
    assert not writer.flush(0.1)
    assert time.monotonic() - start < 60
    go.set()
    assert writer.flush()


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    tracer = tracer_to(tmp_path)
    traced_batch(tracer, batch_of([[1]]))
    assert tracer.writer.flush()
    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    for _ in range(3):
        traced_batch(tracer, batch_of([[1]]))
    assert tracer.writer.flush()
    # What was written stays, no part of a file besides.
    assert len(shards_in(tmp_path)) == 1 and len(list(tmp_path.iterdir())) == 1
    assert caplog.text.count("No space left on device") == 1
