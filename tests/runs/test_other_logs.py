"""`clipx report` and `clipx diagnose` of runs whose log is not verl's file log, and of runs without this plugin.

Covers: what verl's own loggers print and write (console, TensorBoard), as they are and among Ray's prefixes and
colours; exports of W&B, of panels and of a history, laid out as its pages and API do; the kept runs of this
project; what holds no run; a missing tensorboard. Not covered: other versions of W&B's export; MLflow, SwanLab and
others.
"""

import contextlib
import gzip
import io
import sys
from pathlib import Path

import numpy
import pytest
from typer.testing import CliRunner

from verl_clipx.cli import app
from verl_clipx.runs.folder import read_run
from verl_clipx.runs.settings import settings_of

STEPS = [
    {
        "actor/entropy": 0.5,
        "actor/pg_clipfrac": 0.02,
        "critic/score/mean": numpy.float64(0.25),
        "actor/grad_norm": 1e-7,
    },
    {"actor/entropy": 0.4, "actor/pg_clipfrac": 0.04, "critic/score/mean": 0.5, "actor/grad_norm": float("nan")},
]
CONSOLE = """\
\x1b[36m(TaskRunner pid=17)\x1b[0m Training Progress: 50%|##| step:3
\x1b[36m(TaskRunner pid=17)\x1b[0m step:0 - val-core/x/reward/mean@1:0.1
\x1b[36m(TaskRunner pid=17)\x1b[0m step:1 - actor/entropy:0.5 - critic/score/mean:np.float64(0.25) - actor/grad_norm:nan
noise - actor/entropy:7
(TaskRunner pid=17) step:2 - actor/entropy:-1e-3 - critic/score/mean:1
"""
PANEL = '"Step","mine - {0}","mine - {0}__MIN","mine - {0}__MAX"\n"1","{1}","{1}","{1}"\n"2","{2}","{2}","{2}"\n'
HISTORY = ",_step,_runtime,actor/entropy,critic/score/mean,note\n0,1,3.5,0.5,0.25,a\n1,2,7.0,NaN,,b\n"

KEPT = Path(__file__).parents[2] / "docs/results/runs"


def report(path, out):
    return CliRunner().invoke(app, ["report", str(path), "--out", str(out)])


def test_console_output(tmp_path):
    (tmp_path / "grpo-seed1.log").write_text(CONSOLE)
    run = read_run(tmp_path / "grpo-seed1.log")
    assert run.name == "grpo-seed1" and run.seed == 1
    assert run.values("actor/entropy").to_dict() == {1: 0.5, 2: -1e-3}
    assert run.values("critic/score/mean").to_dict() == {1: 0.25, 2: 1.0}
    assert run.not_finite["actor/grad_norm"] == [1]


@pytest.mark.slow
def test_what_verls_own_loggers_write(tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tracking = Tracking("project", "mine", ["console", "tensorboard"])
        for step, data in enumerate(STEPS, 1):
            tracking.log(data, step)
        tracking.finish()
    (tmp_path / "console.out").write_text(printed.getvalue())
    for path in (tmp_path / "console.out", tmp_path / "board"):
        run = read_run(path)
        found = run.log.sort_index().to_dict("records")
        for row, data in zip(found, STEPS, strict=True):
            assert {key: row[key] for key in data} == pytest.approx(data, rel=1e-6, nan_ok=True)
        assert run.not_finite == {"actor/grad_norm": [2]}
        assert report(path, tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("together", [False, True])
def test_exports_of_wandb(tmp_path, together):
    if together:
        (tmp_path / "mine.csv").write_text(HISTORY)
    else:
        (tmp_path / "entropy.csv").write_text(PANEL.format("actor/entropy", 0.5, ""))
        (tmp_path / "score.csv").write_text(PANEL.format("critic/score/mean", 0.25, 0.5))
    run = read_run(tmp_path / "mine.csv" if together else tmp_path)
    assert run.values("actor/entropy").to_dict() == {1: 0.5}
    assert run.values("critic/score/mean").to_dict() == ({1: 0.25} if together else {1: 0.25, 2: 0.5})
    assert run.not_finite == ({"actor/entropy": [2]} if together else {})
    assert not any("MIN" in name or name == "note" for name in run.log)


@pytest.mark.slow
def test_what_verl_counted_is_said_and_drawn(tmp_path):
    (tmp_path / "run.log").write_text(
        "".join(f"step:{step} - actor/entropy:0.5 - actor/pg_clipfrac:{0.01 * step}\n" for step in (1, 2, 3))
    )
    result = report(tmp_path / "run.log", tmp_path / "out")
    told = result.output.replace("\n", " ")
    assert "verl counted 2.0 % of the tokens of run as clipped." in told.replace("\u202f", " ")
    assert "mean over micro-batches" in told and "+clipx=observe" in told
    assert (tmp_path / "out" / "figures" / "fractions_0.svg").exists()
    assert CliRunner().invoke(app, ["diagnose", str(tmp_path / "run.log")]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.log", "no steps\n", "no line `step:1 - …`"),
        ("a.csv", "Name,actor/entropy\nmine,1\n", "no column Step or _step"),
        ("a.csv", "Step,a - actor/entropy,b - actor/entropy\n1,1,1\n", "2 runs (a, b)"),
        ("a.csv", "Step,train/loss\n1,1\n", "not the log of a policy's training"),
    ],
)
def test_what_holds_no_run_is_an_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    result = report(tmp_path / name, tmp_path / "out")
    assert result.exit_code == 1 and message in result.output.replace("\n", " "), result.output


@pytest.mark.parametrize("packed", [True, False])
def test_a_kept_run_is_read_with_its_header(tmp_path, packed):
    kept = KEPT / "faults/top_p-seed31.jsonl.gz"
    if not packed:
        (tmp_path / "top_p-seed31.jsonl").write_bytes(gzip.decompress(kept.read_bytes()))
        kept = tmp_path / "top_p-seed31.jsonl"
    run = read_run(kept)
    assert (run.name, run.seed, run.method, run.versions["verl"]) == ("top_p-seed31", 31, "top_p", "0.9.1")
    assert min(run.log.index) == 1 and "seconds" not in run.log
    result = CliRunner().invoke(app, ["diagnose", str(kept)])
    # By the header's configuration.
    assert result.exit_code == 0 and "truncated sampling from step 1 on" in result.output.replace("\n", " ")


def test_kept_runs_are_grouped_by_what_their_headers_say():
    names = [
        "reversal/ar_4-seed1",
        "reversal/ar_4-seed2",
        "faults/healthy_acpo_4-seed32",
        "faults/healthy_grpo_4-seed31",
    ]
    settings = settings_of([read_run(KEPT / f"{name}.jsonl.gz") for name in names])
    assert [[run.seed for run in one.runs] for one in settings] == [[1, 2], [32], [31]]
    assert settings[0].label == "AR 4"


@pytest.mark.parametrize("name", ["metrics.jsonl", "a.tar.gz", "a.log", "a.csv"])
@pytest.mark.parametrize(
    "content",
    [gzip.compress(b"\x00\x80" * 99), gzip.compress(b'{"step": 1}')[:-9], b"\x1f\x8b\x00"],
    # The bytes hold the time, by which two workers would collect different tests.
    ids=["no text", "cut off", "header"],
)
def test_another_gzip_file_is_refused_by_name(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    result = CliRunner().invoke(app, ["diagnose", str(tmp_path / name)])
    told = result.output.replace("\n", "")
    assert result.exit_code == 1 and f"{name}: a gzip file" in told
    assert "\\x" not in told and "\ufffd" not in told and "\x00" not in told


def test_two_runs_of_tensorboard_are_named(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.out.tfevents.1").write_bytes(b"")
    result = report(tmp_path, tmp_path / "out")
    assert result.exit_code == 1 and "2 runs (one, two)" in result.output.replace("\n", " ")


def test_without_tensorboard_its_name_is_said(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard.backend", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    result = report(tmp_path, tmp_path / "out")
    assert result.exit_code == 1
    assert "clipx report needs tensorboard, which comes with verl: pip install tensorboard" in result.output.replace(
        "\n", " "
    )
