#!/usr/bin/env python3
"""Draw the badges of the README from pyproject.toml and the matrix of CI: version, Python, torch, license.

python scripts/draw_badges.py
"""

import re
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "images" / "badges.svg"
_LETTER, _HEIGHT, _GAP = 6.6, 20, 6


def badges() -> list[tuple[str, str]]:
    """Each badge: name and value."""
    project = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    pythons = re.findall(
        r"3\.\d+", next(line for line in workflow.splitlines() if line.strip().startswith("python: ["))
    )
    torch = next(line for line in project["dependencies"] if re.match(r"torch[<>=]", line))
    least, beyond = map(int, re.findall(r"2\.(\d+)", torch))
    return [
        ("version", project["version"]),
        ("Python", f"{pythons[0]} to {pythons[-1]}"),
        ("torch", f"2.{least} to 2.{beyond - 1}"),
        ("license", project["license"]),
    ]


def picture() -> str:
    """The text of the SVG."""
    parts, left = [], 0.0
    for name, value in badges():
        widths = [round(_LETTER * len(word) + 12, 1) for word in (name, value)]
        for word, width, color in ((name, widths[0], "#4a4f55"), (value, widths[1], "#2f7d4f")):
            parts.append(f'<rect x="{left:.1f}" width="{width}" height="{_HEIGHT}" fill="{color}"/>')
            parts.append(f'<text x="{left + 6:.1f}" y="14" textLength="{width - 12:.1f}">{word}</text>')
            left += width
        left += _GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{left - _GAP:.1f}" height="{_HEIGHT}" font-size="11"'
    return "\n".join([f'{head} font-family="Verdana, DejaVu Sans, sans-serif" fill="#fff">', *parts, "</svg>", ""])


if __name__ == "__main__":
    OUTPUT.write_text(picture(), encoding="utf-8")
