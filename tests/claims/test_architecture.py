"""docs/dev/architecture.md against the source.

Covers: the picture is that of today's imports, no arrow in it runs up and none is missing; every function that the
journey and the list of visits name exists; the visits are as many as the budget allows; every folder stands in the
table. Not covered: that sentences and visits are in the order of a call.
"""

import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

from .documents import ROOT

PAGE = (ROOT / "docs" / "dev" / "architecture.md").read_text()
DRAWING = runpy.run_path(str(ROOT / "scripts" / "draw_architecture.py"))
FOLDERS = sorted({path.parent for path in (ROOT / "verl_clipx").rglob("*.py")})
ROOMS = [room for floor in DRAWING["floors"]() for room in floor]


def named(text: str) -> list[str]:
    """The code spans of a text that begin with a room's name and a full stop."""
    return [span for span in text.split("`")[1::2] if span.split(".")[0] in ROOMS and "." in span]


def resolved(name: str):
    """What a name such as worker.step.micro_batch_of stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(["verl_clipx", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found


def test_the_picture_is_drawn_from_todays_imports():
    again = "python scripts/draw_architecture.py"
    assert DRAWING["PICTURE"].read_text() == DRAWING["picture"](), f"the imports have changed: {again}"


def test_no_arrow_runs_up_and_there_are_few_rooms():
    floor_of = {room: floor for floor, rooms in enumerate(DRAWING["floors"]()) for room in rooms}
    package = ROOT / "verl_clipx"
    assert {path.stem for path in package.iterdir() if path.name[0] not in "_."} == set(ROOMS)
    assert len(ROOMS) <= 20
    rooms, _ = DRAWING["imports"]()
    assert [(room, below) for room in rooms for below in rooms[room] if floor_of[below] <= floor_of[room]] == []


def test_an_arrow_that_others_imply_is_left_out():
    needed = DRAWING["needed"]
    assert needed({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [("a", "b"), ("b", "c")]


@pytest.mark.parametrize("name", named(PAGE.split("## The journey of one micro-batch")[1].split("\n## ")[0]))
def test_what_the_journey_names_exists(name):
    assert callable(resolved(name))


def test_the_journey_is_a_dozen_sentences_and_the_table_has_every_folder():
    journey = PAGE.split("## The journey of one micro-batch")[1].split("\n## ")[0]
    assert [line.split(".")[0] for line in journey.splitlines() if line[:1].isdigit()] == [str(n) for n in range(1, 13)]
    table = PAGE.split("## What each folder may know")[1].split("\n## ")[0]
    folders = {room for room in ROOMS if Path(ROOT / "verl_clipx" / room).is_dir()}
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {folder for cell in cells for folder in cell.split("`")[1::2]} == folders


def test_an_updates_data_visit_few_files():
    table = PAGE.split("## How far an update's data travel")[1].split("\n## ")[0]
    visits = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = [visit.split("`")[1] for visit in visits]
    assert all(callable(resolved(f"worker.{name}")) for name in names if name != "training_worker.train_batch")
    files = [name.split(".")[0] for name in names]
    assert len({*files}) <= 8 and len(files) - len({*files}) <= 4
    assert ["(return)" in visit for visit in visits] == [file in files[:at] for at, file in enumerate(files)]


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in (ROOT / "verl_clipx").rglob("*.py")}), ids=lambda path: path.name
)
def test_a_room_has_no_circle_of_files(folder):
    dotted = ".".join(folder.relative_to(ROOT).parts)
    files = {
        path.stem: set(re.findall(rf"{re.escape(dotted)}\.(\w+)", path.read_text())) - {path.stem}
        for path in folder.glob("*.py")
    }
    while files:
        free = [name for name, imports in files.items() if not imports & files.keys()]
        assert free, f"a circle among {sorted(files)} of {dotted}"
        files = {name: imports for name, imports in files.items() if name not in free}
