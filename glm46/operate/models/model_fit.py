"""Compares a model with this machine before it is downloaded or read. Does not import torch."""

import argparse
import ctypes
import re
from dataclasses import replace
from pathlib import Path

from glm46.compute.distributed.environment import visible_gpus
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.model import ModelShape
from glm46.engine.inference.stored_model import StoredModel, alignment_faults, stored_model
from glm46.operate.estimate.machine import Machine, detect_machine
from glm46.operate.estimate.memory import PROCESS_BYTES
from glm46.operate.estimate.other_networks import inference_bytes
from glm46.operate.estimate.requirement import USABLE_CPU_RATIO, compare_memory, usable_bytes
from glm46.operate.launch.ranks import degrees_of, processes
from glm46.run.layout import generation_layout
from glm46.storage.huggingface.hub import config_folder, is_remote


def is_on_hub(location: Path | str | None) -> bool:
    """True if an option names a repository on the Hugging Face Hub, or a folder of an object store."""
    return location is not None and is_remote(str(location))


def find_model(folder: Path) -> StoredModel | None:
    """Describe the model in a folder. For a model on the Hub only config.json is fetched; None if that fails, and for
    a folder of an object store: the download of the full folder reports the reason later.

    Raises:
        UserError: the folder contains no model, or its description is damaged.
    """
    place = config_folder(folder) if is_on_hub(folder) else folder
    return None if place is None else stored_model(place)


def require_fit(
    arguments: argparse.Namespace, shape: ModelShape, *, drafts: bool, rows: int = 0, length: int = 0
) -> None:
    """Check that a model fits in the memory of this machine.

    Args:
        arguments: parsed options of `launch.model_options.add_model_options`.
        shape: shape of the model.
        drafts: include the prediction layers.
        rows: sequences in the key-value cache, over all processes.
        length: tokens of each sequence.

    Raises:
        UserError: a degree does not fit, the model cannot run in this type, or there are too few GPUs or too little
            memory.
    """
    folder = arguments.model or arguments.checkpoint
    count = processes(arguments)
    machine = detect_machine(visible_gpus())
    is_certain = bool(machine.gpus) or not _has_driver()  # with a driver, torch may find GPUs that this did not
    if arguments.device is not None and is_certain:
        require_device(arguments.device, len(machine.gpus))
    if (arguments.device or "").startswith("cpu"):
        machine = replace(machine, gpus=())
    dtype = arguments.dtype or ("bfloat16" if machine.gpus else "float32")
    if faults := alignment_faults(folder, shape, dtype):
        raise UserError(*faults)
    layout = generation_layout(degrees_of(arguments, shape, count), count)
    share = -(-rows // layout.dp_degree)
    needed = inference_bytes(shape, layout, dtype, drafts=drafts, rows=share, length=length)
    if faults := memory_faults(machine, needed, count):
        less = ", --dtype bfloat16" * (dtype == "float32") + ", or fewer and shorter rows" * (rows > 0)
        remedy = f"split it over more GPUs with --nproc and the degrees{less}; or take another machine"
        raise UserError(*(f"{folder}: this machine cannot run it in {dtype}: {fault}; {remedy}" for fault in faults))


def require_device(device: str, gpus: int) -> None:
    """Check ``--device`` on a machine with this many GPUs.

    Raises:
        UserError: there is no such device.
    """
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device)
    if match is None:
        raise UserError(f"--device {device}: unknown device; use cpu, or cuda:0 for the first GPU")
    if match[1] == "cuda" and int(match[2] or 0) >= gpus:
        remedy = "use cuda:0 or another of them" if gpus else "use cpu"
        raise UserError(f"--device {device}: this machine has {counted(gpus, 'GPU')}; {remedy}")


def _has_driver() -> bool:
    """True if the GPU driver's library can be loaded; without it torch finds no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def memory_faults(machine: Machine, needed: float, processes: int = 1) -> list[str]:
    """Describe what this machine lacks for a number of equal processes; empty if everything fits.

    Args:
        machine: without its GPUs if the processes run on the CPU.
        needed: bytes of tensors in each process.
    """
    if not machine.gpus:
        who = f"{processes:,} processes need" if processes > 1 else "one process needs"
        usable = machine.free_bytes * USABLE_CPU_RATIO
        fits, text = compare_memory(who, (needed + PROCESS_BYTES["cpu"]) * processes, usable, machine.free_bytes)
        return [] if fits else [text]
    faults = []
    if processes > len(machine.gpus):
        faults.append(f"it needs {counted(processes, 'GPU')}, one for each process; found: {len(machine.gpus)}")
    sizes = [gpu.memory_bytes for gpu in machine.gpus if gpu.memory_bytes is not None]
    if sizes:
        min_bytes = min(sizes)
        fits, text = compare_memory("each GPU needs", needed + PROCESS_BYTES["gpu"], usable_bytes(min_bytes), min_bytes)
        faults += [] if fits else [text]
    return faults
