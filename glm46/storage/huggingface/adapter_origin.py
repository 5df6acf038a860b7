"""The base that an adapter was trained on: SHA-256 of its files, in the PEFT folder beside the tensors.

Readers of PEFT folders do not know the file and leave it alone.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from glm46.compute.distributed.ranks import Ranks
from glm46.config.adapter import BASE_FORMATS
from glm46.config.errors import UserError
from glm46.files.durable import hash_file
from glm46.files.file_content import read_json_object
from glm46.storage.huggingface.names import listed
from glm46.storage.huggingface.write_folder import json_bytes

BASE_FILES = "base_files.json"
BASE_FORMAT = "base_format.json"


class AdapterOrigin(NamedTuple):
    """The known facts of the base that an adapter was trained on."""

    files: Mapping[str, str] = {}
    """SHA-256 of its files by name."""
    base_dtype: str | None = None
    """How training held it, which a merge needs to know."""

    def contents(self) -> dict[str, bytes]:
        """The files of a PEFT folder that say it."""
        of_files = {BASE_FILES: json_bytes(dict(self.files))} if self.files else {}
        return of_files | ({BASE_FORMAT: json_bytes({"base_dtype": self.base_dtype})} if self.base_dtype else {})


def hash_files(files: Sequence[Path], ranks: Ranks) -> dict[str, str]:
    """SHA-256 of each file by its name; each rank reads its share, several files at a time. Collective. Raises
    CheckpointError on all ranks if a file cannot be read."""
    own = files[ranks.rank :: ranks.size]
    with ranks.stage(f"hashing {files[0].parent}") as stage, ThreadPoolExecutor() as pool:
        stage.value = {file.name: hashed.sha256 for file, hashed in zip(own, pool.map(hash_file, own), strict=True)}
    return {name: value for hashes in stage.values for name, value in sorted(hashes.items())}


def changed_files(saved: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Names of the files that are not in both or have other hashes, for a message; empty if there are none."""
    changed = sorted(name for name in {*saved, *found} if saved.get(name) != found.get(name))
    return listed(changed) if changed else ""


def require_base(base: Path, adapter: Path, ranks: Ranks) -> None:
    """Check that a folder is the base of a PEFT folder, if that names the files of its base and any of them has its
    name in the folder: a step folder and the Hugging Face folder made from it have no file in common. Collective.
    Raises UserError on all ranks if a file of the base is missing or has changed, or the list of them is damaged."""
    saved = read_base_files(adapter)
    names = [name for name in sorted(saved) if (base / name).is_file()]
    if names:
        refuse_other_base(saved, hash_files([base / name for name in names], ranks), base, adapter)


def read_base_files(adapter: Path) -> dict[str, str]:
    """The hashes in a PEFT folder; none in a folder of another program. Raises UserError if they are damaged."""
    file = adapter / BASE_FILES
    return read_json_object(file, "export the adapter again") if file.is_file() else {}


def read_base_dtype(adapter: Path) -> str | None:
    """``adapter.base_dtype`` of the run that trained a PEFT folder; None if it had none, or another program wrote it.
    Raises UserError if the file is damaged."""
    file, remedy = adapter / BASE_FORMAT, "export the adapter again"
    found = read_json_object(file, remedy).get("base_dtype") if file.is_file() else None
    if found is not None and found not in BASE_FORMATS:
        raise UserError(f"{file}: base_dtype = {found!r} is unknown; {remedy}")
    return found


def refuse_other_base(saved: Mapping[str, str], found: Mapping[str, str], base: Path, adapter: Path) -> None:
    """Raise UserError if the hashes in the folder of an adapter are not those of a base."""
    if changed := changed_files(saved, found):
        raise UserError(
            f"{base}: not the base that {adapter} was trained on: {changed} differ; give that base, or remove "
            f"{adapter / BASE_FILES} to use the adapter on this one"
        )
