"""Logs of runs: verl's file log as a table, whole, missing, empty, cut short, damaged or foreign, which all commands
read alike; the rewards of its validations, by hand; what verl's other loggers write; exports of W&B, and runs there
through a stand-in for its Api; this project's kept runs; what holds no run, or two; no tensorboard or wandb. Not
covered: consoles in detail (test_console.py), the interval's formula (tests/common), W&B's servers, other versions of
its export, other trackers.
"""

import contextlib
import gzip
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from omegaconf import OmegaConf

from tests.analysis.runs.commands import clipx
from tests.analysis.runs.example_runs import log_line, write_validation
from tests.messages import assert_names
from verl_clipx.analysis.runs import run_log
from verl_clipx.analysis.runs.folder import RunFolder, read_run
from verl_clipx.analysis.runs.held_out import read_held_out_rewards
from verl_clipx.analysis.runs.run_log import read_run_log
from verl_clipx.training.trainer.log import kept_lines

# Steps 0, 1 and 2; verl logs a validation by itself.
THREE_STEPS = log_line(0, val=0.25) + log_line(1, loss=2.0) + log_line(1, val=0.5) + log_line(2, loss=1.0)
CUT_OFF_LINE = '{"step": 3, "data": {"half wri'


@pytest.fixture
def write_log(tmp_path):
    """A function that writes a text as verl's file log."""

    def write(text):
        path = tmp_path / "metrics.jsonl"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "damaged_line"),
    [
        pytest.param(THREE_STEPS + CUT_OFF_LINE, 5, id="the last line cut off"),
        pytest.param(log_line(0, val=0.25) + CUT_OFF_LINE + "\n" + THREE_STEPS, 2, id="a line in the middle cut off"),
        pytest.param(THREE_STEPS + "[1, 2]\n", 5, id="no dictionary"),
        pytest.param(THREE_STEPS + log_line(2**60), 5, id="no step"),
    ],
)
def test_a_line_that_is_cut_off_or_damaged_is_left_out_with_a_warning(write_log, text, damaged_line):
    with pytest.warns(UserWarning, match=rf"metrics\.jsonl, line {damaged_line}: cut off or damaged"):
        table = read_run_log(write_log(text))
    assert list(table.index) == [0, 1, 2]
    assert table.loc[1].to_dict() == {"val": 0.5, "loss": 2.0}


@pytest.mark.filterwarnings("ignore:.*cut off or damaged")
def test_reports_tables_and_a_run_that_goes_on_read_a_damaged_log_alike(write_log):
    steps = [log_line(step, **{"actor/x": 1.0 * step}) for step in (1, 2, 3)]
    path = write_log(steps[0] + CUT_OFF_LINE + "\n" + steps[1] + steps[2] + CUT_OFF_LINE)
    (path.parent / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create({"data": {"seed": 1}}), path.parent / ".hydra" / "config.yaml")
    assert list(read_run(path.parent).log.index) == [1, 2, 3]
    assert sorted(RunFolder(path.parent).metrics) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in kept_lines(path, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Notes\n", "line 1: not a line"),
        ('{"loss": 1.0}\n', "line 1: not a line"),
        ("[1, 2]\n", "line 1: not a line"),
        ("1\n", "line 1: not a line"),
        ('{"step": "a", "data": {}}\n', "line 1: not a line"),
        ("", "empty: the run has not logged its first step yet"),
        ("\n", "empty: the run has not logged its first step yet"),
    ],
)
def test_something_else_is_refused(write_log, text, message):
    with pytest.raises(ValueError, match=message):
        read_run_log(write_log(text))


def test_a_missing_log_says_how_to_get_one(tmp_path):
    assert RunFolder(tmp_path).metrics == {}
    with pytest.raises(FileNotFoundError, match=r"trainer\.logger"):
        read_run_log(tmp_path / "none.jsonl")


def test_the_interval_is_over_problems_not_samples(tmp_path):
    write_validation(tmp_path, {10: [(1, 1), (1, 0)], 2: [(1, 0), (0, 0)]})
    before, after = read_held_out_rewards(tmp_path)
    assert before.step == 2
    assert before.reward.mean == 0.25
    assert len(before.by_problem) == 2
    assert after.step == 10
    assert after.reward.mean == 0.75
    # Two problems with means 0.5 and 0: s/sqrt(2) = 0.25, t(0.975, 1) = 12.7062.
    assert before.reward.high == pytest.approx(0.25 + 0.25 * 12.7062, abs=1e-4)


def test_scores_that_are_not_finite_are_left_out_and_counted(tmp_path):
    (tmp_path / "3.jsonl").write_text(
        '{"input": "a", "score": NaN}\n{"input": "a", "score": 1}\n'
        '{"input": "b", "score": null}\n{"input": "c", "score": 0}\n{"input": "c", "score": -Infinity}\n'
    )
    (rewards,) = read_held_out_rewards(tmp_path)
    assert rewards.by_problem == {"a": 1.0, "c": 0.0}
    assert rewards.reward.mean == 0.5
    assert rewards.not_finite == 3


def test_the_length_of_answers_is_in_characters_and_unknown_without_them(tmp_path):
    (tmp_path / "3.jsonl").write_text(
        '{"input": "a", "output": "one", "score": 1}\n{"input": "a", "output": "eleven", "score": 1}\n'
    )
    (tmp_path / "4.jsonl").write_text('{"input": "a", "score": 1}\n')
    # A sample without an answer is no answer of length 0, nor one of the length of "None".
    (tmp_path / "5.jsonl").write_text(
        '{"input": "a", "output": "eleven", "score": 1}\n{"input": "a", "score": 1}\n'
        '{"input": "a", "output": null, "score": 1}\n'
    )
    known, unknown, partly_known = read_held_out_rewards(tmp_path)
    assert known.length == 4.5
    assert math.isnan(unknown.length)
    assert partly_known.length == 6


TWO_STEPS = [
    {
        "actor/entropy": 0.5,
        "actor/pg_clipfrac": 0.02,
        "critic/score/mean": numpy.float64(0.25),
        "actor/grad_norm": 1e-7,
    },
    {"actor/entropy": 0.4, "actor/pg_clipfrac": 0.04, "critic/score/mean": 0.5, "actor/grad_norm": float("nan")},
]
# The entropy in both is 0.5 in step 1 and -0.001 in step 2.
CONSOLE_OUTPUT = """\
\x1b[36m(TaskRunner pid=17)\x1b[0m Training Progress: 50%|##| step:3
\x1b[36m(TaskRunner pid=17)\x1b[0m step:0 - val-core/x/reward/mean@1:0.1
\x1b[36m(TaskRunner pid=17)\x1b[0m step:1 - actor/entropy:0.5 - critic/score/mean:np.float64(0.25) - actor/grad_norm:nan
noise - actor/entropy:7
(TaskRunner pid=17) step:2 - actor/entropy:-1e-3 - critic/score/mean:1
"""
JSON_LINES = '{"step": 1, "data": {"actor/entropy": 0.5}}\n{"step": 2, "data": {"actor/entropy": -0.001}}\n'
# What W&B's scan_history gives as CSV.
HISTORY_OF_WANDB = ",_step,_runtime,actor/entropy,critic/score/mean,note\n0,1,3.5,0.5,0.25,a\n1,2,7.0,NaN,,b\n"
KEPT_RUNS = Path(__file__).parents[3] / "docs/results/runs"


def export_panel(metric: str, values: list[float | None]) -> str:
    """Return what W&B exports of a panel: a value for each step from 1 on, with its lowest and highest."""
    rows = [f'"Step","mine - {metric}","mine - {metric}__MIN","mine - {metric}__MAX"\n']
    for step, value in enumerate(values, 1):
        cell = "" if value is None else value
        rows.append(f'"{step}","{cell}","{cell}","{cell}"\n')
    return "".join(rows)


@pytest.mark.slow
def test_what_verls_own_loggers_write_is_read_said_and_drawn(tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board/project/mine"))
    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        tracking = Tracking("project", "mine", ["console", "tensorboard"])
        for step, data in enumerate(TWO_STEPS, 1):
            tracking.log(data, step)
        tracking.finish()
    (tmp_path / "console.out").write_text(console.getvalue())
    for path in (tmp_path / "console.out", tmp_path / "board"):
        run = read_run(path)
        for row, data in zip(run.log.sort_index().to_dict("records"), TWO_STEPS, strict=True):
            assert {key: row[key] for key in data} == pytest.approx(data, rel=1e-6, nan_ok=True)
        assert run.not_finite == {"actor/grad_norm": [2]}
    output = clipx("report", tmp_path / "console.out", "--out", tmp_path / "out")
    assert_names(output, "verl counted 3.0 % of the tokens of console as clipped", "+clipx=observe")
    assert (tmp_path / "out" / "figures" / "fractions_0.svg").exists()
    clipx("diagnose", tmp_path / "board")


def test_the_panels_that_wandb_exports_are_one_run(tmp_path):
    (tmp_path / "entropy.csv").write_text(export_panel("actor/entropy", [0.5, None]))
    (tmp_path / "score.csv").write_text(export_panel("critic/score/mean", [0.25, 0.5]))
    run = read_run(tmp_path)
    assert run.values("actor/entropy").to_dict() == {1: 0.5}
    assert run.values("critic/score/mean").to_dict() == {1: 0.25, 2: 0.5}
    assert run.not_finite == {}
    assert not any("MIN" in metric for metric in run.log)


def test_the_history_that_wandb_gives_is_a_run(tmp_path):
    (tmp_path / "mine.csv").write_text(HISTORY_OF_WANDB)
    run = read_run(tmp_path / "mine.csv")
    assert run.values("actor/entropy").to_dict() == {1: 0.5}
    assert run.values("critic/score/mean").to_dict() == {1: 0.25}
    assert run.not_finite == {"actor/entropy": [2]}
    assert "note" not in run.log


@pytest.mark.parametrize(
    ("metric", "values", "fact"),
    [
        ("critic/score/mean", [0.5] * 9 + [0.0] * 9, "mine: reward collapse from step 10 on"),
        ("response_length/mean", [100.0] * 9 + [900.0] * 9, "response_length/mean 100 → 900"),
    ],
)
def test_of_a_panel_with_one_metric_is_said_what_is_there(tmp_path, metric, values, fact):
    (tmp_path / "mine.csv").write_text(export_panel(metric, values))
    assert_names(clipx("diagnose", tmp_path / "mine.csv"), fact)
    clipx("report", tmp_path / "mine.csv", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "header", [",_step", "Unnamed: 0,_step", "Unnamed: 0.1,_step", "index,_step", "Step,_step", "level_0,_step"]
)
def test_a_table_s_own_count_is_no_metric(tmp_path, header):
    """As `to_csv()` writes it before the first column; half-way it jumps, where two tables were put together."""
    lines = [f"{header},actor/entropy,critic/score/mean"]
    for number in range(60):
        count = number if number < 30 else number + 900
        lines.append(f"{count},{number + 1},0.5,{0.3 + 0.01 * (number % 5)}")
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    if header.startswith("Step"):
        assert [*read_run(tmp_path / "mine.csv").log.index[-2:]] == [958, 959]
    assert {*read_run(tmp_path / "mine.csv").log} == {"actor/entropy", "critic/score/mean"}
    assert "no logged value jumped" in clipx("diagnose", tmp_path / "mine.csv")


def test_a_cell_of_any_length_is_read_over(tmp_path):
    (tmp_path / "mine.csv").write_text(HISTORY_OF_WANDB.replace(",a\n", f",{'x' * 200_000}\n"))
    assert read_run(tmp_path / "mine.csv").values("actor/entropy").to_dict() == {1: 0.5}


def test_a_number_that_cannot_be_read_is_said(tmp_path):
    text = 'Step,a - actor/entropy,a - response_length/mean,a - note\n1,0.5,"1,234.5",x\n'
    (tmp_path / "mine.csv").write_text(text)
    output = clipx("diagnose", tmp_path / "mine.csv")
    assert_names(output, "mine.csv", "response_length/mean is '1,234.5'", "not a number", "ignored")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train", CONSOLE_OUTPUT.encode()),
        ("slurm-17.err", CONSOLE_OUTPUT.encode()),
        ("run.log.1", CONSOLE_OUTPUT.encode()),
        ("a.jsonl", JSON_LINES.encode("utf-8-sig")),
        ("a.log", JSON_LINES.encode("utf-8-sig")),
        ("a", JSON_LINES.encode("utf-8-sig")),
        # As PowerShell writes what it redirects, with a mark and without.
        ("a.jsonl", JSON_LINES.encode("utf-16")),
        ("a.jsonl", JSON_LINES.encode("utf-16-le")),
        ("a.jsonl", JSON_LINES.encode("utf-16-be")),
        ("train.log", JSON_LINES.encode("utf-16")),
        ("train.log", JSON_LINES.encode("utf-16-le")),
        ("train.log", JSON_LINES.encode("utf-16-be")),
        ("train.log", CONSOLE_OUTPUT.encode("utf-16")),
        ("train.log", CONSOLE_OUTPUT.encode("utf-16-le")),
        ("train.log", CONSOLE_OUTPUT.encode("utf-16-be")),
        # Cut off within a character.
        ("a.jsonl", JSON_LINES.encode("utf-16") + b"{"),
    ],
)
def test_a_log_is_known_by_what_it_holds_whatever_its_name_and_encoding(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_run(tmp_path / name).values("actor/entropy").to_dict() == {1: 0.5, 2: -1e-3}


def test_numbers_that_are_text_are_read_and_a_broken_step_is_said(tmp_path):
    lines = [
        '{"step": "1", "data": {"actor/entropy": "0.5", "note": "a"}}',
        '{"step": 1.5, "data": {"actor/entropy": 9}}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="a.jsonl, line 2: cut off or damaged"):
        assert read_run(tmp_path / "a.jsonl").log.to_dict("index") == {1: {"actor/entropy": 0.5}}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_exports_that_a_spreadsheet_saved(tmp_path, encoding, separator):
    half = "0,5" if separator == ";" else "0.5"
    rows = [["Step", "mine - actor/entropy"], ["1", half], ["2", ""]]
    text = "\n".join(separator.join(row) for row in rows)
    (tmp_path / "mine.csv").write_text(text, encoding=encoding)
    assert read_run(tmp_path / "mine.csv").values("actor/entropy").to_dict() == {1: 0.5}


def make_stand_in_for_wandb():
    """Return what is called of wandb 0.31: Api().run(path), that run's name, config and scan_history(), and Error."""
    history = [
        {"_step": 1, "_runtime": 3.0, "actor/entropy": 0.5, "table": {"path": "x"}},
        {"_step": 2, "actor/entropy": "NaN"},
        {"_step": 2, "critic/score/mean": 1},
    ]
    config = {"data": {"seed": 7}, "actor_rollout_ref": {"rollout": {"top_p": 0.9}}, "hf_token": "hf_x"}
    run = SimpleNamespace(name="long", config=config, scan_history=lambda: iter(history))
    runs = {"team/project/a1b2": run}
    return SimpleNamespace(Api=lambda: SimpleNamespace(run=runs.__getitem__), Error=KeyError)


RUN_AT_WANDB = "wandb://team/project/a1b2"


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, whose servers have RUN_AT_WANDB."""
    monkeypatch.setitem(sys.modules, "wandb", make_stand_in_for_wandb())


@pytest.mark.usefixtures("wandb")
def test_a_run_at_wandb_is_read_by_its_api():
    run = read_run(Path(RUN_AT_WANDB))
    assert run.name == "long"
    assert run.seed == 7
    assert "hf_x" not in str(run.configuration)
    assert run.values("actor/entropy").to_dict() == {1: 0.5}
    assert run.values("critic/score/mean").to_dict() == {2: 1.0}
    assert len(run.log.columns) == 2
    assert run.not_finite == {"actor/entropy": [2]}


@pytest.mark.usefixtures("wandb")
def test_a_run_at_wandb_is_diagnosed_and_drawn_but_not_followed(tmp_path):
    assert_names(clipx("diagnose", RUN_AT_WANDB), "long: truncated sampling from step 1 on")
    clipx("report", RUN_AT_WANDB, "--out", tmp_path / "out")
    refusal = clipx("report", RUN_AT_WANDB, "--follow", "--out", tmp_path / "out", code=1)
    assert_names(refusal, "--follow watches files")


@pytest.mark.usefixtures("wandb")
def test_a_run_that_wandb_lacks_and_an_incomplete_name_are_refused():
    assert "wandb://team/project/x: 'team/project/x'" in clipx("diagnose", "wandb://team/project/x", code=1)
    assert_names(clipx("diagnose", "wandb://a1b2", code=1), "wandb://a1b2", "wandb://entity/project/run")


def test_without_wandb_its_name_and_how_to_install_it_are_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    output = clipx("diagnose", RUN_AT_WANDB, code=1)
    assert_names(output, "clipx diagnose needs wandb", "pip install wandb")


TABLE_OF_RUNS = "a.csv: this is W&B's table of runs"
NOT_OF_VERL = "a.csv: no metric begins with actor/, critic/, response_length/"
GZIP_OF_NOISE = gzip.compress(b"\x00\x80" * 99, mtime=0)
GZIP_CUT_OFF = gzip.compress(b'{"step": 1}', mtime=0)[:-9]


def refuse_files(folder, contents: dict[str, bytes]) -> str:
    """Write files, and return what the command prints when it refuses the only one, or their folder."""
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    path = folder / name if len(contents) == 1 else folder
    output = clipx("diagnose", path, code=1)
    # Nothing of a file that is no text is printed.
    for unprintable in ("\\x", "\ufffd", "\x00"):
        assert unprintable not in output
    return output


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        pytest.param("a.log", b"no steps\n", "a.log: no line `step:1 - …`", id="a console without steps"),
        pytest.param("a.csv", b"Run,actor/entropy\nmine,1\n", "a.csv: no column Step or _step", id="no step"),
        # As W&B's page and its API export tables of runs, with steps and without.
        pytest.param("a.csv", b"Name,actor/entropy\nmine,1\n", TABLE_OF_RUNS, id="a table of runs"),
        pytest.param(
            "a.csv",
            b"Name,State,User,Runtime,_step,actor/entropy\nmine,finished,me,9,20,0.5\nother,failed,me,8,30,0.4\n",
            TABLE_OF_RUNS,
            id="a table of runs with states and steps",
        ),
        pytest.param(
            "a.csv",
            b"Name,training/global_step,actor/entropy\nmine,20,0.5\n",
            TABLE_OF_RUNS,
            id="a table of runs with verl's steps",
        ),
        pytest.param(
            "a.csv",
            b"State,Created,_step,actor/entropy\nfinished,2026-11-01,20,0.5\n",
            TABLE_OF_RUNS,
            id="a table of runs without names",
        ),
        pytest.param(
            "a.csv",
            b",name,id,_step,actor/entropy\n0,mine,a1,20,0.5\n1,other,b2,30,0.4\n",
            TABLE_OF_RUNS,
            id="a table of runs of the API",
        ),
        pytest.param("a.csv", b"Step,a - train/reward\n1,1\n", NOT_OF_VERL, id="a panel of another trainer"),
        pytest.param("a.csv", b"Step,train/loss\n1,1\n", NOT_OF_VERL, id="a table of another trainer"),
        pytest.param(
            "a.csv",
            b'Step,a - actor/entropy\n"1e300",1\n',
            "a.csv: '1e300' is not a training step",
            id="a step that is too large",
        ),
        pytest.param(
            "a.csv", b'Step,a - actor/entropy\n"1.5",1\n', "a.csv: '1.5' is not a training step", id="half a step"
        ),
        pytest.param(
            "a.csv",
            b'Step,a - actor/entropy\n"1,000",1\n',
            "a.csv: '1,000' is not a training step",
            id="a step with a comma",
        ),
        pytest.param("a.log", GZIP_OF_NOISE, "a.log: a gzip file, but not a kept run", id="a packed log of noise"),
        pytest.param("a.csv", GZIP_OF_NOISE, "a.csv: a gzip file, but not a kept run", id="a packed table of noise"),
        pytest.param(
            "metrics.jsonl",
            GZIP_CUT_OFF,
            "metrics.jsonl: a gzip file that cannot be unpacked",
            id="a packed log that is cut off",
        ),
        pytest.param(
            "a.tar.gz",
            b"\x1f\x8b\x00",
            "a.tar.gz: a gzip file that cannot be unpacked",
            id="the beginning of a packed file",
        ),
    ],
)
def test_what_holds_no_run_is_refused_by_name(tmp_path, name, content, fact):
    assert_names(refuse_files(tmp_path, {name: content}), fact)


@pytest.mark.parametrize(
    ("contents", "facts"),
    [
        pytest.param(
            {"a.csv": b"Step,a - actor/entropy,b - actor/entropy\n1,1,1\n"},
            ["a.csv", "2 runs (a, b)", "wandb://entity/project/run", "export each by itself"],
            id="a panel of two runs",
        ),
        pytest.param(
            {"a.csv": b"Step,a - actor/entropy\n1,0.5\n", "b.csv": b"Step,b - critic/score/mean\n1,0.5\n"},
            ["b.csv", "2 runs (a, b)"],
            id="panels of two runs",
        ),
        pytest.param(
            {"a.csv": b"_step,actor/entropy\n1,0.5\n", "b.csv": b"_step,actor/entropy\n1,0.7\n"},
            ["several runs", "wandb://entity/project/run"],
            id="histories of two runs",
        ),
        pytest.param(
            {"a.csv": b"Step,a - actor/entropy\n1,0.5\n2,0.5\n1,0.7\n"},
            ["a.csv, step 1", "second value of actor/entropy"],
            id="two runs below each other",
        ),
    ],
)
def test_what_holds_two_runs_is_refused_by_name(tmp_path, contents, facts):
    assert_names(refuse_files(tmp_path, contents), *facts)


@pytest.mark.parametrize("packed", [True, False])
def test_a_kept_run_is_read_with_its_header(tmp_path, packed):
    path = KEPT_RUNS / "faults/top_p-seed31.jsonl.gz"
    if not packed:
        content = gzip.decompress(path.read_bytes())
        path = tmp_path / "top_p-seed31.jsonl"
        path.write_bytes(content)
    run = read_run(path)
    assert run.name == "top_p-seed31"
    assert run.seed == 31
    assert run.method == "top_p"
    assert run.versions["verl"] == "0.9.1"
    assert min(run.log.index) == 1
    assert "seconds" not in run.log
    # By the header's configuration.
    assert_names(clipx("diagnose", path), "truncated sampling from step 1 on")


@pytest.mark.slow
@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_a_folder_of_another_logger_has_the_metrics_and_the_last_step_of_its_log(tmp_path, logger):
    if logger == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("actor/entropy", 0.5, 1)
            writer.add_scalar("actor/entropy", 0.25, 2)
    else:
        (tmp_path / "panel.csv").write_text("Step,mine - actor/entropy\n1,0.5\n2,0.25\n")
    files = RunFolder(tmp_path)
    assert files.metrics == files.rows == {1: {"actor/entropy": 0.5}, 2: {"actor/entropy": 0.25}}
    assert files.last_step == 2


def test_a_second_run_in_tensorboards_folder_is_read_alone(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for entropy, count in ((0.5, 3), (0.7, 2)):
        with SummaryWriter(str(tmp_path / "board"), filename_suffix=str(count)) as writer:
            for step in range(1, count + 1):
                writer.add_scalar("actor/entropy", entropy, step)
                writer.add_scalar("critic/score/mean", entropy, step)
    with pytest.warns(UserWarning, match="after step 3 it begins anew"):
        run = read_run(tmp_path / "board")
    assert run.values("actor/entropy").to_dict() == pytest.approx({1: 0.7, 2: 0.7})


@pytest.fixture
def two_boards(tmp_path):
    """A folder with two runs of tensorboard, `one` and `deep/two`."""
    for name in ("one", "deep/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "events.out.tfevents.1").write_bytes(b"")
    return tmp_path


def test_a_folder_of_two_runs_of_tensorboard_is_refused_with_their_names(two_boards):
    output = clipx("report", two_boards, "--out", two_boards / "out", code=1)
    assert_names(output, "2 runs (deep/two, one)")


def test_without_tensorboard_its_name_and_how_to_install_it_are_said(two_boards, monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard.backend", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    output = clipx("report", two_boards / "one", "--out", two_boards / "out", code=1)
    assert_names(output, "clipx report needs tensorboard", "pip install tensorboard")


def log_line_with_batch(step: int, rows: str) -> str:
    """Return a line of the plugin's log, with fingerprints of its rollout batch; `rows` is that of its rows."""
    batch = {
        "prompts": "1",
        "responses": "2",
        "rows": rows,
        "groups": 2,
        "sequences": 4,
        "tokens": 40,
        "distinct": 4,
    }
    return json.dumps({"step": step, "data": {"actor/entropy": 1.0}, "batch": batch}) + "\n"


def rows_by_step(run) -> dict[int, str]:
    """Return the fingerprint of the rows of each step's rollout batch."""
    return {step: batch["rows"] for step, batch in run.batches.items()}


@pytest.mark.parametrize("packed", [False, True])
def test_the_batches_of_a_kept_run_are_read_with_its_rows(tmp_path, packed):
    header = json.dumps({"commit": "c" * 40, "seed": 1}) + "\n"
    content = (header + log_line_with_batch(1, "a") + log_line_with_batch(2, "b")).encode()
    if packed:
        path = tmp_path / "grpo-seed1.jsonl.gz"
        path.write_bytes(gzip.compress(content))
    else:
        path = tmp_path / "grpo-seed1.jsonl"
        path.write_bytes(content)
    run = read_run(path)
    assert rows_by_step(run) == {1: "a", 2: "b"}
    assert list(run.log.index) == [1, 2]
    assert run.seed == 1


@pytest.mark.filterwarnings("ignore:.*after step")
def test_the_batches_of_a_log_are_of_the_run_that_counts(write_log):
    begun_anew = [log_line_with_batch(1, "a"), log_line_with_batch(2, "a"), log_line_with_batch(1, "b")]
    assert rows_by_step(read_run(write_log("".join(begun_anew)))) == {1: "b"}
    resumed = [
        log_line_with_batch(1, "a"),
        log_line_with_batch(2, "b"),
        log_line_with_batch(3, "c"),
        log_line_with_batch(2, "d"),
    ]
    assert rows_by_step(read_run(write_log("".join(resumed)))) == {1: "a", 2: "d"}


def test_a_log_is_parsed_once(write_log, monkeypatch):
    parse_json = run_log.parse_json
    parsed_texts = []

    def parse_and_remember(text, where):
        parsed_texts.append(text)
        return parse_json(text, where)

    monkeypatch.setattr(run_log, "parse_json", parse_and_remember)
    read_run(write_log("".join(log_line_with_batch(step, "a") for step in (1, 2, 3))))
    # The first line is looked at for the header of a kept run.
    assert len(parsed_texts) == 4
