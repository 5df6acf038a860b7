"""Draw the package from its imports, group by group, into docs/images/packages.svg.

    python scripts/draw_packages.py

Each group imports only the groups below it; an arrow is an import between two packages of one group. The packages
of the core are filled.
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
_WIDTH, _LEFT, _BOX_WIDTH, _GAP = 980, 20, 140, 18


def picture() -> str:
    """The SVG."""
    modules = rules.read_package(ROOT)
    edges = {
        (module.package, modules[name].package)
        for module in modules.values()
        for name in rules.imports(module, modules)
    }
    top, parts = 20, []
    for group, meaning in GROUPS.items():
        packages = [package for package in rules.LAYERS if package.startswith(f"{group}/")]
        levels = _levels(packages, edges)
        height = 44 + max(len(levels), 1) * 46 if packages else 44
        parts.append(_box(_LEFT, top, _WIDTH - 2 * _LEFT, height, "core" if group in rules.CORE else "group"))
        parts.append(f'<text x="{_LEFT + 12}" y="{top + 27}"><tspan class="name">{group}/</tspan>  {meaning}</text>')
        places = {
            package: (_LEFT + 40 + (_BOX_WIDTH + _GAP) * column + 30 * (level % 2), top + height - 44 - 46 * level)
            for level, row in enumerate(levels)
            for column, package in enumerate(row)
        }
        for upper, lower in sorted(edges):
            if upper in places and lower in places and upper != lower:
                (x, y), (to_x, to_y) = places[upper], places[lower]
                parts.append(f'<path d="M{x + _BOX_WIDTH // 2} {y + 28} L{to_x + _BOX_WIDTH // 2} {to_y - 2}"/>')
        for package, (x, y) in places.items():
            is_core = package in rules.CORE or group in rules.CORE
            parts.append(_box(x, y, _BOX_WIDTH, 28, "core" if is_core else "package"))
            parts.append(
                f'<text x="{x + _BOX_WIDTH // 2}" y="{y + 19}" class="middle">{package.partition("/")[2]}</text>'
            )
        top += height + 10
    style = (
        "text{font:14px sans-serif;fill:#222}.name{font-weight:bold}.middle{text-anchor:middle}"
        ".group{fill:#f6f6f4}.package{fill:#fff}.core{fill:#d9e8d2}rect{stroke:#777}"
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


def _levels(packages: list[str], edges: set[tuple[str, str]]) -> list[list[str]]:
    """Packages of a group by the longest way down to a package that imports none of them; those at the bottom first."""
    depth: dict[str, int] = {}

    def of(package: str) -> int:
        if package not in depth:
            below = [of(other) for other in packages if other != package and (package, other) in edges]
            depth[package] = 1 + max(below, default=-1)
        return depth[package]

    return [
        [package for package in packages if of(package) == level]
        for level in range(1 + max(map(of, packages), default=-1))
    ]


def _box(x: int, y: int, width: int, height: int, kind: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" class="{kind}"/>'


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
    print(FILE.relative_to(ROOT))
