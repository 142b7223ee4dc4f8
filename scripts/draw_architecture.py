"""Draws docs/figures/architecture.svg: the wings of verl_clipx, the rooms inside them, and the imports between wings.

python scripts/draw_architecture.py

Wings and rooms are those of import-linter's contracts in pyproject.toml, the arrows are read from the source.
"""

import ast
import textwrap
from html import escape
from pathlib import Path

import grimp
from importlinter import api
from jinja2 import Environment

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "figures" / "architecture.svg"
PICTURE_TEMPLATE = Path(__file__).with_name("architecture.svg.jinja")
PACKAGE = "verl_clipx"

MARGIN, GAP = 20, 12
ROOM_WIDTH, ROOM_HEIGHT = 158, 112
# Above a wing's rooms stand its name and what it is.
TITLE_HEIGHT = 54
FLOOR_GAP = 26
# Arrows that pass a wing run beside the wings, each in a lane of its own.
LANE = 16
CAPTION_CHARACTERS, CAPTION_LINES = 23, 6


def contracts() -> list[dict]:
    """Returns import-linter's contracts that order what they name."""
    listed = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    return [contract for contract in listed if contract["type"] == "layers"]


def names_in(layers: list[str]) -> list[list[str]]:
    """Returns the names on each layer of a contract, from the top, without the package's."""
    return [[name.strip().removeprefix(f"{PACKAGE}.") for name in layer.split("|")] for layer in layers]


def floors() -> list[list[str]]:
    """Returns the wings on each floor, from the top."""
    (whole,) = (contract for contract in contracts() if "containers" not in contract)
    return names_in(whole["layers"])


def inside(wing: str) -> list[str]:
    """Returns what a wing's own contract orders, such as losses.base: what imports before what is imported."""
    own = [contract for contract in contracts() if contract.get("containers") == [f"{PACKAGE}.{wing}"]]
    return [f"{wing}.{name}" for contract in own for layer in names_in(contract["layers"]) for name in layer]


def source_of(place: str) -> Path:
    """Returns the folder or file of a wing or room."""
    folder = ROOT.joinpath(PACKAGE, *place.split("."))
    return folder if folder.is_dir() else folder.with_suffix(".py")


def rooms_of(wing: str) -> list[str]:
    """Returns the folders among what is inside a wing."""
    return [name for name in inside(wing) if source_of(name).is_dir()]


def files_of(wing: str) -> str:
    """Returns the names of the files among what is inside a wing, in a line; empty if there are none."""
    files = [source_of(name).name for name in inside(wing) if source_of(name).is_file()]
    return f"Besides, from the top: {', '.join(files)}." if files else ""


def imports() -> tuple[dict[str, set[str]], set[str]]:
    """Returns which wings each wing imports, and which wings and rooms import verl."""
    graph = grimp.build_graph(PACKAGE, include_external_packages=True)
    wings = {wing: set() for floor in floors() for wing in floor}
    with_verl = set()
    for place in [*wings, *(room for wing in wings for room in rooms_of(wing))]:
        modules = {f"{PACKAGE}.{place}", *graph.find_descendants(f"{PACKAGE}.{place}")}
        for imported in {name for module in modules for name in graph.find_modules_directly_imported_by(module)}:
            package, *rest = imported.split(".")
            if package == "verl":
                with_verl.add(place)
            elif place in wings and package == PACKAGE and rest and rest[0] != place:
                wings[place].add(rest[0])
    return wings, with_verl


def needed(wings: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the arrows that no other way of arrows already implies."""

    def reached(start: str) -> set[str]:
        return wings[start].union(*(reached(wing) for wing in wings[start]))

    return [
        (wing, imported)
        for wing, all_imported in wings.items()
        for imported in sorted(all_imported)
        if not any(imported in reached(other) for other in all_imported - {imported})
    ]


def caption(place: str) -> str:
    """Returns the first sentence of the docstring of a wing or room."""
    source = source_of(place)
    if source.is_dir():
        source = source / "__init__.py"
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    sentence = docstring.replace("\n", " ").split(". ")[0].split("  ")[0].rstrip(".").replace("`", "")
    if not sentence:
        raise ValueError(f"{source} has no docstring, from which the picture takes its words.")
    return sentence


def caption_lines(room: str) -> list[str]:
    """Returns a room's caption in lines that fit its box."""
    lines = textwrap.wrap(caption(room), CAPTION_CHARACTERS)
    if len(lines) > CAPTION_LINES:
        raise ValueError(f"The first sentence of {room}'s docstring must fill {CAPTION_LINES} lines at most.")
    return lines


def boxes() -> dict[str, dict]:
    """Returns left, top, width and height of each wing, and the left edge of each of its rooms."""
    order = [wing for floor in floors() for wing in floor]
    width = max(len(rooms_of(wing)) for wing in order) * (ROOM_WIDTH + GAP) + GAP
    placed, top = {}, MARGIN
    for wing in order:
        rooms = {room: MARGIN + GAP + number * (ROOM_WIDTH + GAP) for number, room in enumerate(rooms_of(wing))}
        height = TITLE_HEIGHT + (ROOM_HEIGHT + GAP if rooms else 0)
        placed[wing] = {"left": MARGIN, "top": top, "width": width, "height": height, "rooms": rooms}
        top += height + FLOOR_GAP
    return placed


def ways(arrows: list[tuple[str, str]], placed: dict[str, dict]) -> list[str]:
    """Returns the path of each arrow: straight down to the next wing, or past the wings between in a lane."""
    order = list(placed)
    paths, lanes = [], 0
    for wing, imported in arrows:
        above, below = placed[wing], placed[imported]
        right = above["left"] + above["width"]
        if order.index(imported) == order.index(wing) + 1:
            middle = above["left"] + above["width"] // 2
            paths.append(f"M{middle} {above['top'] + above['height']}V{below['top']}")
            continue
        lanes += 1
        lane = right + lanes * LANE
        # Where two arrows meet the same wing they must not meet each other.
        start, end = above["top"] + 25, below["top"] + 12 + 6 * lanes
        paths.append(f"M{right} {start}H{lane}V{end}H{right}")
    return paths


def picture() -> str:
    """Returns the drawing as SVG: the same text for the same imports."""
    wings, with_verl = imports()
    placed, arrows = boxes(), needed(wings)
    last = list(placed.values())[-1]
    passing = sum(list(placed).index(below) > list(placed).index(above) + 1 for above, below in arrows)
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template.filters["caption"] = lambda wing: escape(caption(wing))
    template.filters["files"] = files_of
    template.filters["lines"] = lambda room: map(escape, caption_lines(room))
    return template.from_string(PICTURE_TEMPLATE.read_text()).render(
        placed=placed,
        with_verl=with_verl,
        ways=ways(arrows, placed),
        width=last["width"] + 2 * MARGIN + passing * LANE,
        height=last["top"] + last["height"] + 46,
        margin=MARGIN,
        title_height=TITLE_HEIGHT,
        room_width=ROOM_WIDTH,
        room_height=ROOM_HEIGHT,
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE.relative_to(ROOT))
