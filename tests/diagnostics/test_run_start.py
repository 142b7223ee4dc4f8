"""What stays of a log when verl opens it again, and what is written beside it.

Covers: verl's own `Tracking` in a process with the plugin: a resumed run, a fresh one in the same folder, a resume from
a path; a full disk and a kill at each point of the start; the record; TensorBoard's layout. Not covered: a run of
verl's trainer (tests/end_to_end/test_resume.py), a machine that loses power.
"""

import errno
import json
import os
import re
import stat
import subprocess
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from verl.utils.tracking import Tracking

from tests.diagnostics.runs import write_run
from verl_clipx.common.run_files import record_path
from verl_clipx.diagnostics.run_log import read_run_log
from verl_clipx.diagnostics.run_start import write_record


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run of the folder: logs steps, each with the start's number."""
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(number, steps, **trainer):
        trainer = {"default_local_dir": str(tmp_path / "checkpoints"), "resume_mode": "auto"} | trainer
        config = {"trainer": trainer, "clipx": {"method": "acpo"}, "ray_kwargs": {"token": "secret"}}
        tracking = Tracking("project", "run", ["file"], config=config)
        for step in steps:
            tracking.log({"start": number}, step)
        tracking.logger["file"].finish()
        return read_run_log(log)["start"].to_dict()

    return run


@pytest.mark.parametrize(
    ("node", "written"),
    [({"clipx": {"method": "acpo"}}, True), ({"clipx": {"method": "acpo", "log": False}}, False), ({}, False)],
)
def test_without_a_file_log_a_run_of_this_plugin_writes_its_own(tmp_path, monkeypatch, node, written):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "elsewhere.jsonl"))
    folder = tmp_path / "checkpoints"

    def run(steps):
        trainer = {"logger": ["console"], "default_local_dir": str(folder), "resume_mode": "auto"}
        tracking = Tracking("project", "run", ["console"], config={"trainer": trainer, **node})
        for step in steps:
            tracking.log({"actor/entropy": 1.0}, step)
        tracking.finish()

    run([1, 2, 3])
    assert not (tmp_path / "elsewhere.jsonl").exists()
    assert (folder / "metrics.run.json").exists() == (folder / "metrics.jsonl").exists() == written
    if written:
        saved(tmp_path, 2)
        run([3])
        # As a file log: the lines that the run goes on from, and those that it makes again kept beside.
        assert list(read_run_log(folder / "metrics.jsonl").index) == [1, 2, 3]
        assert list(read_run_log(folder / "left_out" / "metrics.jsonl").index) == [1, 2, 3]


def saved(tmp_path, step):
    (tmp_path / "checkpoints" / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_resumed_run_keeps_the_steps_that_it_goes_on_from(start, tmp_path):
    start(1, range(1, 8))
    saved(tmp_path, 5)
    assert start(2, [6, 7, 8]) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2}
    saved(tmp_path, 8)
    assert list(start(3, [9])) == [*range(1, 10)]


def test_a_line_that_was_cut_off_is_not_kept_and_named(start, tmp_path, caplog):
    start(1, [1, 2])
    saved(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"da')
    assert start(2, [3]) == {1: 1, 2: 1, 3: 2}
    assert "metrics.jsonl, line 3: cut off" in caplog.text


def test_a_last_line_without_its_end_keeps_apart_from_the_next(start, tmp_path):
    start(1, [1, 2])
    saved(tmp_path, 2)
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(log.read_bytes().removesuffix(b"\n"))
    assert start(2, [3]) == {1: 1, 2: 1, 3: 2}


def test_a_fresh_run_in_the_same_folder_keeps_nothing(start, tmp_path):
    start(1, [1, 2, 3])
    assert start(2, [1]) == {1: 2}
    saved(tmp_path, 1)
    assert start(3, [1, 2], resume_mode="disable") == {1: 3, 2: 3}


def test_a_resume_from_a_path_keeps_the_steps_up_to_it(start):
    start(1, [1, 2, 3])
    assert start(2, [3], resume_mode="resume_path", resume_from_path="/runs/global_step_2") == {1: 1, 2: 1, 3: 2}


@pytest.mark.parametrize("folder", ["sft_global_step_2", "global_step_1/again"])
def test_the_step_is_that_of_the_checkpoint_and_not_of_a_folder_above(start, folder):
    """verl itself reads the number behind the path's last global_step_."""
    start(1, range(1, 51))
    path = f"/runs/{folder}/checkpoints/global_step_50"
    assert list(start(2, [51], resume_mode="resume_path", resume_from_path=path)) == [*range(1, 52)]


def test_without_the_checkpoint_that_verls_file_names_the_run_is_a_fresh_one(start, tmp_path):
    start(1, [1, 2])
    saved(tmp_path, 2)
    (tmp_path / "checkpoints" / "global_step_2").rmdir()
    assert start(2, [1]) == {1: 2}


# Opens the log again in a process for each fault: [folder, "error" or "kill", bytes that a file may have]; without a
# number it ends just before the log takes its place.
STARTS = """
import json, os, resource, signal, sys
from verl.utils.tracking import Tracking

def start(folder, fault, limit):
    os.environ["VERL_FILE_LOGGER_PATH"] = folder + "/metrics.jsonl"
    if fault == "kill":
        # Python ignores it, and a write then fails as on a full disk.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    else:
        sys.addaudithook(lambda event, _: os.kill(os.getpid(), signal.SIGKILL) if event == "os.rename" else None)
    trainer = {"default_local_dir": folder + "/checkpoints", "resume_mode": "auto"}
    Tracking("project", "run", ["file"], config={"trainer": trainer})

for fault in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        try:
            start(*fault)
        except OSError as error:
            print(error, file=sys.stderr)
            os._exit(3)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_neither_a_full_disk_nor_a_kill_takes_a_line(start, tmp_path, monkeypatch):
    start(1, range(1, 51))
    saved(tmp_path, 50)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    faults = [("error", 0), ("error", 700), ("kill", 0), ("kill", 700), ("kill", None)]
    folders = [tmp_path / f"{kind}-{limit}" for kind, limit in faults]
    for folder in folders:
        folder.mkdir()
        saved(folder, 50)
        (folder / "metrics.jsonl").write_bytes(before)
    told = json.dumps([(str(folder), *fault) for folder, fault in zip(folders, faults, strict=True)])
    done = subprocess.run([sys.executable, "-c", STARTS, told], capture_output=True, text=True, check=True)
    ends = [int(line) for line in done.stdout.splitlines() if re.fullmatch(r"-?\d+", line)]
    assert ends == [3, 3, -25, -25, -9], done.stderr
    assert [(folder / "metrics.jsonl").read_bytes() for folder in folders] == [before] * len(faults)
    assert done.stderr.count("metrics.jsonl: the steps before could not be copied") == 2

    # What a killed start leaves behind confuses the next one as little.
    for folder in folders:
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
        start(2, [51], default_local_dir=str(folder / "checkpoints"))
        log = read_run_log(folder / "metrics.jsonl")["start"].to_dict()
        assert log == dict.fromkeys(range(1, 51), 1) | {51: 2}
        assert {path.name for path in folder.iterdir()} == {"metrics.jsonl", "metrics.run.json", "checkpoints"}


class Disk:
    """In the place of a log's open file: a disk with room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        taken = min(self.room, len(content))
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= taken
        return self.file.write(bytes(content[:taken]))

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", range(0, 61, 4))
def test_a_full_disk_holds_lines_back_whole_until_there_is_room(tmp_path, monkeypatch, caplog, room):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    tracking = Tracking("project", "run", ["file"], config={"trainer": {}})
    log = tracking.logger["file"].fp
    log._file = disk = Disk(log._file, room)
    for step in (1, 2, 3):
        tracking.log({"start": 1}, step)
        # Of each step that is there the whole line is.
        assert all(map(json.loads, (tmp_path / "metrics.jsonl").read_bytes().splitlines()))
    assert caplog.text.count("a step could not be logged (No space left on device)") == 1
    disk.room = 10**6
    tracking.log({"start": 1}, 4)
    assert list(read_run_log(tmp_path / "metrics.jsonl").index) == [1, 2, 3, 4]
    assert "has room again" in caplog.text
    disk.room = 0
    tracking.log({"start": 1}, 5)
    tracking.logger["file"].finish()
    assert "lacks the last 1 lines" in caplog.text


def test_what_a_start_leaves_out_is_said_and_kept(start, tmp_path, capsys):
    start(1, range(1, 8))
    old = (tmp_path / "metrics.jsonl").read_bytes()
    validation = tmp_path / "validation"
    validation.mkdir()
    for step in (4, 6):
        (validation / f"{step}.jsonl").write_text("x")
    saved(tmp_path, 5)
    start(2, [6], validation_data_dir=str(validation))
    said = capsys.readouterr().out
    assert f"left out and kept in {tmp_path}/left_out: 2 lines of steps 6 to 7, 1 files of traces and valid" in said
    assert (tmp_path / "left_out" / "metrics.jsonl").read_bytes() == old
    assert [path.name for path in validation.iterdir()] == ["4.jsonl"]
    assert (tmp_path / "left_out" / "validation" / "6.jsonl").read_text() == "x"


def test_a_log_that_is_no_file_is_verls(tmp_path, monkeypatch):
    pipe = tmp_path / "metrics.jsonl"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(pipe))
    tracking = Tracking("project", "run", ["file"], config={"trainer": {}})
    tracking.log({"start": 1}, 1)
    tracking.logger["file"].finish()
    assert pipe.is_fifo() and os.read(reader, 100) == b'{"step":1,"data":{"start":1}}\n'
    assert list(tmp_path.iterdir()) == [pipe]
    os.close(reader)


def test_the_record_has_configuration_and_versions_and_no_credentials(start, tmp_path):
    start(1, [1])
    record = json.loads(record_path(tmp_path / "metrics.jsonl").read_text())
    assert record["configuration"]["clipx"] == {"method": "acpo"}
    assert record["versions"]["verl"].startswith("0.9.")
    assert "secret" not in json.dumps(record)


def test_only_its_owner_may_read_the_record_and_no_credential_is_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {
        "reward_model": {"reward_kwargs": {"api_key": "xyz", "urls": ["http://user:xyz@proxy:80"]}},
        "actor_rollout_ref": {"rollout": {"engine_kwargs": {"vllm": {"api_key": ["xyz"], "max_model_len": 8}}}},
    }
    log, before = tmp_path / "metrics.jsonl", os.umask(0)
    try:
        record_path(log).write_text("{}")
        for _ in range(2):
            write_record(log, given)
    finally:
        os.umask(before)
    assert stat.S_IMODE(record_path(log).stat().st_mode) == 0o600
    text = record_path(log).read_text()
    assert "xyz" not in text and json.loads(text)["configuration"]["actor_rollout_ref"]["rollout"] == {
        "engine_kwargs": {"vllm": {"api_key": "[redacted]", "max_model_len": 8}}
    }


def test_tensorboard_shows_keys_together(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    Tracking("project", "run", ["tensorboard"], config={}).logger["tensorboard"].finish()
    events = EventAccumulator(str(tmp_path / "events"), {"tensors": 0}).Reload()
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    (category,) = layout.category
    charts = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    logged = [read_run_log(write_run(tmp_path / name, name, steps=1) / "metrics.jsonl") for name in ("acpo", "bapo")]
    keys = {key for log in logged for key in log}
    shown = {title: {key for key in keys if any(re.match(tag, key) for tag in tags)} for title, tags in charts.items()}
    assert shown["clipped tokens"] == {"actor/clipx/clip_fraction_low", "actor/clipx/clip_fraction_high"}
    assert len(shown["bounds"]) == 5 + 2 and len(shown["gradient mass"]) == 5
    assert shown["contribution"] == {"actor/clipx/contribution/positive", "actor/clipx/contribution/negative"}
    assert all("actor/clipx/" in tag for tags in charts.values() for tag in tags)


def test_a_run_without_the_file_log_is_verls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Tracking("project", "run", "console", config={"trainer": {}})
    assert list(tmp_path.iterdir()) == []
