"""Metrics of successive starts of a run put together. Expected values by hand."""

import importlib.util
import json

import pytest

from .shell import RECIPES

spec = importlib.util.spec_from_file_location("merge_metrics", RECIPES / "merge_metrics.py")
merge_metrics = importlib.util.module_from_spec(spec)
spec.loader.exec_module(merge_metrics)


def written(path, *entries, tail=""):
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in entries) + tail)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_later_values_of_a_step_win_and_earlier_ones_of_other_keys_stay(tmp_path):
    first = written(tmp_path / "first", (1, {"loss": 1.0}), (2, {"loss": 2.0, "lr": 0.1}), (3, {"loss": 3.0}))
    # Resumed at step 2: a validation under that step's number, and step 3 again.
    second = written(tmp_path / "second", (2, {"accuracy": 0.5}), (3, {"loss": 3.5}))
    merge_metrics.main(tmp_path / "out", [first, second])
    assert lines(tmp_path / "out") == [
        {"step": 1, "data": {"loss": 1.0}},
        {"step": 2, "data": {"loss": 2.0, "lr": 0.1, "accuracy": 0.5}},
        {"step": 3, "data": {"loss": 3.5}},
    ]


def test_an_output_may_be_one_of_the_parts(tmp_path):
    earlier = written(tmp_path / "earlier", (1, {"loss": 1.0}))
    current = written(tmp_path / "current", (2, {"loss": 2.0}))
    merge_metrics.main(earlier, [earlier, current])
    merge_metrics.main(earlier, [earlier, current])
    assert [entry["step"] for entry in lines(earlier)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "earlier"]


def test_a_line_that_a_killed_process_left_is_skipped(tmp_path):
    part = written(tmp_path / "part", (1, {"loss": 1.0}), tail='{"step": 2, "da')
    merge_metrics.main(tmp_path / "out", [part])
    assert [entry["step"] for entry in lines(tmp_path / "out")] == [1]


def test_a_broken_line_in_the_middle_is_an_error_that_says_where(tmp_path):
    part = tmp_path / "part"
    part.write_text('{"step": 1, "da\n{"step": 2, "data": {}}\n')
    with pytest.raises(ValueError, match="part, line 1"):
        merge_metrics.main(tmp_path / "out", [part])
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_from_nothing(tmp_path):
    merge_metrics.main(tmp_path / "out", [tmp_path / "missing"])
    assert not (tmp_path / "out").exists()
