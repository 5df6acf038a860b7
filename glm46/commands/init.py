"""``python -m glm46 init``: write the shipped TOML files, schema and chats, for an installation without a checkout."""

from collections.abc import Sequence
from pathlib import Path

import glm46
from glm46.config.errors import UserError
from glm46.config.options import verb_parser

_PACKAGE = Path(glm46.__path__[0])
_SHOWN = 3
"""Number of files that a fault names; the others are counted."""


def init_command(argv: Sequence[str]) -> int:
    """Write the files and print their paths; returns the exit code.

    Raises:
        UserError: `write_configs` refuses the folder.
    """
    parser = verb_parser("init")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("train_configs"), help="train_configs, if not given"
    )
    folder = parser.parse_args(argv).folder
    print("\n".join(f"wrote {path}" for path in write_configs(folder)) or f"{folder} has them all")
    return 0


def shipped_configs() -> Path:
    """Return the folder of the shipped TOML files: inside the package in a wheel (setup.py), next to it in a
    checkout."""
    return next(place for place in (_PACKAGE / "train_configs", _PACKAGE.parent / "train_configs") if place.is_dir())


def write_configs(folder: Path) -> list[Path]:
    """Write the shipped TOML files, their schema, chats, prompts, programs and vocabulary; existing files are kept.

    Returns:
        The files that were written.

    Raises:
        UserError: a file of the same name differs, or the folder cannot be written; nothing is written.
    """
    shipped = shipped_configs()
    texts = {
        folder / file.relative_to(shipped): file.read_text(encoding="utf-8")
        for file in sorted(shipped.rglob("*"))
        if file.suffix in (".toml", ".json", ".jsonl", ".tiktoken", ".py")
    }
    different = []
    missing = []
    try:
        for path, text in texts.items():
            if not path.exists():
                missing.append(path)
            elif path.read_text(encoding="utf-8", errors="replace") != text:
                different.append(path.name)
        if different:
            names = ", ".join(different[:_SHOWN]) + " ..." * (len(different) > _SHOWN)
            kept = "differs from the shipped file and is kept"
            if len(different) > 1:
                kept = f"{len(different)} files differ from the shipped ones and are kept"
            raise UserError(f"{folder}/{names}: {kept}; move what differs, or name another folder")
        for path in missing:  # finds a file at the path of a folder, before anything is written
            path.parent.mkdir(parents=True, exist_ok=True)
        for path in missing:
            path.write_text(texts[path], encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be read or written: {error.strerror}; name another folder") from error
    return missing
