#!/usr/bin/env python3
"""Write docs/troubleshooting.md from docs/troubleshooting.toml and from the messages of the package.

    python scripts/write_troubleshooting.py          # into docs/troubleshooting.md

The TOML file says where a message is, its cause and its remedy. Its words are read from the source, so the page shows
what the program prints.
"""

import ast
import re
from pathlib import Path
from textwrap import fill
from typing import Any

import tomli

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "troubleshooting.toml"
OUTPUT = ROOT / "docs" / "troubleshooting.md"


def page() -> str:
    """The text of the page."""
    table = tomli.loads(TABLE.read_text(encoding="utf-8"))
    parts = [table["head"]]
    for group in table["groups"]:
        parts.append(f"## {group['title']}\n")
        if "text" in group:
            parts.append(f"{group['text']}\n")
        parts += [_entry(message) for message in group.get("messages", [])]
    return "\n".join(parts)


def _entry(entry: dict[str, Any]) -> str:
    """One message with its cause and remedy."""
    message = find_message(ROOT / "glm46" / entry["file"], entry["text"])
    text = f"{entry['cause']} **Do:** {entry['remedy']}"
    return fill(f"* `{message}`<br>{text}", width=140, subsequent_indent="  ", break_long_words=False) + "\n"


def find_message(file: Path, text: str) -> str:
    """Return the message of a source file that contains a text, up to its own remedy, with values as ``…``.

    Raises:
        ValueError: none or several messages contain the text.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for string in strings for part in ast.walk(string) if part is not string}
    messages = {_source(node) for node in ast.walk(tree) if id(node) not in parts}
    matches = [message for message in messages if message is not None and text in message]
    if len(matches) != 1:
        raise ValueError(f"{file.name}: {len(matches)} messages contain {text!r}; state a part of exactly one")
    clauses = re.split(r"(?<=[;.]) ", matches[0])
    last = next(number for number in range(len(clauses)) if text.strip() in " ".join(clauses[: number + 1]))
    return _shown(" ".join(clauses[: last + 1]))


def _shown(message: str) -> str:
    """A message as the page shows it: an ellipsis for each value."""
    message = re.sub(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|%[sd]", "…", message.partition("\n")[0])
    message = re.sub(r"…(?:\s*…)+", "…", message)
    message = re.sub(r"^\W*…[;.] ", "", message)
    return re.sub(r"…(?=\w)", "… ", message).strip(" ;.:")


def _source(node: ast.AST) -> str | None:
    """The text of a string or of a formatted string with its expressions in braces; None for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    words = []
    for value in node.values:
        if isinstance(value, ast.Constant):
            words.append(str(value.value))
        else:
            words.append(ast.unparse(ast.JoinedStr([value]))[2:-1])
    return "".join(words)


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
