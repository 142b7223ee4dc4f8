"""`clipx blame` through the real verl: a run that fails, its checkpoint, and reruns of it, unchanged and with another
learning rate. Covers that verl goes on from the checkpoint, from its copy with another rate too. To bound the time, the
reruns of all seeds but the first are copies of the first's logs, so that an arm fails in all seeds or in none; whether
the unchanged one does is chance. tests/diagnose/test_blame.py has the rest of the command.
"""

import shlex
import sys

import pytest

from tests.runs.commands import clipx
from verl_clipx.runs.run_log import read_run_log

from .runs import train

pytestmark = [pytest.mark.end_to_end, pytest.mark.matrix]

LR, BROKEN = "actor_rollout_ref.actor.optim.lr", 0.5
# Trains the first seed of an arm, and copies its log for the others.
LAUNCHER = """
import os, pathlib, shutil, sys
log = pathlib.Path(os.environ["VERL_FILE_LOGGER_PATH"])
first = log.parents[1] / (log.parent.name.split("-seed")[0] + "-seed8") / log.name
if first == log:
    os.execv(sys.executable, [sys.executable, "-m", "verl.trainer.main_ppo", *sys.argv[1:]])
shutil.copy(first, log)
"""


def test_reruns_go_on_from_verls_checkpoint_with_their_learning_rate(task, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    # The rate of the first step is 0, that of the second breaks the policy.
    broken = [f"{LR}={BROKEN}", f"{LR[:-2]}lr_warmup_steps=1", "data.seed=7", "+clipx=grpo", "trainer.save_freq=1"]
    run = train(task, tmp_path / "run", *broken, steps=5)
    assert run.values("actor/lr") == pytest.approx([BROKEN] * 5)
    launcher = f"{shlex.quote(sys.executable)} {tmp_path / 'launcher.py'}"
    words = ["--from", 1, "--arm", f"lr: {LR}=5e-4", "--with", "+hardware=cpu", "--until", 5, "--out", "plan"]
    said = clipx("blame", tmp_path / "run", *words, "--launcher", launcher)
    named = "unchanged failed 4 of 4 lr failed 0 of 4 prevents it (p 0.014)" in said
    assert named or "lr failed 0 of 4 The failure did not recur in most of the unchanged reruns" in said
    for arm, rate in (("unchanged", BROKEN), ("lr", 5e-4)):
        log = read_run_log(tmp_path / f"plan/{arm}-seed8/metrics.jsonl")
        assert [*log.index] == [2, 3, 4, 5] and log["actor/lr"].tolist() == pytest.approx([rate] * 4)
        assert "Resuming from" in (tmp_path / f"plan/{arm}-seed8/console.log").read_text()
