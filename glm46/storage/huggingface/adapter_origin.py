"""The base that an adapter was trained on: SHA-256 of its files, stored in the PEFT folder next to the tensors.

Readers of PEFT folders do not know these files and ignore them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from glm46.compute.distributed.ranks import Ranks
from glm46.config.adapter import BASE_FORMATS
from glm46.config.errors import UserError
from glm46.files.file_content import read_json_object
from glm46.storage.checkpoint.integrity import hash_files
from glm46.storage.huggingface.config_json import CONFIG, read_config
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import listed
from glm46.storage.huggingface.schemes import scheme_of
from glm46.storage.huggingface.write_folder import json_bytes

BASE_FILES = "base_files.json"
BASE_FORMAT = "base_format.json"


class AdapterOrigin(NamedTuple):
    """Known facts about the base that an adapter was trained on."""

    files: Mapping[str, str] = {}
    """SHA-256 of the base's files by name."""
    base_dtype: str | None = None
    """Format in which training held the base; a merge needs it."""

    def contents(self) -> dict[str, bytes]:
        """Return the files of a PEFT folder that store these facts."""
        files = {BASE_FILES: json_bytes(dict(self.files))} if self.files else {}
        return files | ({BASE_FORMAT: json_bytes({"base_dtype": self.base_dtype})} if self.base_dtype else {})


def changed_files(saved: Mapping[str, str], current: Mapping[str, str]) -> str:
    """List the files that are not in both or have other hashes, for a message; empty if nothing changed."""
    changed = sorted(name for name in {*saved, *current} if saved.get(name) != current.get(name))
    return listed(changed) if changed else ""


def require_base(base: Path, adapter: Path, ranks: Ranks) -> None:
    """Check that a folder is the base of a PEFT folder, if the PEFT folder lists the files of its base and the folder
    has a file of that name: a step folder and the Hugging Face folder made from it have no file in common. Collective.
    Raises UserError on all ranks if a file of the base is missing or has changed, or the list of files is damaged."""
    saved = read_base_files(adapter)
    names = [name for name in sorted(saved) if (base / name).is_file()]
    if names:
        refuse_other_base(saved, hash_files([base / name for name in names], ranks), base, adapter)


def read_base_files(adapter: Path) -> dict[str, str]:
    """Return the hashes in a PEFT folder; empty for a folder of another program. Raises UserError if they are
    damaged."""
    file = adapter / BASE_FILES
    return read_json_object(file, "export the adapter again") if file.is_file() else {}


def read_base_dtype(adapter: Path) -> str | None:
    """Return ``adapter.base_dtype`` of the run that trained a PEFT folder; None if it was not set, or another program
    wrote the folder. Raises UserError if the file is damaged."""
    file = adapter / BASE_FORMAT
    remedy = "export the adapter again"
    base_dtype = read_json_object(file, remedy).get("base_dtype") if file.is_file() else None
    if base_dtype is not None and base_dtype not in BASE_FORMATS:
        raise UserError(f"{file}: base_dtype = {base_dtype!r} is unknown; {remedy}")
    return base_dtype


def held_base_dtype(base: Path, base_dtype: str | None) -> str | None:
    """Return `base_dtype` if it rounds the values of a base, else None: FP8 and INT4 weights of a folder stay
    unchanged."""
    is_folder = (base / CONFIG).is_file()
    if base_dtype == "int4" and is_folder and isinstance(scheme_of(read_config(base), str(base / CONFIG)), Int4):
        return None
    return None if base_dtype == "float8" else base_dtype


def other_base_dtype(adapter: Path, base: Path, base_dtype: str | None) -> str | None:
    """Return the end of a sentence about an adapter that was trained on other values of its base than it is used on.
    None if it was not, or if another program wrote the folder, which then does not store it. Raises UserError like
    `read_base_dtype`.

    Args:
        base_dtype: format in which the base is held now; None: as in its folder.
    """
    trained = held_base_dtype(base, read_base_dtype(adapter))
    if trained == held_base_dtype(base, base_dtype):
        return None
    if trained is None:
        is_ours = (adapter / BASE_FILES).is_file()
        text = f"was trained on a base with the values of its folder, which are rounded to {base_dtype}"
        return text if is_ours else None
    other = "" if base_dtype is None else f", but rounded to {base_dtype}"
    return f"was trained on a base in {trained}, which {base} is not{other}"


def refuse_other_base(saved: Mapping[str, str], current: Mapping[str, str], base: Path, adapter: Path) -> None:
    """Raise UserError if the hashes in the folder of an adapter differ from the hashes of a base."""
    if changed := changed_files(saved, current):
        raise UserError(
            f"{base}: not the base that {adapter} was trained on: {changed} differ; give that base, or remove "
            f"{adapter / BASE_FILES} to use the adapter on this one"
        )
