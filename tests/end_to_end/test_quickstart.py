"""scripts/quickstart.sh, short: GRPO and ACPO by the real verl, one after the other, and their page.

Covers: both runs with their traces, which overrides each gets, samples that the seed fixes, the page; that a replay of
each run's own setting has the bounds that it trained with and the clip fractions that it logged; with `-m matrix` also
`MODEL=smollm2`, its reward's parts in the log, and the tokenizer's words on the page.
Not covered: the installation (the environment of the tests stands in its place), the warm start (tests/papers/tasks),
several
seeds (tests/claims/test_quickstart.py), learning and times (docs/dev/launching.md has measured runs).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.common.traces import read_shards
from verl_clipx.runs.folder import read_run

from .runs import REPOSITORY, SECONDS

pytestmark = pytest.mark.end_to_end

SMALL = {"TOTAL_STEPS": "2", "TRAIN_BATCH_SIZE": "16", "MINI_BATCH_SIZE": "4", "ROLLOUT_N": "4", "TRACE_EVERY": "1"}


def checkout(folder: Path) -> Path:
    """The repository with links for its folders, whose environment is always up to date."""
    (folder / "scripts").mkdir(parents=True)
    for path in REPOSITORY.iterdir():
        if path.name not in ("scripts", "runs", ".git"):
            (folder / path.name).symlink_to(path)
    (folder / "scripts" / "quickstart.sh").symlink_to(REPOSITORY / "scripts" / "quickstart.sh")
    (folder / "scripts" / "environment.sh").write_text("exit 0\n")
    return folder / "scripts" / "quickstart.sh"


def test_grpo_and_acpo_on_one_page(task, tmp_path):
    script, runs = checkout(tmp_path / "checkout"), tmp_path / "runs"
    given = {"VENV": sys.prefix, "RUNS": str(runs), "MODEL_PATH": str(task.policy)}
    overrides = [f"data.train_files={task.train}", "trainer.val_before_train=False", "trainer.test_freq=-1"]
    done = subprocess.run(
        ["bash", script, "acpo", *overrides, "clipx.alpha=2"],
        env=os.environ | SMALL | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in runs.glob("*/run.log"))
    assert done.returncode == 0, done.stdout + logs

    # Of each run its line and its steps.
    for method in ("grpo", "acpo"):
        assert f"    clipx_{method} (+clipx={method})" in done.stdout
    assert len(re.findall(r"^    step [12] of 2: reward [01]\.\d+$", done.stdout, re.M)) == 4, done.stdout

    # A run's name says what differs from its group, and is cut where that would be long.
    grpo, acpo = (read_run(path) for method in ("grpo", "acpo") for path in runs.glob(f"{method}*-seed1"))
    assert (grpo.method, acpo.method) == ("grpo", "acpo")
    assert list(grpo.log.index) == list(acpo.log.index) == [1, 2]
    assert "clipx.alpha" not in grpo.configuration and acpo.configuration["clipx.alpha"] == 2
    assert grpo.configuration["data.train_files"] == acpo.configuration["data.train_files"] == str(task.train)
    # Drawn before any update: the seed alone decides it.
    assert grpo.values("critic/score/mean")[1] == acpo.values("critic/score/mean")[1]

    first = []
    for run in (grpo, acpo):
        assert {(shard.step, shard.update) for shard in run.shards} == {(s, u) for s in (1, 2) for u in range(4)}
        (shard,) = [shard for shard in run.shards if (shard.step, shard.update) == (1, 0)]
        first.append(read_shards(run.traces, [shard]).to_pandas()[["prompt", "sample", "position", "token_id"]])
    assert len(first[0]) > 64 and first[0].equals(first[1])

    (page,) = runs.glob("acpo*-page/report.html")
    assert f"open the page     {page}" in done.stdout
    text = page.read_text()
    assert "GRPO" in text and "ACPO" in text and (page.parent / "tokens.csv").is_file()

    for run in (grpo, acpo):
        found = replayed(run.traces.parent)
        (own,) = found["settings"]
        assert own["exact"] and own["bounds_against_run"] <= 1e-6 and own["regained"] == own["lost"] == 0
        assert own["numbers"]["cosine"]["value"] == pytest.approx(1, abs=1e-6)
        for name in ("clip_fraction_low", "clip_fraction_high"):
            logged = run.values(f"actor/clipx/{name}")[found["step"]]
            assert own["numbers"][f"clipx/{name}"]["value"] == pytest.approx(logged, abs=1e-6)
    # ACPO's bounds are of this run's spreads, not epsilon_base's.
    assert own["bounds"]["high"]["greatest"] > 1.2001


def replayed(run: Path) -> dict:
    """What `clipx replay` writes of a run's own setting."""
    done = CliRunner().invoke(app, ["replay", str(run), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.matrix
def test_a_pretrained_model_on_one_page(tmp_path):
    script, runs = checkout(tmp_path / "checkout"), tmp_path / "runs"
    given = {"VENV": sys.prefix, "RUNS": str(runs), "MODEL": "smollm2"}
    done = subprocess.run(
        ["bash", script, "acpo", "trainer.val_before_train=False"],
        env=os.environ | SMALL | {"TRAIN_BATCH_SIZE": "8", "MINI_BATCH_SIZE": "4"} | given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * SECONDS,
    )
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in runs.glob("smollm2_*/*/run.log"))
    assert done.returncode == 0, done.stdout + logs
    (folder,) = runs.glob("smollm2_*")
    for method in ("grpo", "acpo"):
        (path,) = folder.glob(f"{method}*-seed1")
        run = read_run(path)
        assert (run.method, list(run.log.index)) == (method, [1, 2])
        # Form and skill, apart.
        for part in ("core/{}/acc", "aux/{}/format", "aux/{}/skill"):
            (value,) = run.values(f"val-{part.format('sums')}/mean@1")
            assert 0 <= value <= 1
        assert run.values("response_length/mean").max() <= 14
        longest = int((folder / "length.log").read_text().split()[-1])
        assert run.values("prompt_length/max").max() <= longest == run.configuration["data.max_prompt_length"]
    (page,) = folder.glob("acpo*-page/report.html")
    assert "What is" in page.read_text()
