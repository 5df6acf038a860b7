"""Finds the tensors of a Hugging Face folder, from the headers of its files and its index."""

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from glm46.config.errors import UserError, raise_if
from glm46.files.file_content import read_json_object
from glm46.files.regular_file import is_file_name
from glm46.files.store_ranges import range_file
from glm46.files.tensor_file import Record, read_records
from glm46.storage.checkpoint.folder_kind import Kind, pickle_hint, require_kind
from glm46.storage.huggingface.names import MOST_SHOWN

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MTP_FILE = "mtp.safetensors"

Places = dict[str, tuple[Path, Record]]
"""File and record of each tensor, by Hugging Face name."""

_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


def find_tensors(folder: Path) -> Places:
    """Return file and record of every tensor of a model folder, read from the files' headers. Raises UserError if files
    or index are missing or damaged, or disagree about the file of a tensor, or if the folder holds two models."""
    require_kind(folder, Kind.HUGGING_FACE)
    index = folder / INDEX
    listed_in = _read_index(index) if index.is_file() else None
    if listed_in is None or _is_left_over(folder, listed_in):
        places = _without_index(folder)
    else:
        places = _with_index(folder, listed_in)
    return places | _unlisted_prediction_layers(folder, places)


def _is_there(file: Path) -> bool:
    return file.is_file() or range_file(file) is not None


def _is_left_over(folder: Path, listed_in: Mapping[str, str]) -> bool:
    """Return True if the index belongs to an earlier save in several files, which a save in one file has replaced:
    transformers removes the files and keeps the index. Raises UserError if files of both saves are present."""
    files = sorted(set(listed_in.values()))
    if SINGLE_FILE in files or not _is_there(folder / SINGLE_FILE):
        return False
    present = [file for file in files if _is_there(folder / file)]
    if present:
        raise UserError(
            f"{folder}: holds two models: {SINGLE_FILE}, and {INDEX} with {present[0]}; transformers reads the first, "
            f"other programs the second; remove {SINGLE_FILE}, or {INDEX} with its files"
        )
    return True


def _with_index(folder: Path, listed_in: Mapping[str, str]) -> Places:
    """Find the tensors in the files that an index names, see `find_tensors`."""
    faults: list[str] = []
    places: Places = {}
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
            places[name] = (folder / file, record)
        lost = [name for name, place in listed_in.items() if place == file and name not in records]
        faults += [f"{folder / file}: lacks {name}, which the index lists there; {remedy}" for name in lost]
    raise_if(faults)
    return places


def _unlisted_prediction_layers(folder: Path, places: Places) -> Places:
    """Return the tensors of a file of prediction layers that the index does not name, as in some releases of GLM-4.7;
    empty if their layers are in the other files too."""
    file = folder / MTP_FILE
    if not _is_there(file) or any(path == file for path, _ in places.values()):
        return {}
    records = read_records(file)
    is_of_new_layers = all(name.startswith("model.layers.") and name not in places for name in records)
    return {name: (file, record) for name, record in records.items()} if is_of_new_layers else {}


def _read_index(index: Path) -> dict[str, str]:
    remedy = "copy it again, or remove it: the files alone are read"
    files = read_json_object(index, remedy).get("weight_map")
    if not isinstance(files, dict):
        raise UserError(f"{index}: damaged (weight_map = {files!r:.40}); {remedy}")
    if not all(isinstance(file, str) and is_file_name(file) for file in files.values()):
        raise UserError(f"{index}: names files outside its folder")
    return files


def _missing_files(match: re.Match[str], names: set[str]) -> str:
    """List the first missing files of a numbered set, and the number of the others; empty if no file is missing. A
    count in a file name has no bound, so the complete set is never in memory."""
    stem, number, count = match.groups()
    whole_set = (f"{stem}-{i:0{len(number)}d}-of-{count}.safetensors" for i in range(1, int(count) + 1))
    first = list(islice((name for name in whole_set if name not in names), MOST_SHOWN))
    if not first:
        return ""
    present = [name for name in names if name.startswith(f"{stem}-") and name.endswith(f"-of-{count}.safetensors")]
    others = int(count) - len(present) - len(first)
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")


def _without_index(folder: Path) -> Places:
    """Find the tensors in the one file of a folder, or in all its files, see `find_tensors`."""
    single = folder / SINGLE_FILE
    paths = [single] if _is_there(single) else sorted(folder.glob("*.safetensors"))
    if not paths:
        hint = pickle_hint(folder) or "; download them, or export the model again"
        raise UserError(f"{folder}: neither {SINGLE_FILE} nor {INDEX} is there{hint}")
    names = {path.name for path in paths}
    for match in filter(None, map(_NUMBERED.fullmatch, sorted(names))):
        if missing := _missing_files(match, names):
            raise UserError(f"{folder}: lacks {missing}; copy or download what is missing")
    faults: list[str] = []
    places: Places = {}
    for path in paths:
        for name, record in read_records(path).items():
            if name in places:
                faults.append(f"{path}: holds {name}, as does {places[name][0].name}; remove one, or add {INDEX}")
            places[name] = (path, record)
    raise_if(faults[:MOST_SHOWN])
    return places
