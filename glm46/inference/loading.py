"""A model for inference from a step folder or a Hugging Face folder, whole on one device."""

from pathlib import Path

import tomli
import torch

from glm46.checkpoint.integrity import MANIFEST
from glm46.checkpoint.publish import published_steps, step_folder
from glm46.checkpoint.step_tensors import StepTensors
from glm46.config.errors import UserError
from glm46.config.model import Model, ModelShape
from glm46.config.presets import resolve_shape
from glm46.data.tokenizer import TOKENIZER_KEY, Tokenizer, tokenizer_of_checkpoint
from glm46.huggingface.config_json import CONFIG
from glm46.huggingface.import_weights import FolderReader, stored_shape
from glm46.huggingface.names import raise_if
from glm46.model.transformer import Transformer


def load_for_inference(
    folder: Path, *, tokenizer: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[Transformer, Tokenizer]:
    """The model in evaluation mode and its tokenizer.

    Args:
        folder: a step folder, or a Hugging Face folder (it has a config.json).
        tokenizer: None takes the one that the folder names or holds.

    Raises:
        UserError: the folder is neither, or damaged, or there is no tokenizer.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'a file; give its folder' if folder.exists() else 'no such folder'}")
    if not any((folder / name).is_file() for name in (CONFIG, MANIFEST)):
        known = published_steps(folder)
        hint = f"; it holds steps, give one of them, such as {step_folder(folder, known[-1])}" if known else ""
        raise UserError(f"{folder}: neither a Hugging Face folder ({CONFIG}) nor a step folder ({MANIFEST}){hint}")
    load = _from_hugging_face if (folder / CONFIG).is_file() else _from_step
    model, known, fingerprint = load(folder, dtype, device)
    loaded = tokenizer_of_checkpoint(
        known, stated=tokenizer, fingerprint=fingerprint, vocab_size=model.shape.vocab_size
    )
    return model.eval(), loaded


@torch.no_grad()
def _from_hugging_face(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Transformer, str, str | None]:
    shape = stored_shape(folder)
    with FolderReader(folder, shape) as reader:
        model = _empty(shape, dtype, device)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            raise_if(reader.fill(name, tensor, [torch.arange(size) for size in tensor.shape]))
    return model, str(folder), None


@torch.no_grad()
def _from_step(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Transformer, str, str | None]:
    tensors = StepTensors(folder)
    table = tomli.loads(tensors.meta["config"])["model"]
    model = _empty(resolve_shape(Model.model_validate(table)), dtype, device)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    raise_if([f"{folder}: holds no {name}" for name in own if name not in tensors])
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    return model, table.get("tokenizer_path", "builtin"), tensors.meta.get(TOKENIZER_KEY)


def _empty(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Transformer:
    with torch.device("meta"):
        model = Transformer(shape)
    return model.cast(dtype).to_empty(device=device)
