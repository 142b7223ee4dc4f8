"""docs/dev/architecture.md against the source: its picture, names and tables, that no arrow runs up, and the
packages that the mathematics imports. Not covered: that sentences and visits are in the order of a call.
"""

import re
import runpy
import sys
from importlib import import_module

import grimp
import pytest

from .documents import ROOT

PAGE = (ROOT / "docs" / "dev" / "architecture.md").read_text()
DRAWING = runpy.run_path(str(ROOT / "scripts" / "draw_architecture.py"))
FOLDERS = sorted({path.parent for path in (ROOT / "verl_clipx").rglob("*.py")})
ROOMS = [room for floor in DRAWING["floors"]() for room in floor]


def section(title: str) -> str:
    return PAGE.split(f"## {title}")[1].split("\n## ")[0]


def rows(title: str) -> list[str]:
    """The first cells of a section's table."""
    return [line.split("|")[1] for line in section(title).splitlines() if line.startswith("| `")]


def resolved(name: str):
    """What a name such as worker.step.micro_batch_of stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            meant = import_module(".".join(["verl_clipx", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            meant = getattr(meant, part)
        return meant


def test_the_picture_is_drawn_from_todays_imports():
    again = "python scripts/draw_architecture.py"
    assert DRAWING["PICTURE"].read_text() == DRAWING["picture"](), f"the imports have changed: {again}"
    # An arrow that others imply is left out.
    assert DRAWING["needed"]({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [("a", "b"), ("b", "c")]


def test_no_arrow_runs_up_and_there_are_few_rooms():
    floor_of = {room: floor for floor, rooms in enumerate(DRAWING["floors"]()) for room in rooms}
    assert {path.stem for path in (ROOT / "verl_clipx").iterdir() if path.name[0] not in "_."} == set(ROOMS)
    assert len(ROOMS) <= 20
    rooms, _ = DRAWING["imports"]()
    assert [(room, below) for room in rooms for below in rooms[room] if floor_of[below] <= floor_of[room]] == []


def packages_imported_by(room: str) -> set[str]:
    """The packages outside the standard library that a room's files import, this one left out."""
    graph = grimp.build_graph("verl_clipx", include_external_packages=True)
    modules = {room, *graph.find_descendants(room)}
    imported = {name.split(".")[0] for module in modules for name in graph.find_modules_directly_imported_by(module)}
    return imported - sys.stdlib_module_names - {"verl_clipx"}


@pytest.mark.parametrize("room", ["losses.base", "losses.methods", "losses.modifiers", "losses.applying"])
def test_the_mathematics_imports_torch_and_no_other_package(room):
    assert packages_imported_by(f"verl_clipx.{room}") == {"torch"}


def test_the_statistics_import_no_package_but_those_of_arrays():
    assert packages_imported_by("verl_clipx.common.statistics") == {"numpy", "scipy"}


def test_the_journey_is_a_dozen_sentences_of_functions_that_exist_and_the_table_has_every_folder():
    journey = section("The journey of one micro-batch")
    assert [line.split(".")[0] for line in journey.splitlines() if line[:1].isdigit()] == [str(n) for n in range(1, 13)]
    named = [span for span in journey.split("`")[1::2] if span.split(".")[0] in ROOMS and "." in span]
    assert named and [name for name in named if not callable(resolved(name))] == []
    folders = {room for room in ROOMS if (ROOT / "verl_clipx" / room).is_dir()}
    assert {folder for cell in rows("What each folder may know") for folder in cell.split("`")[1::2]} == folders


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
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
