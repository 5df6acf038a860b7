"""Draw the package from its imports, floor by floor, into docs/images/house.svg.

    python scripts/draw_house.py

Each wing is a floor that imports only floors below it; an arrow is an import between two rooms of one wing. The rooms
of the court are filled.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.architecture import house  # noqa: E402

FILE = ROOT / "docs" / "images" / "house.svg"
FLOORS = {
    "commands": "one file for each verb of the command line",
    "operate": "around a run: start it, plan it, check hosts, compare, measure, use its model",
    "tasks": "what trains: pre-training, fine-tuning, reinforcement learning",
    "engine": "the loop and what watches it; generation and evaluation",
    "storage": "what is read and written: text, checkpoints, Hugging Face folders",
    "compute": "one step on many devices",
    "run": "a run resolved once, equal on all ranks",
    "files": "durable writes, locks, tensor files, progress",
    "config": "what a user may write",
}
"""From the top down, with what a floor holds."""
_WIDTH, _LEFT, _ROOM, _GAP = 980, 20, 140, 18


def picture() -> str:
    """The SVG."""
    modules = house.read_package(ROOT)
    edges = {
        (module.room, modules[name].room) for module in modules.values() for name in house.imports(module, modules)
    }
    top, parts = 20, []
    for floor, meaning in FLOORS.items():
        rooms = [room for room in house.LAYERS if room.startswith(f"{floor}/")]
        levels = _levels(rooms, edges)
        height = 44 + max(len(levels), 1) * 46 if rooms else 44
        parts.append(_box(_LEFT, top, _WIDTH - 2 * _LEFT, height, "court" if floor in house.COURT else "floor"))
        parts.append(f'<text x="{_LEFT + 12}" y="{top + 27}"><tspan class="name">{floor}/</tspan>  {meaning}</text>')
        places = {
            room: (_LEFT + 40 + (_ROOM + _GAP) * column + 30 * (level % 2), top + height - 44 - 46 * level)
            for level, row in enumerate(levels)
            for column, room in enumerate(row)
        }
        for upper, lower in sorted(edges):
            if upper in places and lower in places and upper != lower:
                (x, y), (to_x, to_y) = places[upper], places[lower]
                parts.append(f'<path d="M{x + _ROOM // 2} {y + 28} L{to_x + _ROOM // 2} {to_y - 2}"/>')
        for room, (x, y) in places.items():
            is_court = room in house.COURT or floor in house.COURT
            parts.append(_box(x, y, _ROOM, 28, "court" if is_court else "room"))
            parts.append(f'<text x="{x + _ROOM // 2}" y="{y + 19}" class="middle">{room.partition("/")[2]}</text>')
        top += height + 10
    style = (
        "text{font:14px sans-serif;fill:#222}.name{font-weight:bold}.middle{text-anchor:middle}"
        ".floor{fill:#f6f6f4}.room{fill:#fff}.court{fill:#d9e8d2}rect{stroke:#777}"
        "path{stroke:#777;marker-end:url(#tip)}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#777"/></marker>'
    )
    size = f'width="{_WIDTH}" height="{top + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {top + 10}">'
    background = f'<rect {size} style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{style}</style><defs>{tip}</defs>", background, *parts, "</svg>", ""])


def _levels(rooms: list[str], edges: set[tuple[str, str]]) -> list[list[str]]:
    """Rooms of a wing by the longest way down to a room that imports none of them; those at the bottom first."""
    depth: dict[str, int] = {}

    def of(room: str) -> int:
        if room not in depth:
            below = [of(other) for other in rooms if other != room and (room, other) in edges]
            depth[room] = 1 + max(below, default=-1)
        return depth[room]

    return [[room for room in rooms if of(room) == level] for level in range(1 + max(map(of, rooms), default=-1))]


def _box(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" class="{kind}"/>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE.relative_to(ROOT))
