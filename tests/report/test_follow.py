"""`clipx report --follow`: a page that is written anew while a run trains.

Covers: a run before its first step, while it logs, at its end, interrupted; a run without this plugin's record. Not
covered: a lock that another host holds.
"""

from types import SimpleNamespace

import pytest

from tests.runs.commands import clipx
from tests.runs.example_runs import log_line
from verl_clipx.common.run_lock import hold, release
from verl_clipx.report import follow, page
from verl_clipx.trainer.log import write_record


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """Follows a run to which something happens in each wait; returns the output, and steps and reloads of each page."""
    log, written = tmp_path / "run" / "metrics.jsonl", []
    log.parent.mkdir()

    def write(paths, out, *_, reload_every, **__):
        written.append((len(page.read_run(paths[0]).log), reload_every))
        return []

    def run(*happens):
        waits = iter(happens)
        monkeypatch.setattr(page, "write_report", write)
        # Its own name: other threads sleep too.
        monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=lambda _: next(waits)()))
        return clipx("report", log.parent, "--out", tmp_path / "out", "--follow"), written

    yield log, run
    release()


def add(log, step):
    with log.open("a") as file:
        file.write(log_line(step, **{"actor/entropy": 1.0}))


def test_the_page_grows_with_the_run_and_ends_with_it(followed):
    log, run = followed
    write_record(log, {"clipx": {"method": "grpo"}})
    hold(log.with_suffix(".lock"))

    def last():
        add(log, 3)
        release()

    said, written = run(lambda: None, lambda: add(log, 1), lambda: add(log, 2), last)
    assert said.count("no step yet") == 1 and said.count("written at") == 2
    # Nothing is left to reload.
    assert written == [(1, 10), (2, 10), (3, None)]


def test_without_a_record_it_goes_on_until_it_is_interrupted(followed):
    log, run = followed
    add(log, 1)

    def interrupt():
        raise KeyboardInterrupt

    # Nothing new: nothing is written.
    said, written = run(lambda: None, lambda: add(log, 2), interrupt)
    assert said.count("written at") == 2 and written == [(1, 10), (2, 10)]


def test_a_run_that_has_ended_is_written_once(followed):
    log, run = followed
    write_record(log, {"clipx": {"method": "grpo"}})
    add(log, 1)
    assert run()[1] == [(1, None)]
