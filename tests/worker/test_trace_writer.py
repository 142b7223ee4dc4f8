"""The thread that writes traces: order, a full queue, a disk that fails or hangs. Not covered: the end of a process."""

import logging
import threading
import time

import pytest

from verl_clipx.common.traces import shards_in
from verl_clipx.worker.trace_writer import TraceWriter

from .test_tracer import batch_of, traced_batch, tracer_to


def test_jobs_are_done_in_order():
    writer, done = TraceWriter(), []
    for number in range(5):
        writer.put(lambda number=number: done.append(number))
    assert writer.flush() and done == [0, 1, 2, 3, 4]


def test_a_full_queue_drops_and_says_so_once(caplog):
    writer, go, done = TraceWriter(capacity=2), threading.Event(), []
    started = threading.Event()
    writer.put(lambda: (started.set(), go.wait()))
    started.wait()
    for number in range(5):
        writer.put(lambda number=number: done.append(number))
    assert writer.dropped == 3
    go.set()
    assert writer.flush() and done == [0, 1]
    assert len(caplog.records) == 1 and "2 updates wait to be written" in caplog.text
    writer.close()
    assert len(caplog.records) == 2 and "3 updates were not traced" in caplog.text


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
    writer, go = TraceWriter(capacity=1), threading.Event()
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
