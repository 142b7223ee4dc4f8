"""What long work prints in a redirected log. Not covered: the bar of a terminal, which is rich's."""

from verl_clipx.common import terminal
from verl_clipx.common.terminal import track


def test_a_redirected_log_gets_a_line_every_ten_seconds(capsys, monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(clock)))
    assert list(track(range(20), "Warm start")) == list(range(20))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Warm start: 4 of 20, 12 s"
    assert len(lines) == 4 and lines == sorted(lines, key=lambda line: int(line.split()[2]))
    # Short work prints nothing.
    monkeypatch.undo()
    assert list(track(range(20), "Warm start")) == list(range(20))
    assert capsys.readouterr().err == ""
