"""Draw the package from its imports, group by group, into docs/images/packages.svg.

    python scripts/draw_packages.py

Each group imports only the groups below it. Inside a group the packages stand in one row: a package imports only
packages to its left, and an arrow shows each import. The packages of the core are filled.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.architecture import rules  # noqa: E402

FILE = ROOT / "docs" / "images" / "packages.svg"
GROUPS = {
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
"""From the top down, with what a group holds."""
_WIDTH, _LEFT = 980, 20
_ROW_LEFT, _ROW_WIDTH, _GAP = 36, 908, 18
"""Of the boxes of a group, in pixels; they share the width of the picture."""
_LEGEND_HEIGHT, _BOX_HEIGHT = 44, 28


def picture() -> str:
    """The SVG."""
    modules = rules.read_package(ROOT)
    edges = {
        (module.package, modules[name].package)
        for module in modules.values()
        for name in rules.imports(module, modules)
    }
    top, parts = _LEGEND_HEIGHT, _legend()
    for group, meaning in GROUPS.items():
        row = _ordered([package for package in rules.LAYERS if package.startswith(f"{group}/")], edges)
        width = (_ROW_WIDTH + _GAP) // max(len(row), 1) - _GAP
        places = {package: _ROW_LEFT + (width + _GAP) * column for column, package in enumerate(row)}
        arrows = [
            (upper, lower) for upper, lower in sorted(edges) if upper in places and lower in places and upper != lower
        ]
        reach = max((row.index(upper) - row.index(lower) for upper, lower in arrows), default=0)
        row_top = top + 44 + _arc_height(reach)
        height = row_top - top + _BOX_HEIGHT + 14 if row else 44
        parts.append(_box(_LEFT, top, _WIDTH - 2 * _LEFT, height, "core" if group in rules.CORE else "group"))
        parts.append(f'<text x="{_LEFT + 12}" y="{top + 27}"><tspan class="name">{group}/</tspan>  {meaning}</text>')
        for upper, lower in arrows:
            start, end = places[upper] + width // 2 - 8, places[lower] + width // 2 + 8
            peak = row_top - _arc_height(row.index(upper) - row.index(lower)) * 4 // 3
            parts.append(f'<path d="M{start} {row_top} C{start} {peak} {end} {peak} {end} {row_top - 2}"/>')
        for package, x in places.items():
            is_core = package in rules.CORE or group in rules.CORE
            parts.append(_box(x, row_top, width, _BOX_HEIGHT, "core" if is_core else "package"))
            parts.append(
                f'<text x="{x + width // 2}" y="{row_top + 19}" class="middle">{package.partition("/")[2]}</text>'
            )
        top += height + 10
    style = (
        "text{font:14px sans-serif;fill:#222}.name{font-weight:bold}.middle{text-anchor:middle}"
        ".group{fill:#f6f6f4}.package{fill:#fff}.core{fill:#d9e8d2}rect{stroke:#777}"
        "path{fill:none;stroke:#777;marker-end:url(#tip)}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<polygon points="0,0 8,4 0,8" fill="#777"/></marker>'
    )
    size = f'width="{_WIDTH}" height="{top + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {top + 10}">'
    background = f'<rect {size} style="fill:#fff;stroke:none"/>'
    return "\n".join([head, f"<style>{style}</style><defs>{tip}</defs>", background, *parts, "</svg>", ""])


def _legend() -> list[str]:
    """What colours and arrows mean, above the groups."""
    return [
        _box(_LEFT, 12, 30, 20, "core"),
        f'<text x="{_LEFT + 38}" y="27">core</text>',
        _box(_LEFT + 90, 12, 30, 20, "package"),
        f'<text x="{_LEFT + 128}" y="27">other package</text>',
        f'<path d="M{_LEFT + 280} 22 L{_LEFT + 242} 22"/>',
        f'<text x="{_LEFT + 288}" y="27">imports inside a group; a group also imports the groups below it</text>',
    ]


def _arc_height(distance: int) -> int:
    """Pixels of an arrow over this many columns above the boxes."""
    return 8 + 10 * distance if distance else 0


def _ordered(packages: list[str], edges: set[tuple[str, str]]) -> list[str]:
    """Packages of a group, each after those that it imports."""
    row: list[str] = []
    while len(row) < len(packages):
        rest = [package for package in packages if package not in row]
        row += [name for name in rest if not any((name, other) in edges for other in rest if other != name)]
    return row


def _box(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" class="{kind}"/>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE.relative_to(ROOT))
