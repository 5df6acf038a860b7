"""The tensors of a Hugging Face folder, from the headers of its files and its index."""

import re
from pathlib import Path

from glm46.config.errors import UserError, raise_if
from glm46.files.file_content import read_json_object
from glm46.files.tensor_file import Record, read_records
from glm46.storage.checkpoint.folder_kind import Kind, pickle_hint, require_kind
from glm46.storage.huggingface.names import MOST_SHOWN, listed

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

Places = dict[str, tuple[Path, Record]]
"""Hugging Face name -> file and record of a tensor."""

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


def find_tensors(folder: Path) -> Places:
    """File and record of every tensor of a model folder, read from the files' own headers. Raises UserError if
    files or index are missing or damaged, or disagree about the file of a tensor."""
    require_kind(folder, Kind.HUGGING_FACE)
    index = folder / INDEX
    if not index.is_file():
        return _without_index(folder)
    listed_in = _read_index(index)
    faults: list[str] = []
    found: Places = {}
    remedy = f"copy or download both again, or remove {INDEX}: the files alone are then read"
    for file in sorted(set(listed_in.values())):
        try:
            records = read_records(folder / file)
        except UserError as error:
            faults += error.faults
            continue
        for name, record in records.items():
            if (place := listed_in.get(name)) != file:
                faults.append(f"{folder / file}: holds {name}, which the index lists in {place or 'no file'}; {remedy}")
            found[name] = (folder / file, record)
        lost = [name for name, place in listed_in.items() if place == file and name not in records]
        faults += [f"{folder / file}: lacks {name}, which the index lists there; {remedy}" for name in lost]
    raise_if(faults)
    return found


def _read_index(index: Path) -> dict[str, str]:
    remedy = "copy it again, or remove it: the files alone are read"
    files = read_json_object(index, remedy).get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{index}: damaged (weight_map = {files!r:.40}); {remedy}")
    if not all(isinstance(file, str) and Path(file).name == file for file in files.values()):
        raise UserError(f"{index}: names files outside its folder")
    return files


def _without_index(folder: Path) -> Places:
    """As `find_tensors`, of the one file of a folder, or of all its files."""
    single = folder / SINGLE_FILE
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        hint = pickle_hint(folder) or "; download the weights"
        raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX} is there{hint}")
    names = {path.name for path in paths}
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(names))):
        stem, number, count = match.groups()
        of_set = [f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors" for i in range(1, int(count) + 1)]
        if missing := [name for name in of_set if name not in names]:
            raise UserError(f"{folder}: lacks {listed(missing)}; copy or download what is missing")
    faults: list[str] = []
    found: Places = {}
    for path in paths:
        for name, record in read_records(path).items():
            if name in found:
                faults.append(f"{path}: holds {name}, as does {found[name][0].name}; remove one, or add {INDEX}")
            found[name] = (path, record)
    raise_if(faults[:MOST_SHOWN])
    return found
