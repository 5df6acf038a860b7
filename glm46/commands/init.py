"""The verb ``init``: the shipped TOML files and the schema, for people who have the package and no checkout."""

from pathlib import Path

import glm46
from glm46.config.errors import UserError

_PACKAGE = Path(glm46.__path__[0])


def write_configs(folder: Path) -> list[Path]:
    """Write the shipped TOML files and their schema; nothing that is there is replaced.

    Returns:
        The files that were written.

    Raises:
        UserError: a file of the same name says something else, or the folder cannot be written; nothing is written.
    """
    # Inside the package in a wheel (setup.py), beside it in a checkout.
    shipped = next(place for place in (_PACKAGE, _PACKAGE.parent) if (place / "train_configs").is_dir())
    texts = {
        folder / file.name: file.read_text(encoding="utf-8")
        for file in sorted((shipped / "train_configs").iterdir())
        if file.suffix in (".toml", ".json")
    }
    faults, missing = [], []
    for path, text in texts.items():
        try:
            if path.read_text(encoding="utf-8") != text:
                faults.append(f"{path}: differs from the shipped file and is kept; move it, or name another folder")
        except FileNotFoundError:
            missing.append(path)
        except (OSError, UnicodeDecodeError) as error:
            faults.append(f"{path}: cannot be compared with the shipped file: {error}; name another folder")
    if faults:
        raise UserError(*faults)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            path.write_text(texts[path], encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}; name another folder") from error
    return missing
