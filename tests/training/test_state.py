"""The state's file: exact, atomic, and clear about every way in which it can be unusable.

Covers: round trip, a crash while writing, missing, truncated and foreign files; files of format 1, which an earlier
version wrote. Not covered: ranks and resuming (tests/end_to_end/test_resume.py).
"""

import json
import os
from pathlib import Path

import pytest
import torch

from verl_clipx.methods import METHODS
from verl_clipx.training.state import FILE, ControllerState, UnusableState, description, read_state, write_state

OWNER = description(METHODS["acpo"]())
FIXTURES = Path(__file__).parent / "fixtures"


def a_state():
    vector = torch.rand(15, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e7
    return ControllerState(7, {"update_0": vector, "low/update_1": -vector / 3})


def test_every_bit_survives(tmp_path):
    state = a_state()
    write_state(tmp_path / "actor", state, OWNER)
    back = read_state(tmp_path / "actor", OWNER)
    assert back.step == 7 and back.statistics.keys() == state.statistics.keys()
    for position, vector in state.statistics.items():
        assert torch.equal(back.statistics[position], vector)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    write_state(tmp_path, a_state(), OWNER)
    before = (tmp_path / FILE).read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_state(tmp_path, ControllerState(8), OWNER)
    assert (tmp_path / FILE).read_bytes() == before
    assert read_state(tmp_path, OWNER).step == 7


def changed(tmp_path, **changes):
    path = write_state(tmp_path, a_state(), OWNER)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, "does not exist: the checkpoint was not written by a run of this plugin"),
        (lambda folder: (folder / FILE).write_text('{"format": 1, "belongs'), "cut short or not a state"),
        (lambda folder: (folder / FILE).write_text(""), "cut short or not a state"),
        (lambda folder: (folder / FILE).write_text("[1, 2]"), "cut short or not a state"),
        (lambda folder: (folder / FILE).write_text('{"step": 3}'), "cut short or not a state"),
        (lambda folder: changed(folder, format=99), "has format 99, this version reads 1 and 2"),
        (lambda folder: changed(folder, belongs_to="somebody"), "belongs to other parameters"),
        (lambda folder: changed(folder, statistics={"update_0": "x"}), "cut short or not a state"),
    ],
)
def test_an_unusable_file_says_why(tmp_path, spoil, message):
    spoil(tmp_path)
    with pytest.raises(UnusableState, match=message) as raised:
        read_state(tmp_path, OWNER)
    assert FILE in str(raised.value)


def test_other_parameters_are_named(tmp_path):
    write_state(tmp_path, a_state(), OWNER)
    with pytest.raises(UnusableState, match=r"bins: 5 then, 10 now"):
        read_state(tmp_path, description(METHODS["acpo"](bins=10)))


@pytest.mark.parametrize(("method", "key", "value"), [("acpo", "alpha", 0.5), ("bapo", "target", 0.49)])
def test_a_state_of_format_1_is_read_and_leads_to_the_bounds_of_its_time(method, key, value):
    folder, built = FIXTURES / f"{method}_format_1", METHODS[method](**{key: value})
    state, decisions = read_state(folder, description(built)), json.loads((folder / "decisions.json").read_text())
    assert state.step == 12 and state.statistics.keys() == decisions.keys()
    for position, vector in state.statistics.items():
        assert built.decide(vector).tolist() == pytest.approx(decisions[position], rel=1e-12)
    with pytest.raises(UnusableState, match=rf"belongs to other parameters \({key}: {value} then, [0-9.]+ now"):
        read_state(folder, description(METHODS[method]()))
