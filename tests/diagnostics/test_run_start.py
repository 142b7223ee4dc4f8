"""What stays of a log when verl opens it again, and what is written beside it.

Covers: verl's own `Tracking` in a process with the plugin: a resumed run, a fresh one in the same folder, a resume from
a path; the record; TensorBoard's layout. Not covered: a run of verl's trainer (tests/end_to_end/test_resume.py).
"""

import json
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from verl.utils.tracking import Tracking

from tests.diagnostics.runs import write_run
from verl_clipx.diagnostics.run_log import read_run_log
from verl_clipx.run_files import record_path


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


def saved(tmp_path, step):
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_resumed_run_keeps_the_steps_that_it_goes_on_from(start, tmp_path):
    start(1, range(1, 8))
    saved(tmp_path, 5)
    assert start(2, [6, 7, 8]) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2}
    saved(tmp_path, 8)
    assert list(start(3, [9])) == [*range(1, 10)]


def test_a_line_that_was_cut_off_is_not_kept(start, tmp_path):
    start(1, [1, 2])
    saved(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":3,"da')
    assert start(2, [3]) == {1: 1, 2: 1, 3: 2}


def test_a_fresh_run_in_the_same_folder_keeps_nothing(start, tmp_path):
    start(1, [1, 2, 3])
    assert start(2, [1]) == {1: 2}
    saved(tmp_path, 1)
    assert start(3, [1, 2], resume_mode="disable") == {1: 3, 2: 3}


def test_a_resume_from_a_path_keeps_the_steps_up_to_it(start):
    start(1, [1, 2, 3])
    assert start(2, [3], resume_mode="resume_path", resume_from_path="/runs/global_step_2") == {1: 1, 2: 1, 3: 2}


def test_the_record_has_configuration_and_versions_and_no_credentials(start, tmp_path):
    start(1, [1])
    record = json.loads(record_path(tmp_path / "metrics.jsonl").read_text())
    assert record["configuration"]["clipx"] == {"method": "acpo"}
    assert record["versions"]["verl"].startswith("0.9.")
    assert "secret" not in json.dumps(record)


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


def test_a_run_without_the_file_log_is_verl_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Tracking("project", "run", "console", config={"trainer": {}})
    assert list(tmp_path.iterdir()) == []
