"""The comparison of a model with this machine, before it is downloaded, read or given to ranks; without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from glm46.compute.distributed.environment import visible_gpus
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.model import ModelShape
from glm46.config.section import is_hub_address
from glm46.engine.inference.stored_model import StoredModel, alignment_faults, stored_model
from glm46.files.local_disk import space_fault
from glm46.operate.estimate.machine import Machine, detect_machine
from glm46.operate.estimate.memory import FP32, PROCESS_BYTES
from glm46.operate.estimate.other_networks import inference_bytes
from glm46.operate.estimate.requirement import USABLE_CPU_RATIO, compare_memory, usable_bytes
from glm46.operate.launch.ranks import degrees_of, processes
from glm46.run.checkpoint_size import WIDTHS
from glm46.run.layout import generation_layout
from glm46.run.parameters import named_rows
from glm46.storage.huggingface.hub import config_folder

_SOURCES = {"to_hf": "checkpoint", "from_hf": "model", "from_dcp": "config", "merge": "base"}
"""Option that describes the model, by the kind of the conversion."""
_LEAST_WIDTHS = {**WIDTHS, "int4": 0.5}
"""Bytes of a weight; of the other types, and where the base has it, one of FP8."""
_COPIES = 2
"""Of one tensor at a time: the next one is read while it is written, or it is in both types."""


def is_on_hub(stated: Path | str | None) -> bool:
    """True if an option names a repository of the hub."""
    return stated is not None and is_hub_address(str(stated))


def find_model(folder: Path) -> StoredModel | None:
    """The model in a folder. Of the hub only config.json is fetched; None if it cannot be had, of which the download of
    the whole folder says why.

    Raises:
        UserError: the folder holds no model, or its description is damaged.
    """
    place = config_folder(folder) if is_on_hub(folder) else folder
    return None if place is None else stored_model(place)


def require_fit(
    arguments: argparse.Namespace, shapes: Sequence[ModelShape], *, drafts: bool, rows: int = 0, length: int = 0
) -> None:
    """Compare models that are in memory at the same time with this machine.

    Args:
        arguments: of `launch.ranks.add_model_options`.
        shapes: of the model of these options, then of others.
        drafts: with the prediction layers.
        rows: sequences in the cache of keys and values, of all processes.
        length: tokens of each.

    Raises:
        UserError: a degree does not fit, a model cannot run in this type, or the GPUs or the memory are too few.
    """
    folder, count = arguments.model or arguments.checkpoint, processes(arguments)
    machine = detect_machine(visible_gpus())
    if (arguments.device or "").startswith("cpu"):
        machine = replace(machine, gpus=())
    dtype = arguments.dtype or ("bfloat16" if machine.gpus else "float32")
    needed = 0.0
    for shape in shapes:
        if faults := alignment_faults(folder, shape, dtype):
            raise UserError(*faults)
        layout = generation_layout(degrees_of(arguments, shape, count), count)
        share = -(-rows // layout.dp_degree)
        needed += inference_bytes(shape, layout, dtype, drafts=drafts, rows=share, length=length)
    if faults := memory_faults(machine, needed, count):
        less = ", --dtype bfloat16" * (dtype == "float32") + ", or fewer and shorter rows" * (rows > 0)
        remedy = f"split it over more GPUs with --nproc and the degrees{less}; or take another machine"
        raise UserError(*(f"{folder}: this machine cannot run it in {dtype}: {fault}; {remedy}" for fault in faults))


def require_conversion(arguments: argparse.Namespace) -> None:
    """Compare what a conversion holds and writes at least with the memory and the disk. Prediction layers, which the
    files may lack, are not counted. Where the model cannot be described, the conversion says why.

    Args:
        arguments: of ``convert``, its models not fetched yet.

    Raises:
        UserError: the memory or the disk is too little.
    """
    if (option := _SOURCES.get(arguments.kind)) is None:
        return
    folder = getattr(arguments, option)
    try:
        model = find_model(folder)
    except UserError:
        return
    if model is None:
        return
    shape = model.shape.model_copy(update={"num_nextn_predict_layers": 0})
    dtype, is_import = arguments.dtype or "bfloat16", arguments.kind.startswith("from")
    rows, width = named_rows(shape).values(), _LEAST_WIDTHS.get(dtype, 1)
    # Experts are stacked in a step folder, and apart in a Hugging Face folder.
    largest = max(row.numel(shape) if is_import else prod(row.hf_shape(shape)) for row in rows)
    faults = []
    if arguments.kind != "merge":  # it reads some rows at a time
        held = _COPIES * largest * WIDTHS.get(dtype, FP32)
        machine = replace(detect_machine(visible_gpus()), gpus=())
        faults = [
            f"{folder}: this machine cannot convert it: {fault}; take another machine, or correct its description"
            for fault in memory_faults(machine, held)
        ]
    least = 1 if arguments.kind == "merge" and arguments.dtype is None else width
    if not faults and (fault := space_fault(arguments.output, least * sum(row.numel(shape) for row in rows))):
        faults = [fault]
    raise_if(faults)


def memory_faults(machine: Machine, needed: float, processes: int = 1) -> list[str]:
    """Lines that say what of this machine is too little for equal processes.

    Args:
        machine: without its GPUs if the processes run on the CPU.
        needed: bytes of tensors of each process.
    """
    if not machine.gpus:
        who = f"{processes:,} processes need" if processes > 1 else "one process needs"
        usable, free = machine.free_bytes * USABLE_CPU_RATIO, machine.free_bytes
        fits, text = compare_memory(who, (needed + PROCESS_BYTES["cpu"]) * processes, usable, free)
        return [] if fits else [text]
    faults = []
    if processes > len(machine.gpus):
        faults.append(f"it needs {counted(processes, 'GPU')}, one for each process; found: {len(machine.gpus)}")
    sizes = [gpu.memory_bytes for gpu in machine.gpus if gpu.memory_bytes is not None]
    if sizes:
        least = min(sizes)
        fits, text = compare_memory("each GPU needs", needed + PROCESS_BYTES["gpu"], usable_bytes(least), least)
        faults += [] if fits else [text]
    return faults
