"""Loads the model that a verb's options name onto its ranks; see `launch.model_options.add_model_options`."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.environment import launched_world_size
from glm46.compute.distributed.process import join, leave
from glm46.compute.distributed.process_control import die_with_parent
from glm46.compute.distributed.ranks import ALONE
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.engine.inference.loading import Loaded, load_on_mesh
from glm46.engine.inference.model_mesh import ModelMesh, build_model_mesh
from glm46.operate.launch.ranks import degrees_of
from glm46.operate.models.model_fit import require_device
from glm46.run.layout import generation_layout
from glm46.storage.huggingface.adapter_origin import other_base_dtype, require_base
from glm46.storage.huggingface.peft_folder import AdapterFolder

_JOIN_SECONDS = 300

_Result = TypeVar("_Result")


def load_model(arguments: argparse.Namespace, *, drafts: bool = True) -> Loaded:
    """Load the model of these options, with tokenizer and mesh. Adapters are merged with one rounding. Collective.

    Args:
        drafts: load the prediction layers; a single process always loads them.

    Raises:
        UserError: the device does not exist, a folder cannot be used, the adapter belongs to another base, or the
            parallel degrees do not fit.
    """
    device_name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device_name, torch.cuda.device_count())
    device = torch.device(device_name)
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    folder = arguments.model or arguments.checkpoint
    if arguments.adapter is not None:
        if dist.is_initialized():
            raise UserError(
                f"--adapter {arguments.adapter}: is added in one process only; merge it with convert adapter-to-hf"
            )
        require_base(folder, arguments.adapter, ALONE)
        if difference := other_base_dtype(arguments.adapter, folder, None):
            remedy = "the values that training computed with are in the folder that convert merge makes"
            print(f"{arguments.adapter}: {difference}: {remedy}", file=sys.stderr)
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


@contextmanager
def joined(timeout_seconds: int = _JOIN_SECONDS) -> Iterator[None]:
    """Join the process group if this process was launched as a rank, and leave it at the end."""
    if launched_world_size() is None:
        yield
        return
    die_with_parent()
    join(timeout_seconds)
    try:
        yield
    finally:
        leave()


def on_all_ranks(work: Callable[[], _Result]) -> _Result:
    """Call ``work`` and return its result; with several ranks, a UserError on one is raised on all. Collective."""
    return run_on_all_ranks(work) if dist.is_initialized() else work()


def mesh_of(arguments: argparse.Namespace, shape: ModelShape, device_type: str) -> ModelMesh:
    """Build the mesh of ranks that hold a model with these options; see `degrees_of`. Collective."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return build_model_mesh(generation_layout(degrees_of(arguments, shape, size), size), rank, device_type)


def files_of(folders: Sequence[Path], ignored: Collection[str]) -> list[tuple[str, int, int]]:
    """Return name, size in bytes and modification time of each file in the folders, not of folders inside them.

    Args:
        ignored: names of files that are left out, such as results of an evaluation of the model.
    """
    paths = [path for folder in folders for path in sorted(folder.iterdir()) if path.name not in ignored]
    files = [(path, path.stat()) for path in paths if path.is_file()]
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files]


def digest(content: object) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
