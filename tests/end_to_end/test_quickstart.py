"""scripts/quickstart.sh, short: GRPO and ACPO by the real verl, one after the other, and their page.

Covers: both runs with their traces, whose metrics they are, which overrides each gets, the page, the replay of each
run's own setting, the form of the runs that `clipx demo` ships; with `-m matrix` also their first steps' numbers, and
`MODEL=smollm2`. Not covered: the installation, the warm start's quality (tests/papers/tasks), several seeds
(tests/claims/test_quickstart.py), learning and times (docs/dev/launching.md has measured runs).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analysis.runs.commands import answer
from verl_clipx.analysis.demo.files import RUNS, SHIPPED
from verl_clipx.analysis.runs.folder import read_run
from verl_clipx.analysis.runs.run import Run
from verl_clipx.common.verl_version import verl_version
from verl_clipx.run.trace_format import read_shards

from .runs import REPOSITORY, SECONDS
from .test_training import check_traces

pytestmark = pytest.mark.end_to_end

SMALL = {"TOTAL_STEPS": "2", "TRAIN_BATCH_SIZE": "16", "MINI_BATCH_SIZE": "4", "ROLLOUT_N": "4", "TRACE_EVERY": "1"}
# How far, relative and absolute, a step's metrics may be from the demo's.
TOLERANCES = {
    "critic/score/mean": (0, 0.03),
    "response_length/mean": (0.02, 0),
    "actor/entropy": (0.05, 0),
    "actor/clipx/clip_fraction_low": (0.3, 0.002),
    "actor/clipx/clip_fraction_high": (0.3, 0.002),
}


def checkout(folder: Path) -> Path:
    """The repository with links for its folders, whose environment is always up to date."""
    (folder / "scripts").mkdir(parents=True)
    for path in REPOSITORY.iterdir():
        if path.name not in ("scripts", "runs", ".git"):
            (folder / path.name).symlink_to(path)
    (folder / "scripts" / "quickstart.sh").symlink_to(REPOSITORY / "scripts" / "quickstart.sh")
    (folder / "scripts" / "environment.sh").write_text("exit 0\n")
    return folder / "scripts" / "quickstart.sh"


def quickstart(folder: Path, *words: str, **variables: str) -> tuple[Path, str]:
    """Runs the script to its end; returns the folder of its runs, and what it printed."""
    script = checkout(folder / "checkout")
    runs = folder / "runs"
    environment = os.environ | variables | {"VENV": sys.prefix, "RUNS": str(runs)}
    result = subprocess.run(
        ["bash", script, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3 * SECONDS,
    )
    logs = "".join(path.read_text(errors="replace")[-3000:] for path in runs.rglob("*-seed1/run.log"))
    assert result.returncode == 0, result.stdout + logs
    return runs, result.stdout


def test_grpo_and_acpo_on_one_page(task, tmp_path):
    overrides = [f"data.train_files={task.train}", "trainer.val_before_train=False", "trainer.test_freq=-1"]
    runs, printed = quickstart(tmp_path, "acpo", *overrides, "clipx.alpha=2", **SMALL, MODEL_PATH=str(task.policy))

    # Of each run its line and its steps.
    for method in ("grpo", "acpo"):
        assert f"    clipx_{method} (+clipx={method})" in printed
    assert len(re.findall(r"^    step [12] of 2: reward [01]\.\d+$", printed, re.M)) == 4, printed

    # A run's name says what differs from its group, and is cut where that would be long.
    grpo, acpo = (read_run(path) for method in ("grpo", "acpo") for path in runs.glob(f"{method}*-seed1"))
    assert (grpo.method, acpo.method) == ("grpo", "acpo")
    assert list(grpo.log.index) == list(acpo.log.index) == [1, 2]
    assert "clipx.alpha" not in grpo.configuration and acpo.configuration["clipx.alpha"] == 2
    assert grpo.configuration["data.train_files"] == acpo.configuration["data.train_files"] == str(task.train)
    # Drawn before any update: the seed alone decides it.
    assert grpo.values("critic/score/mean")[1] == acpo.values("critic/score/mean")[1]

    # One seed pairs the arms and shows nothing about seeds; two steps have no validations, and may be
    # too few for a clip.
    folders = [next(runs.glob(f"{method}*-seed1")) for method in ("grpo", "acpo")]
    certified = answer("certify", folders[0], "vs", folders[1], code=None)["answers"]
    others = {row["question"]: row for row in certified if row["verdict"] != "passed"}
    open_questions = {"one validation", "the runs of an arm differ in seeds only", "every seed reached its run"}
    assert open_questions <= others.keys() <= {*open_questions, "the clip acted"}, others
    assert [batch["groups"] for batch in grpo.batches.values()] == [16, 16]
    assert grpo.batches[1] == acpo.batches[1] and grpo.batches[2]["rows"] != acpo.batches[2]["rows"]

    first_tokens = []
    for run in (grpo, acpo):
        shards = {(shard.step, shard.update): shard for shard in run.shards}
        assert shards.keys() == {(step, update) for step in (1, 2) for update in range(4)}
        check_traces(read_shards(run.traces, run.shards).to_pandas(), run.log)
        traced = read_shards(run.traces, [shards[1, 0]]).to_pandas()
        first_tokens.append(traced[["prompt", "sample", "position", "token_id"]])
    tokens_of_grpo, tokens_of_acpo = first_tokens
    assert len(tokens_of_grpo) > 64 and tokens_of_grpo.equals(tokens_of_acpo)

    (page,) = runs.glob("acpo*-page/report.html")
    assert f"open the page     {page}" in printed
    text = page.read_text()
    assert "GRPO" in text and "ACPO" in text and (page.parent / "metrics.csv").is_file()

    for run in (grpo, acpo):
        replayed = answer("replay", run.traces.parent)
        (own,) = replayed["settings"]
        assert own["exact"] and own["bounds_against_run"] <= 1e-6 and own["regained"] == own["lost"] == 0
        assert own["numbers"]["cosine"]["value"] == pytest.approx(1, abs=1e-6)
        for name in ("clip_fraction_low", "clip_fraction_high"):
            logged = run.values(f"actor/clipx/{name}")[replayed["step"]]
            assert own["numbers"][f"clipx/{name}"]["value"] == pytest.approx(logged, abs=1e-6)
    # ACPO's bounds are of this run's spreads, not epsilon_base's.
    assert own["bounds"]["high"]["greatest"] > 1.2001

    for name, run in zip(RUNS, (grpo, acpo), strict=True):
        shipped = read_run(SHIPPED / name)
        # Another verl, beside which scripts/test.sh --verl runs this test, logs and composes other keys.
        if verl_version() == shipped.versions["verl"]:
            assert form_of(shipped) == form_of(run), "old: scripts/demo.py makes the demo's runs anew"


def form_of(run: Run) -> tuple[set[str], ...]:
    """A run's metrics and the keys of its configuration, but for validations and the parameter that is given here."""
    metrics = {name for name in run.log if not name.startswith(("val-", "timing_s/testing"))}
    return metrics, {key for key in run.configuration if not key.endswith("clipx.alpha")}


@pytest.mark.matrix
def test_the_first_steps_are_those_of_the_demo(tmp_path):
    """Another processor rounds otherwise, in the policy's warm start too, and samples some other tokens."""
    runs, _ = quickstart(tmp_path, "acpo", "trainer.val_before_train=False", TOTAL_STEPS="2")
    for name in RUNS:
        (folder,) = runs.glob(f"{name.removesuffix('-seed1')}_*-seed1")
        trained = read_run(folder).log
        shipped = read_run(SHIPPED / name).log
        for key, (relative, absolute) in TOLERANCES.items():
            expected = shipped[key][trained.index].tolist()
            assert trained[key].tolist() == pytest.approx(expected, rel=relative, abs=absolute), (name, key)


@pytest.mark.matrix
def test_a_pretrained_model_on_one_page(tmp_path):
    variables = SMALL | {"TRAIN_BATCH_SIZE": "8", "MODEL": "smollm2"}
    runs, _ = quickstart(tmp_path, "acpo", "trainer.val_before_train=False", **variables)
    (folder,) = runs.glob("smollm2_*")
    for method in ("grpo", "acpo"):
        (path,) = folder.glob(f"{method}*-seed1")
        run = read_run(path)
        assert (run.method, list(run.log.index)) == (method, [1, 2])
        # Form and skill, apart.
        for part in ("core/sums/acc", "aux/sums/format", "aux/sums/skill"):
            (value,) = run.values(f"val-{part}/mean@1")
            assert 0 <= value <= 1
        assert run.values("response_length/mean").max() <= 14
        longest = int((folder / "length.log").read_text().split()[-1])
        assert run.values("prompt_length/max").max() <= longest == run.configuration["data.max_prompt_length"]
    (page,) = folder.glob("acpo*-page/report.html")
    assert "What is" in page.read_text()
