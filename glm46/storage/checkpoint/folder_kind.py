"""Kinds of folders with weights, told apart by the files in them; one message for all that take another kind."""

import json
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

from glm46.config.errors import UserError
from glm46.storage.checkpoint.integrity import MANIFEST, META, published_steps, step_folder

_METADATA, _CONFIG, _ADAPTER = ".metadata", "config.json", "adapter_config.json"
_INDEX = "model.safetensors.index.json"


class Kind(Enum):
    """The kinds of folder that a path can be."""

    STEP = "a step folder"
    HUGGING_FACE = "a Hugging Face folder"
    PEFT = "a PEFT folder"
    DCP = "a folder of torch.distributed.checkpoint"
    STEPS = "a folder of steps"
    RUN = "the dump folder of a run"
    SHARDS = "a folder of tokenised text"
    TOKENIZER = "a folder with a tokenizer alone"
    FILE = "a file"
    OTHER = "another folder"
    ABSENT = "nothing"


def kind_of(path: Path) -> Kind:
    """The kind of a path, from names of files alone. An incomplete step folder is one. Raises UserError if it cannot be
    read."""
    try:
        if not path.is_dir():
            return Kind.FILE if path.exists() else Kind.ABSENT
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; give this user the right to read it") from error
    has_weights = any(name.endswith(".safetensors") for name in names)
    if _METADATA in names and not has_weights and not {MANIFEST, META} & names and path.suffix != ".tmp":
        return Kind.DCP
    if MANIFEST in names and has_weights:
        return Kind.SHARDS
    if _ADAPTER in names:
        return Kind.PEFT
    if _CONFIG in names or has_weights or _INDEX in names:
        return Kind.HUGGING_FACE
    if {MANIFEST, META, _METADATA} & names:
        return Kind.STEP
    if published_steps(path):
        return Kind.STEPS
    if any(_steps_of_run(path)):
        return Kind.RUN
    return Kind.TOKENIZER if "tokenizer.json" in names else Kind.OTHER


def checkpoint_folders(path: Path) -> list[Path]:
    """The folders of steps that are this folder, or lie in the dump folder of a run."""
    return [path] if published_steps(path) else sorted(_steps_of_run(path))


def _steps_of_run(path: Path) -> Iterator[Path]:
    with suppress(OSError):
        for child in path.iterdir():
            steps = published_steps(child)  # of exports too, in the folder beside
            if steps and kind_of(step_folder(child, steps[-1])) in (Kind.STEP, Kind.OTHER):
                yield child


def require_kind(path: Path, *wanted: Kind) -> Kind:
    """The kind of a path. Raises UserError if it is none of the wanted ones, with what it is and what takes it."""
    kind = kind_of(path)
    if kind not in wanted:
        raise UserError(f"{path}: {_described(path, kind, wanted)}")
    return kind


def _described(path: Path, kind: Kind, wanted: tuple[Kind, ...]) -> str:
    expected = " or ".join(one.value for one in wanted)
    if kind is Kind.ABSENT:
        known = ", ".join(map(str, published_steps(path.parent)))
        return f"no such folder; give {expected}" + (f"; steps in {path.parent}: {known}" if known else "")
    if kind is Kind.FILE:
        return f"is a file; give its folder, {expected}"
    if kind in (Kind.STEPS, Kind.RUN):
        folder = checkpoint_folders(path)[-1]
        of_run = "" if kind is Kind.STEPS else f"this is {kind.value}; "
        return f"{of_run}it holds steps; give one of them, such as {step_folder(folder, published_steps(folder)[-1])}"
    if kind is Kind.PEFT:
        merged = "--adapter and adapter.initial_load_path take it, convert merge makes a whole model"
        return f"this is {kind.value} with adapters{_base_of(path)}; {merged}; give {expected} here"
    if kind in _TAKERS:
        return f"this is {kind.value}{_TAKERS[kind]}; give {expected} here"
    names = f"neither {Kind.HUGGING_FACE.value} ({_CONFIG}) nor {Kind.STEP.value} ({MANIFEST})"
    return f"{names}{pickle_hint(path)}; give {expected}"


def pickle_hint(folder: Path) -> str:
    """The end of a message for a folder whose weights are pickles; empty if there are none."""
    pickles = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
    return f"; {pickles[0]} is a pickle, which can run any code: convert it to safetensors" if pickles else ""


_TAKERS = {
    Kind.STEP: " of glm46, which --checkpoint and initial_load_path take, and convert to-hf or adapter-to-hf exports",
    Kind.HUGGING_FACE: ", which --model and checkpoint.initial_load_path with initial_load_in_hf = true take; "
    "convert from-hf makes a step folder of it",
    Kind.DCP: " without a manifest of glm46, of which checkpoint.initial_load_path takes the weights; convert from-dcp "
    "makes a step folder of it",
    Kind.SHARDS: ", which data.sources takes",
    Kind.TOKENIZER: ", which model.tokenizer_path and --tokenizer take",
}


def _base_of(path: Path) -> str:
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        base = json.loads((path / _ADAPTER).read_text(encoding="utf-8")).get("base_model_name_or_path")
        return f", of the base {base}" if base else ""
    return ""
