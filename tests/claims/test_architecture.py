"""docs/dev/architecture.md against the source: its picture, names and tables, that no arrow runs up, nor a text that
may be imported, and the packages that the losses import. Not covered: that sentences are in the order of a call; names
that are built of parts.
"""

import ast
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


def resolve_name(name: str):
    """What a name such as worker.step.micro_batch_of stands for."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = import_module(".".join(["verl_clipx", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value


def test_the_picture_is_drawn_from_todays_imports():
    command = "python scripts/draw_architecture.py"
    assert DRAWING["PICTURE"].read_text() == DRAWING["picture"](), f"the imports have changed: {command}"
    # An arrow that others imply is left out.
    assert DRAWING["needed"]({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == [("a", "b"), ("b", "c")]


def test_no_arrow_runs_up_and_the_picture_has_every_room():
    floor_of = {room: floor for floor, rooms in enumerate(DRAWING["floors"]()) for room in rooms}
    assert {path.stem for path in (ROOT / "verl_clipx").iterdir() if path.name[0] not in "_."} == set(ROOMS)
    rooms, _ = DRAWING["imports"]()
    assert [(room, below) for room in rooms for below in rooms[room] if floor_of[below] <= floor_of[room]] == []


def packages_imported_by(room: str) -> dict[str, set[str]]:
    """From each package outside the standard library, but this one, to the modules of a room that import it."""
    graph = grimp.build_graph("verl_clipx", include_external_packages=True)
    importers = {}
    for module in {room, *graph.find_descendants(room)}:
        for imported in graph.find_modules_directly_imported_by(module):
            package = imported.split(".")[0]
            if package not in sys.stdlib_module_names and package != "verl_clipx":
                importers.setdefault(package, set()).add(module)
    return importers


def test_the_losses_import_torch_and_the_reader_of_groups_omegaconf():
    packages = packages_imported_by("verl_clipx.losses")
    assert packages.keys() == {"torch", "omegaconf"}
    assert packages["omegaconf"] == {"verl_clipx.losses.groups"}


def test_the_statistics_import_no_package_but_those_of_arrays():
    assert packages_imported_by("verl_clipx.common.statistics").keys() == {"numpy", "scipy"}


def test_the_journey_is_a_dozen_sentences_of_functions_that_exist_and_the_table_has_every_folder():
    journey = section("The journey of one micro-batch")
    assert [line.split(".")[0] for line in journey.splitlines() if line[:1].isdigit()] == [str(n) for n in range(1, 13)]
    names = [span for span in journey.split("`")[1::2] if span.split(".")[0] in ROOMS and "." in span]
    assert names and [name for name in names if not callable(resolve_name(name))] == []
    folders = {room for room in ROOMS if (ROOT / "verl_clipx" / room).is_dir()}
    assert {folder for cell in rows("What each folder may know") for folder in cell.split("`")[1::2]} == folders


# It looks whether the plugin was imported, and imports nothing.
NAMED_FROM_BELOW = {("verl_clipx.run.without_plugin", "verl_clipx.plugin")}


def ordered_modules() -> list[dict[str, int]]:
    """For each contract of layers, from a module to the number of its layer, counted from the top."""
    orders = []
    for contract in DRAWING["contracts"]():
        (container,) = contract.get("containers", ["verl_clipx"])
        layers = enumerate(DRAWING["names_in"](contract["layers"]))
        orders.append({f"{container}.{name}": number for number, names in layers for name in names})
    return orders


def modules_named_in(source: str) -> list[str]:
    """The names of modules in the texts of a file, but not in its docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return [name for text in texts if isinstance(text, str) for name in re.findall(r"verl_clipx(?:\.\w+)+", text)]


def named_from_below(module: str, source: str) -> set[tuple[str, str]]:
    """A module with each module above or beside it that its texts name, and may import."""
    wrong = set()
    for order in ordered_modules():
        own_layer = layered_module(order, module)
        for name in modules_named_in(source):
            named_layer = layered_module(order, name)
            if own_layer is None or named_layer is None or own_layer == named_layer:
                continue
            if order[named_layer] <= order[own_layer]:
                wrong.add((module, named_layer))
    return wrong


def layered_module(order: dict[str, int], name: str) -> str | None:
    """The module of a contract's layers that a module is or is in; None if it is in none."""
    for module in order:
        if f"{name}.".startswith(f"{module}."):
            return module
    return None


def test_a_module_that_a_text_names_is_below_as_if_it_were_imported():
    sources = {path: path.read_text() for path in (ROOT / "verl_clipx").rglob("*.py")}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): source for path, source in sources.items()}
    wrong = set().union(*(named_from_below(module, source) for module, source in modules.items()))
    assert wrong == NAMED_FROM_BELOW
    public = re.findall(r'"verl_clipx\.(\w+)', modules["verl_clipx.__init__"])
    assert {*public} == {"losses"}


@pytest.mark.parametrize(
    ("module", "named", "wrong"),
    [
        ("analysis.runs.run", "training.worker.step", "training"),
        ("analysis.runs.run", "analysis.report.page", "analysis.report"),
        ("training.worker.step", "training.trainer.log", "training.trainer"),
        ("losses.clip_loss", "common.files", "common"),
        ("training.doctor", "training.worker.step", None),
        ("analysis.report.page", "run.keys", None),
    ],
)
def test_a_text_that_names_a_module_above_is_found(module, named, wrong):
    source = f'"""Of verl_clipx.papers."""\nfrom importlib import import_module\nimport_module("verl_clipx.{named}")\n'
    expected = set() if wrong is None else {(f"verl_clipx.{module}", f"verl_clipx.{wrong}")}
    assert named_from_below(f"verl_clipx.{module}", source) == expected


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_room_has_no_circle_of_files(folder):
    dotted = ".".join(folder.relative_to(ROOT).parts)
    files = {
        path.stem: set(re.findall(rf"{re.escape(dotted)}\.(\w+)", path.read_text())) - {path.stem}
        for path in folder.glob("*.py")
    }
    while files:
        without_imports = [name for name, imports in files.items() if not imports & files.keys()]
        assert without_imports, f"a circle among {sorted(files)} of {dotted}"
        files = {name: imports for name, imports in files.items() if name not in without_imports}
