"""`clipx report --follow`: a page that is written anew while a run trains.

Covers: a run before its first step, while it logs, at its end, interrupted; a run without this plugin's record. Not
covered: a lock that another host holds.
"""

import time

import pytest
from typer.testing import CliRunner

from tests.runs.example_runs import log_line
from verl_clipx.cli import app
from verl_clipx.common.run_lock import hold, release
from verl_clipx.report import follow
from verl_clipx.trainer.log import write_record

RELOADS = 'http-equiv="refresh"'


@pytest.fixture
def followed(tmp_path, monkeypatch):
    """Follows a run to which something happens in each wait; returns the output and the pages after each."""
    log, out, pages = tmp_path / "run" / "metrics.jsonl", tmp_path / "out" / "report.html", []
    log.parent.mkdir()

    def run(*happens):
        left, real = list(happens), time.sleep

        def sleep(seconds):
            if seconds != follow.SECONDS:
                # Of a library: everyone's sleep is this one.
                return real(seconds)
            pages.append(out.read_text() if out.exists() else None)
            return left.pop(0)()

        monkeypatch.setattr(follow.time, "sleep", sleep)
        result = CliRunner().invoke(app, ["report", str(log.parent), "--out", str(out.parent), "--follow"])
        return result, [*pages, out.read_text()]

    yield log, run
    release()


def add(log, step):
    with log.open("a") as file:
        file.write(log_line(step, **{"actor/entropy": 1.0}))


@pytest.mark.slow
def test_the_page_grows_with_the_run_and_ends_with_it(followed):
    log, run = followed
    write_record(log, {"clipx": {"method": "grpo"}})
    hold(log.with_suffix(".lock"))

    def last():
        add(log, 3)
        release()

    result, pages = run(lambda: add(log, 1), lambda: add(log, 2), last)
    assert result.exit_code == 0, result.output
    assert "no step yet" in result.output and result.output.count("written at") == 2
    assert pages[0] is None
    assert "<td>1</td>" in pages[1] and RELOADS in pages[1]
    assert "1 to 2" in pages[2]
    # Nothing is left to reload.
    assert "1 to 3" in pages[3] and RELOADS not in pages[3]


def test_without_a_record_it_goes_on_until_it_is_interrupted(followed):
    log, run = followed
    add(log, 1)

    def interrupt():
        raise KeyboardInterrupt

    # Nothing new: nothing is written.
    result, pages = run(lambda: None, lambda: add(log, 2), interrupt)
    assert result.exit_code == 0, result.output
    assert result.output.count("written at") == 2 and "1 to 2" in pages[-1]


def test_a_run_that_has_ended_is_written_once(followed):
    log, run = followed
    write_record(log, {"clipx": {"method": "grpo"}})
    add(log, 1)
    result, pages = run()
    assert result.exit_code == 0 and RELOADS not in pages[-1]
