"""The options of verbs that run a model: which one, in which type, on which device, on which ranks."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from glm46.commands.ranks import add_rank_options, mesh_of
from glm46.config.errors import UserError
from glm46.distributed.ranks import ALONE
from glm46.huggingface.adapter_origin import require_base
from glm46.huggingface.peft_folder import AdapterFolder
from glm46.inference.loading import Loaded, load_on_mesh


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--model`` or ``--checkpoint``, ``--adapter``, ``--tokenizer``, ``--dtype``, ``--device`` and the options of
    ranks."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, help="Hugging Face folder, or hf://owner/name of the hub")
    source.add_argument("--checkpoint", type=Path, help="step folder, such as …/checkpoint/step-000100")
    parser.add_argument(
        "--adapter", type=Path, help="PEFT folder, of LoRA or DoRA, that is added to the weights, or hf://…"
    )
    parser.add_argument("--tokenizer", help="tokenizer file or folder, or hf://…; default: the model's own")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--device", help="such as cpu or cuda:0; default: a GPU where there is one")
    add_rank_options(parser)


def load_model(arguments: argparse.Namespace, *, drafts: bool = True) -> Loaded:
    """The model of these options, its tokenizer and its mesh. Adapters are added with one rounding. Collective.

    Args:
        drafts: with the prediction layers; one process always has them.

    Raises:
        UserError: the device does not exist, a folder cannot be used, the adapter belongs to another base, or the
            degrees do not fit.
    """
    device = _device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    folder = arguments.model or arguments.checkpoint
    if arguments.adapter is not None:
        if dist.is_initialized():
            raise UserError(
                f"--adapter {arguments.adapter}: is added in one process only; merge it with convert adapter-to-hf"
            )
        require_base(folder, arguments.adapter, ALONE)
    loaded = load_on_mesh(
        folder,
        lambda shape: mesh_of(arguments, shape, device.type),
        tokenizer=arguments.tokenizer,
        dtype=dtype,
        device=device,
        drafts=drafts or not dist.is_initialized(),
    )
    if arguments.adapter is not None:
        with AdapterFolder(arguments.adapter, loaded.model.shape) as products, torch.no_grad():
            products.merge_into(dict(loaded.model.named_parameters()))
    return loaded


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: unknown device; use cpu, or cuda:0 for the first GPU") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: glm46 runs on cpu and cuda; use one of them")
    gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(f"--device {name}: torch finds {gpus} GPUs on this machine; use cpu")
    return device
