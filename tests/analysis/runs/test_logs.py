"""Logs of runs. verl's file log as a table, whole, missing, empty, cut short, damaged or foreign, which all commands
read alike; the rewards of its validations, by hand; what verl's other loggers print and write, among Ray's prefixes
and colours too; exports of W&B and runs there, through a stand-in for its Api; this project's kept runs; what holds no
run; no tensorboard or wandb. Not covered: the interval's formula (tests/common), W&B's servers, other versions of its
export, other trackers.
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
from verl_clipx.analysis.runs import run_log
from verl_clipx.analysis.runs.folder import RunFolder, read_run
from verl_clipx.analysis.runs.held_out import read_held_out_rewards
from verl_clipx.analysis.runs.run_log import read_run_log
from verl_clipx.training.trainer.log import kept_lines

WHOLE = log_line(0, **{"val": 0.25}) + log_line(1, loss=2.0) + log_line(1, **{"val": 0.5}) + log_line(2, loss=1.0)
CUT = '{"step": 3, "data": {"half wri'


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "metrics.jsonl"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (WHOLE + CUT, 5),
        (WHOLE[: WHOLE.index("\n") + 1] + CUT + "\n" + WHOLE, 2),
        (WHOLE + "[1, 2]\n", 5),
        (WHOLE + log_line(2**60), 5),
    ],
)
def test_a_line_that_is_cut_off_or_damaged_is_left_out_with_a_warning(log, text, line):
    with pytest.warns(UserWarning, match=rf"metrics\.jsonl, line {line}: cut off or damaged"):
        table = read_run_log(log(text))
    assert list(table.index) == [0, 1, 2] and table.loc[1].to_dict() == {"val": 0.5, "loss": 2.0}


@pytest.mark.filterwarnings("ignore:.*cut off or damaged")
def test_reports_tables_and_a_run_that_goes_on_read_a_damaged_log_alike(log):
    lines = [log_line(step, **{"actor/x": 1.0 * step}) for step in (1, 2, 3)]
    path = log(lines[0] + CUT + "\n" + "".join(lines[1:]) + CUT)
    (path.parent / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create({"data": {"seed": 1}}), path.parent / ".hydra" / "config.yaml")
    assert list(read_run(path.parent).log.index) == sorted(RunFolder(path.parent).metrics) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in kept_lines(path, 3)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "line 1: not a line") for text in ("# Notes\n", '{"loss": 1.0}\n', "[1, 2]\n", "1\n")),
        ('{"step": "a", "data": {}}\n', "line 1: not a line"),
        *((text, "empty: the run has not logged its first step yet") for text in ("", "\n")),
    ],
)
def test_something_else_is_refused(log, text, message):
    with pytest.raises(ValueError, match=message):
        read_run_log(log(text))


def test_a_missing_log_says_how_to_get_one(tmp_path):
    assert RunFolder(tmp_path).metrics == {}
    with pytest.raises(FileNotFoundError, match=r"trainer\.logger"):
        read_run_log(tmp_path / "none.jsonl")


def test_the_interval_is_over_problems_not_samples(tmp_path):
    write_validation(tmp_path, {10: [(1, 1), (1, 0)], 2: [(1, 0), (0, 0)]})
    before, after = read_held_out_rewards(tmp_path)
    assert (before.step, before.reward.mean, len(before.by_problem)) == (2, 0.25, 2)
    assert (after.step, after.reward.mean) == (10, 0.75)
    # Two problems with means 0.5 and 0: s/sqrt(2) = 0.25, t(0.975, 1) = 12.7062.
    assert before.reward.high == pytest.approx(0.25 + 0.25 * 12.7062, abs=1e-4)


def test_scores_that_are_not_finite_are_left_out_and_counted(tmp_path):
    (tmp_path / "3.jsonl").write_text(
        '{"input": "a", "score": NaN}\n{"input": "a", "score": 1}\n'
        '{"input": "b", "score": null}\n{"input": "c", "score": 0}\n{"input": "c", "score": -Infinity}\n'
    )
    (found,) = read_held_out_rewards(tmp_path)
    assert found.by_problem == {"a": 1.0, "c": 0.0} and found.reward.mean == 0.5
    assert found.not_finite == 3


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
    assert known.length == 4.5 and math.isnan(unknown.length)
    assert partly_known.length == 6


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
JSON_LINES = '{"step": 1, "data": {"actor/entropy": 0.5}}\n{"step": 2, "data": {"actor/entropy": -0.001}}\n'
PANEL = '"Step","mine - {0}","mine - {0}__MIN","mine - {0}__MAX"\n"1","{1}","{1}","{1}"\n"2","{2}","{2}","{2}"\n'
HISTORY = ",_step,_runtime,actor/entropy,critic/score/mean,note\n0,1,3.5,0.5,0.25,a\n1,2,7.0,NaN,,b\n"

KEPT = Path(__file__).parents[3] / "docs/results/runs"


@pytest.mark.slow
def test_what_verls_own_loggers_write_is_read_said_and_drawn(tmp_path, monkeypatch):
    from verl.utils.tracking import Tracking

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board/project/mine"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tracking = Tracking("project", "mine", ["console", "tensorboard"])
        for step, data in enumerate(STEPS, 1):
            tracking.log(data, step)
        tracking.finish()
    (tmp_path / "console.out").write_text(printed.getvalue())
    for path in (tmp_path / "console.out", tmp_path / "board"):
        run = read_run(path)
        for row, data in zip(run.log.sort_index().to_dict("records"), STEPS, strict=True):
            assert {key: row[key] for key in data} == pytest.approx(data, rel=1e-6, nan_ok=True)
        assert run.not_finite == {"actor/grad_norm": [2]}
    text = clipx("report", tmp_path / "console.out", "--out", tmp_path / "out")
    assert "verl counted 3.0 % of the tokens of console as clipped." in text and "+clipx=observe" in text
    assert (tmp_path / "out" / "figures" / "fractions_0.svg").exists()
    clipx("diagnose", tmp_path / "board")


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


@pytest.mark.parametrize(
    ("metric", "values", "found"),
    [
        ("critic/score/mean", [0.5] * 9 + [0.0] * 9, "mine: reward collapse from step 10 on"),
        ("response_length/mean", [100.0] * 9 + [900.0] * 9, "response_length/mean 100 → 900"),
    ],
)
def test_of_a_panel_with_one_metric_is_said_what_is_there(tmp_path, metric, values, found):
    rows = "".join(f'"{step}","{value}","{value}","{value}"\n' for step, value in enumerate(values, 1))
    (tmp_path / "mine.csv").write_text(PANEL.format(metric, "", "").split("\n")[0] + "\n" + rows)
    assert found in clipx("diagnose", tmp_path / "mine.csv")
    clipx("report", tmp_path / "mine.csv", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "header", [",_step", "Unnamed: 0,_step", "Unnamed: 0.1,_step", "index,_step", "Step,_step", "level_0,_step"]
)
def test_a_table_s_own_count_is_no_metric(tmp_path, header):
    """As `to_csv()` writes it before the first column; half-way it jumps, where two tables were put together."""
    rows = [f"{number + 900 * (number >= 30)},{number + 1},0.5,{0.3 + 0.01 * (number % 5)}" for number in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join([f"{header},actor/entropy,critic/score/mean", *rows]))
    if header.startswith("Step"):
        assert [*read_run(tmp_path / "mine.csv").log.index[-2:]] == [958, 959]
    assert {*read_run(tmp_path / "mine.csv").log} == {"actor/entropy", "critic/score/mean"}
    assert "no logged value jumped" in clipx("diagnose", tmp_path / "mine.csv")


def test_a_cell_of_any_length_is_read_over(tmp_path):
    (tmp_path / "mine.csv").write_text(HISTORY.replace(",a\n", f",{'x' * 200_000}\n"))
    assert read_run(tmp_path / "mine.csv").values("actor/entropy").to_dict() == {1: 0.5}


def test_a_number_that_cannot_be_read_is_said(tmp_path):
    text = 'Step,a - actor/entropy,a - response_length/mean,a - note\n1,0.5,"1,234.5",x\n'
    (tmp_path / "mine.csv").write_text(text)
    assert "mine.csv: response_length/mean is '1,234.5', which is not a number; ignored." in clipx(
        "diagnose", tmp_path / "mine.csv"
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train", CONSOLE.encode()),
        ("slurm-17.err", CONSOLE.encode()),
        ("run.log.1", CONSOLE.encode()),
        *((name, JSON_LINES.encode("utf-8-sig")) for name in ("a.jsonl", "a.log", "a")),
        # As PowerShell writes what it redirects, with a mark and without.
        *(
            (name, text.encode(encoding))
            for name, text in (("a.jsonl", JSON_LINES), ("train.log", JSON_LINES), ("train.log", CONSOLE))
            for encoding in ("utf-16", "utf-16-le", "utf-16-be")
        ),
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
    lines = (["Step", "mine - actor/entropy"], ["1", half], ["2", ""])
    (tmp_path / "mine.csv").write_text("\n".join(map(separator.join, lines)), encoding=encoding)
    assert read_run(tmp_path / "mine.csv").values("actor/entropy").to_dict() == {1: 0.5}


def stand_in():
    """Of wandb 0.31 what is called: Api().run(path), that run's name, config and scan_history(), and Error."""
    history = [{"_step": 1, "_runtime": 3.0, "actor/entropy": 0.5, "table": {"path": "x"}}]
    history += [{"_step": 2, "actor/entropy": "NaN"}, {"_step": 2, "critic/score/mean": 1}]
    config = {"data": {"seed": 7}, "actor_rollout_ref": {"rollout": {"top_p": 0.9}}, "hf_token": "hf_x"}
    runs = {"team/project/a1b2": SimpleNamespace(name="long", config=config, scan_history=lambda: iter(history))}
    return SimpleNamespace(Api=lambda: SimpleNamespace(run=runs.__getitem__), Error=KeyError)


def test_a_run_at_wandb_is_read_by_its_api(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", stand_in())
    name = "wandb://team/project/a1b2"
    run = read_run(Path(name))
    assert (run.name, run.seed) == ("long", 7) and "hf_x" not in str(run.configuration)
    assert run.values("actor/entropy").to_dict() == {1: 0.5} and run.not_finite == {"actor/entropy": [2]}
    assert run.values("critic/score/mean").to_dict() == {2: 1.0} and len(run.log.columns) == 2
    assert "long: truncated sampling from step 1 on" in clipx("diagnose", name)
    clipx("report", name, "--out", tmp_path / "out")
    assert "--follow watches files" in clipx("report", name, "--follow", "--out", tmp_path / "out", code=1)
    assert "wandb://team/project/x: 'team/project/x'" in clipx("diagnose", "wandb://team/project/x", code=1)
    assert "wandb://a1b2: write it as wandb://entity/project/run" in clipx("diagnose", "wandb://a1b2", code=1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "clipx diagnose needs wandb, which comes with verl: pip install wandb" in clipx("diagnose", name, code=1)


TWO_RUNS = "2 runs (a, b). Name one as wandb://entity/project/run, with the run's ID, or export each by itself."
NOT_OF_VERL = "a.csv: no metric begins with actor/, critic/, response_length/"
NOISE = gzip.compress(b"\x00\x80" * 99, mtime=0)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ({"a.log": b"no steps\n"}, "a.log: no line `step:1 - …`"),
        ({"a.csv": b"Run,actor/entropy\nmine,1\n"}, "a.csv: no column Step or _step"),
        # Tables of runs, as W&B's page and its API export them, with steps and without.
        *(
            (
                {"a.csv": text},
                "a.csv: this is W&B's table of runs, which has one row for each run",
            )
            for text in (
                b"Name,actor/entropy\nmine,1\n",
                b"Name,State,User,Runtime,_step,actor/entropy\nmine,finished,me,9,20,0.5\nother,failed,me,8,30,0.4\n",
                b"Name,training/global_step,actor/entropy\nmine,20,0.5\n",
                b"State,Created,_step,actor/entropy\nfinished,2026-11-01,20,0.5\n",
                b",name,id,_step,actor/entropy\n0,mine,a1,20,0.5\n1,other,b2,30,0.4\n",
            )
        ),
        ({"a.csv": b"Step,a - train/reward\n1,1\n"}, NOT_OF_VERL),
        ({"a.csv": b"Step,train/loss\n1,1\n"}, NOT_OF_VERL),
        *(
            ({"a.csv": b'Step,a - actor/entropy\n"%s",1\n' % step.encode()}, f"a.csv: '{step}' is not a training step")
            for step in ("1e300", "1.5", "1,000")
        ),
        *(({name: NOISE}, f"{name}: a gzip file, but not a kept run") for name in ("a.log", "a.csv")),
        *(
            ({name: content}, f"{name}: a gzip file that cannot be unpacked")
            for name, content in {
                "metrics.jsonl": gzip.compress(b'{"step": 1}', mtime=0)[:-9],
                "a.tar.gz": b"\x1f\x8b\x00",
            }.items()
        ),
        # Panels of two runs, histories of two, and two runs in one file.
        ({"a.csv": b"Step,a - actor/entropy,b - actor/entropy\n1,1,1\n"}, f"a.csv: {TWO_RUNS}"),
        (
            {"a.csv": b"Step,a - actor/entropy\n1,0.5\n", "b.csv": b"Step,b - critic/score/mean\n1,0.5\n"},
            "b.csv: 2 runs (a, b)",
        ),
        (
            {"a.csv": b"_step,actor/entropy\n1,0.5\n", "b.csv": b"_step,actor/entropy\n1,0.7\n"},
            "several runs. Name one as wandb://entity/project/run",
        ),
        (
            {"a.csv": b"Step,a - actor/entropy\n1,0.5\n2,0.5\n1,0.7\n"},
            "a.csv, step 1: there is a second value of actor/entropy",
        ),
    ],
)
def test_what_holds_no_run_or_two_is_an_error(tmp_path, contents, said):
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    text = clipx("diagnose", tmp_path / name if len(contents) == 1 else tmp_path, code=1)
    assert said in text and "\\x" not in text and "\ufffd" not in text and "\x00" not in text


@pytest.mark.parametrize("packed", [True, False])
def test_a_kept_run_is_read_with_its_header(tmp_path, packed):
    kept = KEPT / "faults/top_p-seed31.jsonl.gz"
    if not packed:
        (tmp_path / "top_p-seed31.jsonl").write_bytes(gzip.decompress(kept.read_bytes()))
        kept = tmp_path / "top_p-seed31.jsonl"
    run = read_run(kept)
    assert (run.name, run.seed, run.method, run.versions["verl"]) == ("top_p-seed31", 31, "top_p", "0.9.1")
    assert min(run.log.index) == 1 and "seconds" not in run.log
    # By the header's configuration.
    assert "truncated sampling from step 1 on" in clipx("diagnose", kept)


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


def test_two_runs_of_tensorboard_are_named_and_without_it_its_name_is_said(tmp_path, monkeypatch):
    for name in ("one", "deep/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "events.out.tfevents.1").write_bytes(b"")
    assert "2 runs (deep/two, one)" in clipx("report", tmp_path, "--out", tmp_path / "out", code=1)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard.backend", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    text = clipx("report", tmp_path / "one", "--out", tmp_path / "out", code=1)
    assert "clipx report needs tensorboard, which comes with verl: pip install tensorboard" in text


def of_plugin(step, rows, **data):
    """A line of the plugin's log, with fingerprints of its rollout batch; `rows` is the hash that tells it apart."""
    hashes = {"prompts": "1", "responses": "2", "rows": rows}
    counts = {"groups": 2, "sequences": 4, "tokens": 40, "distinct": 4}
    return json.dumps({"step": step, "data": {"actor/entropy": 1.0, **data}, "batch": hashes | counts}) + "\n"


KEPT_HEADER = json.dumps({"commit": "c" * 40, "seed": 1}) + "\n"


@pytest.mark.parametrize("packed", [False, True])
def test_the_batches_of_a_kept_run_are_read_with_its_rows(tmp_path, packed):
    text = KEPT_HEADER + of_plugin(1, "a") + of_plugin(2, "b")
    path = tmp_path / ("grpo-seed1.jsonl.gz" if packed else "grpo-seed1.jsonl")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    run = read_run(path)
    assert {step: batch["rows"] for step, batch in run.batches.items()} == {1: "a", 2: "b"}
    assert list(run.log.index) == [1, 2] and run.seed == 1


@pytest.mark.filterwarnings("ignore:.*count, from step")
def test_the_batches_of_a_log_are_of_the_run_that_counts(log):
    again = log(of_plugin(1, "a") + of_plugin(2, "a") + of_plugin(1, "b"))
    assert {step: batch["rows"] for step, batch in read_run(again).batches.items()} == {1: "b"}
    resumed = log(of_plugin(1, "a") + of_plugin(2, "b") + of_plugin(3, "c") + of_plugin(2, "d"))
    assert {step: batch["rows"] for step, batch in read_run(resumed).batches.items()} == {1: "a", 2: "d"}


def test_a_log_is_parsed_once(log, monkeypatch):
    parsed = []
    whole = run_log.parse_json
    monkeypatch.setattr(run_log, "parse_json", lambda text, where: parsed.append(text) or whole(text, where))
    read_run(log("".join(of_plugin(step, "a") for step in (1, 2, 3))))
    # The first line is looked at for the header of a kept run.
    assert len(parsed) == 4
