"""`clipx report --follow`: a page that is written anew while a run trains. Covers: a run before its first step, while
it logs, at its end, interrupted; a run without this plugin's record. Not covered: a lock that another host holds.
"""

from types import SimpleNamespace

import pytest

from tests.runs.commands import clipx
from tests.runs.example_runs import log_line
from verl_clipx.common.run_lock import hold, release
from verl_clipx.report import follow, page
from verl_clipx.trainer.log import write_record


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("record", "happens", "pages"),
    [
        # In each wait a step is logged, nothing, or what ends it. The last page reloads no more.
        (True, ([], [1], [2], [3, release]), [(1, 10), (2, 10), (3, None)]),
        # Where nothing is new nothing is written.
        (False, ([], [2], [interrupt]), [(1, 10), (2, 10)]),
    ],
    ids=["until it ends", "without a record until it is interrupted"],
)
def test_the_page_grows_with_the_run(tmp_path, monkeypatch, record, happens, pages):
    log, written, coming = tmp_path / "run" / "metrics.jsonl", [], iter(happens)
    log.parent.mkdir()

    def write(paths, out, *_, reload_every, **__):
        written.append((len(page.read_run(paths[0]).log), reload_every))
        return []

    def add(step):
        with log.open("a") as file:
            file.write(log_line(step, **{"actor/entropy": 1.0}))

    def sleep(_):
        for one in next(coming):
            one() if callable(one) else add(one)

    monkeypatch.setattr(page, "write_report", write)
    # Its own name: other threads sleep too.
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=sleep))
    if record:
        write_record(log, {"clipx": {"method": "grpo"}})
        hold(log.with_suffix(".lock"))
    else:
        add(1)
    try:
        said = clipx("report", log.parent, "--out", tmp_path / "out", "--follow")
    finally:
        release()
    assert written == pages and said.count("no step yet") == record
    assert said.count("written at") == sum(reloads is not None for _, reloads in pages)
    if record:
        # A run that has ended is written once.
        clipx("report", log.parent, "--out", tmp_path / "out", "--follow")
        assert written[len(pages) :] == [(3, None)]
