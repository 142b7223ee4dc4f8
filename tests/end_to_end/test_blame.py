"""`clipx blame` through the real verl on the committed run that fails, as docs/results/blame.md has the command. Covers
that verl goes on from the checkpoint, and from its copy with another learning rate. To bound the time, the reruns of
all seeds but the first are copies of the first's logs, so that an arm fails in all seeds or in none.
tests/diagnose/test_blame.py has the rest of the command.
"""

import shlex
import sys

import pytest

from tests.diagnose.test_blame import ROOT, words_of_page
from tests.runs.commands import clipx
from verl_clipx.runs.run_log import read_run_log

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

# Trains the first seed of an arm, and copies its log for the others.
LAUNCHER = """
import os, pathlib, shutil, sys
log = pathlib.Path(os.environ["VERL_FILE_LOGGER_PATH"])
first = log.parents[1] / (log.parent.name.split("-seed")[0] + "-seed51") / log.name
if first == log:
    os.execv(sys.executable, [sys.executable, "-m", "verl.trainer.main_ppo", *sys.argv[1:]])
shutil.copy(first, log)
"""


def test_reruns_go_on_from_verls_checkpoint_with_their_learning_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    clipx(*words_of_page("data build"))
    launcher = f"{shlex.quote(sys.executable)} {tmp_path / 'launcher.py'}"
    said = clipx(*words_of_page("blame"), "--out", "plan", "--launcher", launcher)
    assert "unchanged failed 4 of 4 rate failed 0 of 4 prevents it (p 0.014)" in said
    for arm, rate in (("unchanged", 1e-3), ("rate", 3.3e-5)):
        log = read_run_log(tmp_path / f"plan/{arm}-seed51/metrics.jsonl")
        assert [*log.index] == [*range(7, 14)] and log["actor/lr"].tolist() == pytest.approx([rate] * 7)
        assert "Resuming from" in (tmp_path / f"plan/{arm}-seed51/console.log").read_text()
