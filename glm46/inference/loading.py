"""Loading of a whole model for inference on one device, from a step folder or a Hugging Face folder."""

from pathlib import Path

import tomli
import torch

from glm46.checkpoint.finite import describe, names_not_finite
from glm46.checkpoint.integrity import MANIFEST, published_steps, step_folder
from glm46.checkpoint.step_tensors import StepTensors
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.config.rules_model import unaligned_experts
from glm46.data.tokenizer import TOKENIZER_KEY, Tokenizer, tokenizer_of_checkpoint
from glm46.huggingface.config_json import CONFIG
from glm46.huggingface.import_weights import FolderReader, stored_shape
from glm46.huggingface.names import raise_if
from glm46.model.transformer import Transformer


def load_for_inference(
    folder: Path, *, tokenizer: str | None, dtype: torch.dtype, device: torch.device
) -> tuple[Transformer, Tokenizer]:
    """Load a model in evaluation mode, and its tokenizer.

    Args:
        folder: a step folder, or a Hugging Face folder (with a config.json).
        tokenizer: tokenizer file or folder; None: the one that the folder names or holds.
        dtype: of the weights; selection biases are always FP32.

    Raises:
        UserError: the folder is neither, or damaged, its shape cannot run in this type, or there is no tokenizer.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'is a file; give its folder' if folder.exists() else 'no such folder'}")
    if not any((folder / name).is_file() for name in (CONFIG, MANIFEST)):
        known = published_steps(folder)
        hint = f"; it holds steps; give one of them, such as {step_folder(folder, known[-1])}" if known else ""
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
    raise_if(_alignment_faults(folder, shape, dtype))
    with FolderReader(folder, shape) as reader:
        model = _empty(shape, dtype, device)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            raise_if(reader.fill(name, tensor, [torch.arange(size) for size in tensor.shape]))
    return model, str(folder), None


@torch.no_grad()
def _from_step(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Transformer, str, str | None]:
    tensors = StepTensors(folder)
    config, shape = tomli.loads(tensors.meta["config"]), tensors.shape
    if "adapter" in config:
        raise UserError(
            f"{folder}: holds adapters without their base, {config['checkpoint']['initial_load_path']}; convert them "
            "with adapter-to-hf, then give the base, and the new folder with --adapter"
        )
    table = config["model"]
    raise_if(_alignment_faults(folder, shape, dtype))
    model = _empty(shape, dtype, device)
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    raise_if([f"{folder}: lacks {name}" for name in own if name not in tensors])
    for name, tensor in own.items():
        tensor.copy_(tensors[name])
    if names := names_not_finite(own):
        raise UserError(f"{folder}: {describe(names)}: its training diverged; take an earlier step")
    return model, table.get("tokenizer_path", "builtin"), tensors.meta.get(TOKENIZER_KEY)


def _alignment_faults(folder: Path, shape: ModelShape, dtype: torch.dtype) -> list[str]:
    """Widths of experts that cannot run in this type. Conversion takes them."""
    fits_float32 = not any(unaligned_experts(shape, "float32"))
    remedy = "use float32" if fits_float32 else "this folder can be converted, but not run"
    faults = unaligned_experts(shape, str(dtype).removeprefix("torch."))
    return [f"{folder}: {fault}; {remedy}" for _, _, fault in faults]


def _empty(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Transformer:
    with torch.device("meta"):
        model = Transformer(shape)
    return model.cast(dtype).to_empty(device=device)
