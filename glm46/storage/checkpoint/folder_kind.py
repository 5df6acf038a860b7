"""Kinds of folders with weights, told apart by the files in them, and one error message for a folder of the wrong
kind."""

import json
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

from glm46.config.errors import UserError
from glm46.files.regular_file import read_regular
from glm46.storage.checkpoint.integrity import MANIFEST, META, published_steps, step_folder

_METADATA = ".metadata"
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
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
    """Return the kind of a path, from file names alone. An incomplete step folder counts as a step folder. Raises
    UserError if the path cannot be read."""
    try:
        if not path.is_dir():
            return Kind.FILE if path.exists() else Kind.ABSENT
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; give this user the right to read it") from error
    has_tensor_files = any(name.endswith(".safetensors") for name in names)  # weights, or tokens of shards
    is_draft = path.suffix == ".tmp"  # an interrupted save of a step folder
    # A step folder has DCP's metadata too. It adds a manifest and its own metadata, which a draft may not have yet.
    # Weights in safetensors decide the kind of a folder that has both formats.
    is_ours = bool({MANIFEST, META} & names) or is_draft
    if _METADATA in names and not is_ours and not has_tensor_files:
        return Kind.DCP
    if MANIFEST in names and has_tensor_files:
        return Kind.SHARDS
    if _ADAPTER in names:
        return Kind.PEFT
    if _CONFIG in names or has_tensor_files or _INDEX in names:
        return Kind.HUGGING_FACE
    if {MANIFEST, META, _METADATA} & names:
        return Kind.STEP
    if published_steps(path):
        return Kind.STEPS
    if any(_steps_of_run(path)):
        return Kind.RUN
    return Kind.TOKENIZER if "tokenizer.json" in names else Kind.OTHER


def checkpoint_folders(path: Path) -> list[Path]:
    """Return the checkpoint folders at a path: the path itself, or those inside the dump folder of a run."""
    return [path] if published_steps(path) else sorted(_steps_of_run(path))


def _steps_of_run(path: Path) -> Iterator[Path]:
    with suppress(OSError):
        for child in path.iterdir():
            steps = published_steps(child)
            # Exports have such names too. A step folder without its files is of the kind OTHER.
            if steps and kind_of(step_folder(child, steps[-1])) in (Kind.STEP, Kind.OTHER):
                yield child


def require_kind(path: Path, *expected: Kind) -> Kind:
    """Return the kind of a path. Raises UserError, with the actual kind and its uses, unless it is one of the expected
    ones."""
    kind = kind_of(path)
    if kind not in expected:
        raise UserError(f"{path}: {_described(path, kind, expected)}")
    return kind


def _described(path: Path, kind: Kind, expected_kinds: tuple[Kind, ...]) -> str:
    options = " or ".join(option.value for option in expected_kinds)
    if kind is Kind.ABSENT:
        steps = ", ".join(map(str, published_steps(path.parent)))
        return f"no such folder; give {options}" + (f"; steps in {path.parent}: {steps}" if steps else "")
    if kind is Kind.FILE:
        return f"is a file; give its folder, {options}"
    if kind in (Kind.STEPS, Kind.RUN):
        folder = checkpoint_folders(path)[-1]
        run_hint = "" if kind is Kind.STEPS else f"this is {kind.value}; "
        return f"{run_hint}it holds steps; give one of them, such as {step_folder(folder, published_steps(folder)[-1])}"
    if kind is Kind.PEFT:
        adapter_hint = "--adapter and adapter.initial_load_path take it, convert merge makes a whole model"
        return f"this is {kind.value} with adapters{_base_of(path)}; {adapter_hint}; give {options} here"
    if kind in _USES:
        return f"this is {kind.value}{_USES[kind]}; give {options} here"
    names = f"neither {Kind.HUGGING_FACE.value} ({_CONFIG}) nor {Kind.STEP.value} ({MANIFEST})"
    return f"{names}{pickle_hint(path)}; give {options}"


def pickle_hint(folder: Path) -> str:
    """Return the end of a message about a folder whose weights are pickles; empty if it has no pickles."""
    pickles = sorted(file.name for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}"))
    return f"; {pickles[0]} is a pickle, which can run any code: convert it to safetensors" if pickles else ""


# What a folder is, and which options and commands take it; the end of "this is <kind>".
_USES = {
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
        base = json.loads(read_regular(path / _ADAPTER)).get("base_model_name_or_path")
        return f", of the base {base}" if base else ""
    return ""
