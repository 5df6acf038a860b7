"""A Hugging Face folder as inference servers read it: what they would refuse, and what their memory will hold."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.files.file_content import read_json_object
from glm46.storage.data.chat import missing_markers
from glm46.storage.data.chat_template import raise_for_template, template_beside
from glm46.storage.data.tokenizer import Tokenizer, tokenizer_file, tokenizer_of_checkpoint
from glm46.storage.huggingface.config_json import CONFIG, read_config, shape_of, stated_ids
from glm46.storage.huggingface.folder_check import CheckedFolder, check_folder, stored_shape
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.int4 import Int4
from glm46.storage.huggingface.names import Form, HFNames
from glm46.storage.huggingface.schemes import scheme_of
from glm46.storage.huggingface.tokenizer_files import stop_ids

_BF16, _FP32 = 2, 4
_ROW_PARALLEL = ("o_proj", "down_proj")
"""Modules whose columns tensor parallelism splits; it splits the rows of the others."""
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ServedFolder:
    """A folder that servers take."""

    path: Path
    shape: ModelShape
    """With 0 prediction layers if the files have none."""
    stored: dict[str, float]
    """Our name -> bytes of the whole parameter in a server that computes in BF16."""
    chats: bool
    """True if it has a chat template, and the tokens of thinking and of tool calls."""
    notes: tuple[str, ...]
    """What works differently than a user may expect."""
    _checked: CheckedFolder

    @property
    def format(self) -> str:
        """Of the quantised weights, or bfloat16."""
        return "bfloat16" if self._checked.scheme is None else self._checked.scheme.format

    def quantisation_refused(self, tp: int) -> list[str]:
        """The first weight of each kind whose parts are not whole blocks or groups in so many tensor-parallel parts.

        Source: vLLM 0.32.0 `validate_fp8_block_shape`, `verify_group_size_divides_partition` and the experts of
        `compressed_tensors_moe_wna16.py`.
        """
        scheme, faults = self._checked.scheme, dict[tuple[str, ...], str]()
        for name, (rows, columns) in self._checked.quantised.items():
            module, *_ = kind = name.split(".")[-2:]
            across = module in _ROW_PARALLEL
            if isinstance(scheme, Fp8) and scheme.block is not None:
                size, step = (columns, scheme.block[1]) if across else (rows, scheme.block[0])
            elif isinstance(scheme, Int4) and (across or tp == 1):
                size, step = columns, scheme.group
            else:
                continue
            if size % tp or size // tp % step:
                faults.setdefault(tuple(kind), f"{name}: {size} in {tp} parts are not whole blocks of {step}")
        return list(faults.values())


def check_served_folder(folder: Path) -> ServedFolder:
    """Check a folder for servers: files, index, names, shapes and types of all tensors, tokenizer, template, stop ids.

    No weight is read.

    Raises:
        UserError: all faults of config.json or of the tensors, see `check_folder`; then all of the other files.
    """
    shape = stored_shape(folder)
    checked, raw = check_folder(folder, shape), read_config(folder)
    faults, notes = [], list(checked.notes)
    if checked.names.form is not Form.PER_EXPERT:
        faults.append(f"{folder}: has {checked.names.form.value}; serve what convert to-hf writes from it")
    if not raw.get("architectures"):
        faults.append(f'{folder / CONFIG}: architectures is missing; set it to ["Glm4MoeForCausalLM"]')
    tokenizer = tokenizer_of_checkpoint(str(folder), stated=None, fingerprint=None, vocab_size=shape.vocab_size)
    faults += _stop_faults(folder, raw, tokenizer)
    chats = not missing_markers(tokenizer) and template_beside(tokenizer_file(str(folder))) is not None
    if not chats:
        notes.append("it has no chat template, or its tokenizer no chat tokens: servers take completions only")
    else:
        try:
            raise_for_template(tokenizer)
        except UserError as error:
            faults += error.faults
    if raw.get("num_nextn_predict_layers", 0) > shape.num_nextn_predict_layers:
        notes.append("its files have no prediction layers: no drafts")
    if any(
        record.dtype == torch.float32 for name, (_, record) in checked.found.items() if name.endswith("_proj.weight")
    ):
        notes.append("its weights are in FP32: the servers round them to BF16")
    if faults:
        raise UserError(*faults)
    return ServedFolder(folder, shape, _bytes_of(checked), chats, tuple(notes), checked)


def folder_of_config(folder: Path) -> ServedFolder | None:
    """A folder by its config.json alone, as if its files were whole; None if they are quantised, whose sizes only the
    files tell. Raises UserError for faults of config.json."""
    raw = read_config(folder)
    shape = shape_of(raw, str(folder / CONFIG))
    if scheme_of(raw, str(folder / CONFIG)) is not None:
        return None
    checked = CheckedFolder(HFNames(shape, repeat_shared=False), {}, None, {})
    return ServedFolder(folder, shape, _bytes_of(checked), False, (), checked)


def _stop_faults(folder: Path, raw: dict, tokenizer: Tokenizer) -> list[str]:
    """A server ends an answer at the ids of generation_config.json, or of config.json."""
    file, wanted = folder / _GENERATION, stop_ids(tokenizer)
    try:
        source, known = (file, read_json_object(file, "copy it anew")) if file.is_file() else (folder / CONFIG, raw)
        stops = stated_ids(known, source)
    except UserError as error:
        return [*error.faults]
    missing = [token for token in wanted if token not in stops]
    if not missing:
        return []
    return [
        f"{source}: eos_token_id = {stops} lacks {missing}, at which this tokenizer's texts and turns end, so answers "
        f"would go on; set it to {wanted}"
    ]


def _bytes_of(checked: CheckedFolder) -> dict[str, float]:
    stored = {}
    for name, entry in checked.names.entries.items():
        # Servers compute the router in FP32.
        width = _FP32 if entry.row.group == "router" else _BF16
        stored[name] = float(
            sum(
                sum(checked.found[part.hf_name + suffix][1].nbytes for suffix in checked.scheme.suffixes)
                if checked.scheme is not None and part.hf_name in checked.quantised
                else prod(part.hf_shape) * width
                for part in entry.parts
                if not part.is_repeat
            )
        )
    return stored
