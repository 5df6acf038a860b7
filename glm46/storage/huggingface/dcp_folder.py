"""Weights in a folder that another program wrote with ``torch.distributed.checkpoint`` (DCP), for import.

TorchTitan, NeMo Automodel and plain scripts save nested state dicts, whose keys DCP joins by dots: the weights are
found under any prefix, by Hugging Face's names or ours. Such a folder has no hashes, so only its index is checked.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from glm46.config.errors import UserError, raise_if
from glm46.config.model import ModelShape
from glm46.files.durable import FileRecord
from glm46.files.file_content import known_fault
from glm46.files.tensor_file import Box, Record
from glm46.storage.checkpoint.metadata import METADATA, check_metadata, read_metadata
from glm46.storage.checkpoint.stored_values import StoredTensor
from glm46.storage.huggingface.names import Form, HFNames, listed

_WRAPPERS = re.compile(r"(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
"""Parts of names that torch's module wrappers add."""
_ANCHOR = {Form.PER_EXPERT: "model.embed_tokens.weight", Form.OURS: "embed_tokens.weight"}
"""Name, in each form, of a weight that every model has."""
_OF_OPTIMIZER = re.compile(r"(^|\.)(optim\w*|exp_avg\w*|momentum_buffer|param_groups|lr_scheduler\w*)(\.|$)")


class DcpFolder:
    """The tensors of a folder that are weights of a model of this shape, with the interface of one file. Raises
    UserError if the index is missing, damaged or of another kind, or holds no such weights.

    Attributes:
        records: type and shape by name in `form`.
        form: form of the names.
        note: text for the user about the loaded and the skipped entries.
        bytes_moved: bytes read so far.
    """

    def __init__(self, folder: Path, shape: ModelShape):
        self._folder = folder
        self.bytes_moved = 0
        metadata, faults = read_metadata(folder)
        raise_if(faults)
        assert metadata is not None, "or there is a fault"
        self._metadata = metadata
        stored = {_WRAPPERS.sub("", name): name for name in self._metadata.state_dict_metadata}
        self.form, prefix = _form_and_prefix(folder, stored, shape)
        roots = {part.partition(".")[0] for part in HFNames(shape, repeat_shared=True, form=self.form).places}
        self._stored = {
            name.removeprefix(prefix): stored_name
            for name, stored_name in stored.items()
            if name.startswith(prefix)
            and name.removeprefix(prefix).partition(".")[0] in roots
            and isinstance(self._metadata.state_dict_metadata[stored_name], TensorStorageMetadata)
        }
        texts = [(path, known_fault(path, allowed=b"pk\x03\x04")) for path in self.files[1:]]
        raise_if([f"{path}: {fault}" for path, fault in texts if fault is not None])
        files = {path.name: FileRecord(path.stat().st_size, "") for path in folder.iterdir() if path.is_file()}
        raise_if(check_metadata(folder, self._metadata, files, list(self._stored.values())))
        entries: dict[str, Any] = {
            name: self._metadata.state_dict_metadata[stored_name] for name, stored_name in self._stored.items()
        }
        self.records = {name: Record(entry.properties.dtype, tuple(entry.size), 0) for name, entry in entries.items()}
        self.note = _note(folder, prefix, self.form, set(stored.values()) - set(self._stored.values()))

    @property
    def files(self) -> list[Path]:
        """The files of the folder that hold the index and tensors."""
        return [self._folder / METADATA, *sorted(self._folder.glob("*.distcp"))]

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box of a tensor as a new tensor on the CPU. Raises OSError if a file ends early, or the disk fails."""
        stored = StoredTensor(self._folder, self._metadata, self._stored[name])
        values = stored[tuple(slice(start, start + length) for start, length in box)]
        self.bytes_moved += values.nbytes
        return values

    def fill(self, name: str, box: Box, target: Tensor) -> None:
        """Read a box of a tensor into an existing tensor of any type, device and strides."""
        target.copy_(self.read(name, box))

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""


def _form_and_prefix(folder: Path, stored: Iterable[str], shape: ModelShape) -> tuple[Form, str]:
    """Return the form and the prefix of names with which the most weights of the model are found."""
    names = set(stored)
    candidates: list[tuple[int, int, Form, str]] = []
    for form in Form:
        anchor = _ANCHOR.get(form, _ANCHOR[Form.PER_EXPERT])
        prefixes = {name.removesuffix(anchor) for name in names if name == anchor or name.endswith(f".{anchor}")}
        expected = HFNames(shape, repeat_shared=False, form=form).places if prefixes else {}
        candidates += [
            (sum(prefix + name not in names for name in expected), len(prefix), form, prefix) for prefix in prefixes
        ]
    if not candidates:
        raise UserError(
            f"{folder}: holds no weights of GLM-4.5/4.6 by the names of Hugging Face or glm46, such as "
            f"{_ANCHOR[Form.PER_EXPERT]}, but {listed(sorted(names))}; save the state dict by such names"
        )
    _, _, form, prefix = min(candidates, key=lambda candidate: candidate[:2])
    return form, prefix


def _note(folder: Path, prefix: str, form: Form, others: set[str]) -> str:
    optimizer_entries = {name for name in others if _OF_OPTIMIZER.search(name)}
    skipped = [f"{len(optimizer_entries)} entries of its optimizer"] if optimizer_entries else []
    if unused := sorted(others - optimizer_entries):
        skipped.append(listed(unused))
    location = f" under {prefix!r}" if prefix else ""
    return (
        f"{folder}: written by another program, without a manifest, so its weights are loaded unverified ({form.value}"
        f"{location})" + (f"; not loaded: {' and '.join(skipped)}" if skipped else "")
    )
