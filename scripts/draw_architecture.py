"""Draws docs/figures/architecture.svg: the folders of verl_clipx on their floors, and the imports between them.

python scripts/draw_architecture.py

The floors are those of import-linter's contract in pyproject.toml, the arrows are read from the source.
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

WIDTH, MARGIN, GAP = 1336, 20, 12
ROOM_WIDTH, ROOM_HEIGHT, FLOOR_HEIGHT = 150, 114, 156
# The rooms that stand beside the core begin here; the core is to their left, and a lane between them leads past it.
BESIDE, LANE = 356, 344
# Floors that every other one reaches, or is reached from: as wide as the picture.
WIDE = ("cli", "common")
CAPTION_CHARACTERS, CAPTION_LINES = 23, 6


def floors() -> list[list[str]]:
    """The rooms of each floor, from the top, as import-linter's contract has them."""
    contracts = api.read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[room.strip().removeprefix(f"{PACKAGE}.") for room in layer.split("|")] for layer in layers]


def imports() -> tuple[dict[str, set[str]], set[str]]:
    """Which rooms each room imports, and which rooms import verl."""
    graph = grimp.build_graph(PACKAGE, include_external_packages=True)
    rooms = {room: set() for floor in floors() for room in floor}
    with_verl = set()
    for room in rooms:
        modules = {f"{PACKAGE}.{room}", *graph.find_descendants(f"{PACKAGE}.{room}")}
        for imported in {name for module in modules for name in graph.find_modules_directly_imported_by(module)}:
            package, *rest = imported.split(".")
            if package == "verl":
                with_verl.add(room)
            elif package == PACKAGE and rest and rest[0] != room:
                rooms[room].add(rest[0])
    return rooms, with_verl


def needed(rooms: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that no other way of arrows already implies."""

    def reached(start: str) -> set[str]:
        return rooms[start].union(*(reached(room) for room in rooms[start]))

    return [
        (room, imported)
        for room, all_imported in rooms.items()
        for imported in sorted(all_imported)
        if not any(imported in reached(other) for other in all_imported - {imported})
    ]


def caption(room: str) -> list[str]:
    """The first sentence of a room's docstring, in lines."""
    path = ROOT / PACKAGE / room / "__init__.py"
    source = path if path.exists() else path.parent.with_suffix(".py")
    sentence = (ast.get_docstring(ast.parse(source.read_text())) or "").split("\n")[0].split(". ")[0].rstrip(".")
    characters = 200 if room in WIDE else CAPTION_CHARACTERS
    lines = textwrap.wrap(sentence.replace("`", ""), characters)
    if not sentence or len(lines) > CAPTION_LINES:
        raise ValueError(f"{source}: the first sentence of its docstring must fill one to {CAPTION_LINES} lines.")
    return lines


def places(levels: list[list[str]]) -> dict[str, tuple[int, int, int]]:
    """Left edge, top edge and width of each room."""
    found = {}
    for level, rooms in enumerate(levels):
        top = MARGIN + level * FLOOR_HEIGHT
        if rooms[0] in WIDE:
            found[rooms[0]] = MARGIN, top, WIDTH - 2 * MARGIN
            continue
        left = MARGIN if len(rooms) < 3 else BESIDE
        for index, room in enumerate(rooms):
            found[room] = left + index * (ROOM_WIDTH + GAP), top, ROOM_WIDTH
    return found


def ends(arrows: list[tuple[str, str]], place: dict[str, tuple[int, int, int]]) -> dict[tuple[str, str], list[float]]:
    """Where each arrow leaves and enters: along a room's edge in the order of the rooms at the other ends."""

    def middle(room: str) -> float:
        return place[room][0] + place[room][2] / 2

    found = {arrow: [0.0, 0.0] for arrow in arrows}
    for end in (0, 1):
        for room in place:
            here = sorted((arrow for arrow in arrows if arrow[end] == room), key=lambda arrow: middle(arrow[1 - end]))
            left, _, width = place[room]
            for index, arrow in enumerate(here):
                spread = left + width * (index + 1) / (len(here) + 1)
                found[arrow][end] = middle(arrow[1 - end]) if room in WIDE else spread
    return found


def way_of(room: str, imported: str, at: list[float], place: dict[str, tuple[int, int, int]]) -> str:
    """The path of an arrow; one of the core's to the bottom leads past the rooms beside the core."""
    (left, top, width), bottom = place[room], place[imported][1]
    if imported == "common" and left < BESIDE:
        middle = top + ROOM_HEIGHT // 2
        return f"M{left + width} {middle}H{LANE - 10}Q{LANE} {middle} {LANE} {middle + 10}V{bottom}"
    (start, end), top = at, top + ROOM_HEIGHT
    bend = (top + bottom) // 2
    return f"M{start:.0f} {top}C{start:.0f} {bend} {end:.0f} {bend} {end:.0f} {bottom}"


def picture() -> str:
    """The drawing as SVG: the same text for the same imports."""
    levels, (rooms, with_verl) = floors(), imports()
    place = places(levels)
    ways = [way_of(*arrow, at, place) for arrow, at in ends(needed(rooms), place).items()]
    height = MARGIN + (len(levels) - 1) * FLOOR_HEIGHT + ROOM_HEIGHT + 46
    template = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    template.filters["caption"] = lambda room: map(escape, caption(room))
    sizes = {"width": WIDTH, "height": height, "margin": MARGIN, "room_height": ROOM_HEIGHT}
    text = PICTURE_TEMPLATE.read_text()
    return template.from_string(text).render(place=place, with_verl=with_verl, ways=ways, **sizes)


if __name__ == "__main__":
    PICTURE.write_text(picture())
    print(PICTURE.relative_to(ROOT))
