"""What stays of a log when verl's own `Tracking` opens it again, also after a full disk or a kill, and what is written
beside it: the record. Not covered: a run of verl's trainer (tests/end_to_end/test_resume.py,
test_inert.py), a machine that loses power.
"""

import hashlib
import json
import os
import shutil
import signal
import stat
from unittest import mock

import numpy
import pytest
from verl.utils.tracking import FileLogger, Tracking

from tests.analysis.runs.example_runs import WHOLE_UPDATE
from tests.run.test_trace_format import make_columns
from verl_clipx.analysis.runs.run_log import read_run_log
from verl_clipx.run.run_files import record_path
from verl_clipx.run.trace_format import Shard, shards_in, write_shard
from verl_clipx.training.trainer.log import write_record

NODE = {"clipx": {"method": "acpo"}}
LOG = "metrics.jsonl"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run of the folder: logs steps, each with the start's number."""
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(number, steps, node=NODE, backend="file", **trainer):
        folders = {"default_local_dir": str(tmp_path / "checkpoints"), "resume_mode": "auto", "logger": [backend]}
        config = {"trainer": folders | trainer, "ray_kwargs": {"token": "secret"}, **node}
        tracking = Tracking("project", "run", [backend], config=config)
        for step in steps:
            tracking.log({"start": number}, step)
        tracking.finish()
        return read_run_log(log)["start"].to_dict() if log.exists() else None

    return run


@pytest.mark.parametrize(
    ("node", "written"), [(NODE, True), ({"clipx": {"method": "acpo", "log": False}}, False), ({}, False)]
)
def test_without_a_file_log_a_run_of_this_plugin_writes_its_own(start, tmp_path, node, written):
    assert start(1, [1, 2, 3], node, "console") is None
    log = tmp_path / "checkpoints" / "metrics.jsonl"
    assert log.with_name("metrics.run.json").exists() == log.exists() == written
    if written:
        save_checkpoint(tmp_path, 2)
        start(2, [3], node, "console")
        # As a file log: the lines that the run goes on from.
        assert read_run_log(log)["start"].to_dict() == {1: 1, 2: 1, 3: 2}


@pytest.mark.parametrize("node", [{}, {"clipx": None}, {"clipx": {"method": "acpo", "log": False}}])
def test_the_file_log_is_verls_where_the_plugin_keeps_none(start, tmp_path, node):
    start(1, [1, 2], node)
    save_checkpoint(tmp_path, 1)
    # verl empties it.
    assert start(2, [2], node) == {2: 2}
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "checkpoints"}


def test_a_line_is_what_verls_file_logger_writes(start, tmp_path, monkeypatch):
    values = {"loss": numpy.float32(0.1), "steps": numpy.int64(3), "nan": float("nan"), "on": True}
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verls.jsonl"))
    FileLogger("project", "run").log(values, 3)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "ours.jsonl"))
    tracking = Tracking("project", "run", ["console", "file"], config={"trainer": {"logger": ["file"]}, **NODE})
    tracking.log(values, 3)
    assert (tmp_path / "ours.jsonl").read_bytes() == (tmp_path / "verls.jsonl").read_bytes()


def save_checkpoint(tmp_path, step):
    """Makes the files by which verl finds the checkpoint of a step."""
    (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def resume_from(path):
    """The keys of verl's trainer by which a run goes on from a checkpoint."""
    return {"resume_mode": "resume_path", "resume_from_path": path}


@pytest.mark.parametrize(
    ("checkpoint", "trainer", "kept"),
    [
        (5, {}, 5),
        (7, {}, 7),
        (None, {}, 0),
        # Only verl's file is left, which names it.
        (4, {}, 0),
        (1, {"resume_mode": "disable"}, 0),
        (None, resume_from("/runs/global_step_2"), 2),
        # verl itself reads the number behind the path's last global_step_.
        (None, resume_from("/runs/sft_global_step_9/global_step_8/again/checkpoints/global_step_2"), 2),
    ],
)
def test_a_run_keeps_the_steps_that_it_goes_on_from_and_no_others(start, tmp_path, checkpoint, trainer, kept):
    start(1, range(1, 8))
    if checkpoint is not None:
        save_checkpoint(tmp_path, checkpoint)
        shutil.rmtree(tmp_path / "checkpoints/global_step_4", ignore_errors=True)
    new_steps = [kept + 1, kept + 2]
    starts = start(2, new_steps, **trainer)
    assert starts == dict.fromkeys(range(1, kept + 1), 1) | dict.fromkeys(new_steps, 2)


def test_a_line_that_was_cut_off_is_named_and_a_last_one_without_its_end_keeps_apart(start, tmp_path):
    start(1, [1, 2])
    save_checkpoint(tmp_path, 2)
    log = tmp_path / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"step":3,"da')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 3: cut off"):
        assert start(2, [3]) == {1: 1, 2: 1, 3: 2}
    log.write_bytes(whole.removesuffix(b"\n"))
    assert start(2, [3]) == {1: 1, 2: 1, 3: 2}


def test_neither_a_full_disk_nor_a_kill_takes_a_line(start, tmp_path, monkeypatch):
    start(1, [1, 2, 3])
    save_checkpoint(tmp_path, 3)
    log = tmp_path / "metrics.jsonl"
    before = log.read_bytes()
    with monkeypatch.context() as full:
        # Just before the new log takes its place.
        full.setattr(os, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            start(2, [4])
    child = os.fork()
    if not child:
        try:
            os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            start(2, [4])
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL and log.read_bytes() == before
    # What a killed start leaves behind confuses the next one as little.
    assert len(list(tmp_path.glob(".metrics.jsonl.*.partial"))) == 1
    assert start(2, [4]) == {1: 1, 2: 1, 3: 1, 4: 2}
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.run.json", "checkpoints"}


def test_traces_of_steps_that_are_made_again_go(start, tmp_path):
    start(1, range(1, 8))
    for step in (4, 6):
        write_shard(tmp_path / "traces", Shard(step, 0, 0), make_columns(4), WHOLE_UPDATE)
    save_checkpoint(tmp_path, 5)
    start(2, [6])
    assert shards_in(tmp_path / "traces") == [Shard(4, 0, 0)]
    # Another run in the same folder.
    start(3, [1], resume_mode="disable")
    assert shards_in(tmp_path / "traces") == []


def test_a_log_that_is_no_file_is_verls(tmp_path, monkeypatch):
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(pipe))
    tracking = Tracking("project", "run", ["file"], config={"trainer": {"logger": ["file"]}, **NODE})
    tracking.log({"start": 1}, 1)
    tracking.logger["file"].finish()
    assert pipe.is_fifo() and os.read(reader, 100) == b'{"step":1,"data":{"start":1}}\n'
    assert list(tmp_path.iterdir()) == [pipe]
    os.close(reader)


def test_the_record_has_configuration_and_versions_for_its_owner_alone_and_no_credentials(start, tmp_path):
    start(1, [1])
    record = json.loads(record_path(tmp_path / "metrics.jsonl").read_text())
    # With the defaults of the method, which groups leave out.
    assert record["loss"]["method"] == "acpo" and record["loss"]["parameters"]["alpha"] == 3.0
    assert {"clipx.method": "acpo", "clipx.alpha": 3.0}.items() <= record["configuration"].items()
    assert record["versions"]["verl"].startswith("0.9.") and "secret" not in json.dumps(record)
    log = tmp_path / "another.jsonl"
    umask = os.umask(0)
    try:
        record_path(log).write_text("{}")
        write_record(log, {"reward": {"urls": ["http://user:xyz@proxy:80"], "num_workers": 8}})
    finally:
        os.umask(umask)
    assert stat.S_IMODE(record_path(log).stat().st_mode) == 0o600
    text = record_path(log).read_text()
    assert "xyz" not in text and json.loads(text)["configuration"]["reward.num_workers"] == 8


def test_the_record_has_what_the_run_started_from_also_after_it_was_resumed(start, tmp_path):
    def recorded_start():
        return json.loads(record_path(tmp_path / LOG).read_text())["start"]

    checkpoint = tmp_path / "sft" / "global_step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.pt").write_bytes(b"weights")
    start(1, [3, 4], resume_mode="resume_path", resume_from_path=str(checkpoint))
    first = recorded_start()
    assert first["paths"] == [str(checkpoint)] and first["hash"]
    save_checkpoint(tmp_path, 4)
    start(2, [5])
    assert recorded_start() == first
    # From scratch.
    start(3, [1], resume_mode="disable")
    assert recorded_start() == {"paths": [], "name": None, "hash": None, "parameters": None}


def test_the_address_that_a_run_started_from_is_recorded_without_its_password(start, tmp_path):
    # verl stops at such an address, but only after it has opened the log.
    address = "s3://plantedname:plantedword@host/checkpoints/global_step_2"
    start(1, [3], resume_mode="resume_path", resume_from_path=address)
    text = record_path(tmp_path / LOG).read_text()
    assert "planted" not in text
    assert json.loads(text)["start"]["paths"] == ["s3://host/checkpoints/global_step_2"]


@pytest.mark.parametrize("record", [None, "no JSON"])
def test_a_resumed_run_whose_record_does_not_say_where_it_began_warns(start, tmp_path, caplog, capsys, record):
    start(1, [1, 2])
    assert capsys.readouterr().out.splitlines()[-1] == f"clipx: the file log is {tmp_path / 'metrics.jsonl'}"
    save_checkpoint(tmp_path, 2)
    start(2, [3])
    assert "with 2 lines of the run that goes on" in capsys.readouterr().out and not caplog.records
    path = tmp_path / "metrics.run.json"
    path.unlink()
    if record is not None:
        path.write_text(record)
    start(3, [3])
    (message,) = caplog.messages
    assert f"{path} is missing or cannot be read" in message and "started from the model" in message


@pytest.mark.parametrize("form", ["{path}", "file://{path}", "pkg://rewards_of_test.score"])
@pytest.mark.parametrize("is_below_reward", [True, False])
def test_the_record_has_the_hash_of_the_rewards_file(tmp_path, monkeypatch, form, is_below_reward):
    file = tmp_path / "rewards_of_test" / "score.py"
    file.parent.mkdir()
    file.write_text("def score(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    config = {"custom_reward_function": {"path": form.format(path=file)}}
    write_record(tmp_path / LOG, {"reward": config} if is_below_reward else config)
    recorded = json.loads(record_path(tmp_path / LOG).read_text())["reward"]["hash"]
    assert recorded == hashlib.sha256(file.read_bytes()).hexdigest()


def test_addresses_in_the_record_have_neither_user_nor_password_nor_query(tmp_path):
    address = "s3://plantedname:plantedword@host:9000/a/b.parquet?key=planted#planted"
    config = {
        "actor_rollout_ref": {"model": {"path": address, "tokenizer_path": address}},
        "data": {"train_files": [address, "/data/what?.parquet"], "val_files": address},
        "reward": {"custom_reward_function": {"path": address}},
        "trainer": {"default_local_dir": address, "resume_from_path": address},
    }
    write_record(tmp_path / LOG, config)
    text = record_path(tmp_path / LOG).read_text()
    record = json.loads(text)
    bare = "s3://host:9000/a/b.parquet"
    assert "planted" not in text
    assert record["data"]["paths"] == [bare, "/data/what?.parquet"]
    for part in ("model", "validation", "reward"):
        assert record[part]["paths"] == [bare], part
    assert record["configuration"]["trainer.resume_from_path"] == bare


def receipt_after(tmp_path, *steps):
    """The receipt in the record of a run whose worker gave these metrics, a dictionary a step."""
    tracking = Tracking("project", "run", ["console"], config={"trainer": {"default_local_dir": str(tmp_path)}, **NODE})
    for step, metrics in enumerate(steps, 1):
        tracking.log({"training/global_step": step, **metrics}, step)
    tracking.finish()
    record = record_path(tmp_path / LOG)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    content = json.loads(record.read_text())
    assert content["loss"]["method"] == "acpo" and content["versions"]["verl"]
    return content["receipt"]["difference"], content["receipt"]["failed"]


def receipt_metrics(difference, **failed):
    return {"actor/clipx/receipt": difference} | {
        f"actor/clipx/receipt_{name}": count for name, count in failed.items()
    }


def test_the_record_has_the_receipt_of_the_first_rollout_batch_of_the_last_start(tmp_path):
    first = receipt_metrics(2e-7, failed=0.0)
    later = receipt_metrics(9e-3, failed=7.0)
    assert receipt_after(tmp_path, {"critic/score/mean": 1.0}) == (None, None)
    assert receipt_after(tmp_path, {}, first, {}, later) == (2e-7, 0)
    assert receipt_after(tmp_path) == (None, None)
    assert receipt_after(tmp_path, receipt_metrics(3e-3, failed=2.0)) == (3e-3, 2)


@pytest.mark.parametrize("difference", [float("nan"), float("inf")])
def test_a_receipt_that_is_no_number_leaves_a_record_that_any_reader_of_json_reads(tmp_path, difference):
    assert receipt_after(tmp_path, receipt_metrics(difference, failed=1.0)) == (None, 1)
    text = record_path(tmp_path / LOG).read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_a_record_that_is_gone_ends_no_run(tmp_path, caplog):
    tracking = Tracking("project", "run", ["console"], config={"trainer": {"default_local_dir": str(tmp_path)}, **NODE})
    record_path(tmp_path / LOG).unlink()
    for step in (1, 2):
        tracking.log({"training/global_step": step, **receipt_metrics(2e-7)}, step)
    tracking.finish()
    assert caplog.text.count("the receipt in the run's record failed") == 1
    assert len((tmp_path / LOG).read_text().splitlines()) == 2
