"""Write the documented functions of Python's standard library as chats.

    python scripts/measure/function_chats.py data/functions

`document.jsonl` asks for the docstring of a function, `implement.jsonl` for the body of another one: no function is in
both. docs/results/finetuning.md compares adapters with all weights on them.
"""

import ast
import json
import sys
import sysconfig
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
LONGEST = 700
"""Characters of a function: its chat fits into a row of 256 tokens."""


def functions() -> Iterator[tuple[str, str, str]]:
    """Signature, first paragraph of the docstring and body of each function, in the order of files and lines."""
    for path in sorted(LIBRARY.rglob("*.py")):
        if LEFT_OUT & set(path.relative_to(LIBRARY).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(text)
        except SyntaxError:  # files about syntax errors
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (doc := ast.get_docstring(node)):
                indent = node.col_offset
                signature = "\n".join(line[indent:] for line in lines[node.lineno - 1 : node.body[0].lineno - 1])
                body = "\n".join(line[indent:] for line in lines[node.body[0].end_lineno : node.end_lineno])
                if signature and len(signature) + len(doc) + len(body) <= LONGEST:
                    yield signature, doc.split("\n\n")[0], body


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chats: dict[str, list[tuple[str, str]]] = {"document": [], "implement": []}
    for signature, doc, body in functions():
        if sha256(signature.encode()).digest()[0] % 2:
            chats["document"].append((f"Document this function.\n\n{signature}\n{body}", doc))
        else:
            chats["implement"].append((f"Implement this function.\n\n{signature}\n    # {doc}", body))
    for name, pairs in chats.items():
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for turns in pairs:
                messages = [
                    {"role": role, "content": content}
                    for role, content in zip(("user", "assistant"), turns, strict=True)
                ]
                file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
