"""What a checkpoint of a run holds, and how a run starts: anew, from an earlier phase, or where it stopped."""

from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.checkpoint.metadata import read_metadata
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import dump_run
from glm46.data.tokenizer import TOKENIZER_KEY
from glm46.training.build import Parts
from glm46.training.data_stream import read
from glm46.training.hf_weights import load_weights
from glm46.training.selection import names_left_out
from glm46.training.state import Progress


def checkpoint_tensors(parts: Parts) -> dict[str, Tensor]:
    """Every tensor that a run must find again, by name; loading writes into these very tensors."""
    model = parts.parameters | parts.buffers()
    named = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
    named |= {f"optimizer.{name}": tensor for name, tensor in parts.optimizer.state_tensors().items()}
    named |= {f"balance.{name}": tensor for name, tensor in parts.balance.state_tensors().items()}
    return named | _rng_states(parts)


def _rng_states(parts: Parts) -> dict[str, Tensor]:
    """Copies of this rank's generators; the rank is in the name, because they may differ."""
    states = {f"rng.{parts.process.rank}.cpu": torch.get_rng_state()}
    if parts.process.device.type == "cuda":
        states[f"rng.{parts.process.rank}.cuda"] = torch.cuda.get_rng_state(parts.process.device)
    return states


def checkpoint_meta(parts: Parts, progress: Progress, validation: dict[str, float]) -> dict[str, Any]:
    """Everything beside the tensors, as JSON."""
    return {
        "progress": asdict(progress),
        "config": dump_run(parts.run),
        "stream": parts.stream_fingerprint(),
        TOKENIZER_KEY: parts.tokenizer.fingerprint,
        "read": read(parts, progress),
        "validation": validation,
    }


def start(parts: Parts) -> tuple[Progress, dict[str, Any] | None]:
    """Bring the parts to where the run goes on; collective.

    Returns:
        The progress, and the checkpoint's meta data, None when the weights are the initial ones.

    Raises:
        UserError: the checkpoint does not fit the model, or the data is not the data it was trained on.
    """
    config = parts.run.checkpoint
    fresh = Progress(curriculum_tokens=parts.run.lr_scheduler.start_tokens)
    if config.enable:
        step = parts.checkpoints.newest() if config.load_step == -1 else config.load_step
        if step is not None:
            meta = _load(parts, step)
            if meta["stream"] != parts.stream_fingerprint():
                raise UserError(
                    f"{parts.checkpoints.folder}: the checkpoint of step {step} was trained on other data, or in "
                    "another order (data.sources, data.stages, training.seq_len or debug.seed changed); restore them, "
                    "or set another job.dump_folder and checkpoint.initial_load_path to this checkpoint"
                )
            return Progress(**meta["progress"]), meta
    if config.initial_load_path is None:
        return fresh, None
    path = Path(config.initial_load_path)
    if not path.is_dir():
        kind = "Hugging Face" if config.initial_load_in_hf else "step"
        raise UserError(f"checkpoint.initial_load_path = {str(path)!r}: no such folder; give a {kind} folder")
    if config.initial_load_in_hf:
        load_weights(parts, path)
        return fresh, None
    if not path.resolve().name.removeprefix("step-").isdigit():
        raise UserError(
            f"checkpoint.initial_load_path = {str(path)!r}: not a step folder; give one such as "
            "outputs/debug/checkpoint/step-000100, or set checkpoint.initial_load_in_hf = true for a Hugging Face one"
        )
    meta = _load(parts, path.resolve(), ignored=_left_out(parts, path.resolve()))
    if not config.initial_load_model_only:
        # Text that the phase before has read does not come again.
        fresh.read_before = meta.get("read", [])
    return fresh, meta


def roll_back(parts: Parts, progress: Progress) -> tuple[Progress, dict[str, Any]]:
    """Bring the parts back to the last good checkpoint before a row of skipped steps, whose samples are then left out;
    collective.

    Raises:
        UserError: the run may not, or no more, or there is no such checkpoint.
    """
    training = parts.run.training
    cause = (
        f"training.max_skipped_steps = {training.max_skipped_steps}: {counted(progress.skipped_in_a_row, 'step')} in a "
        f"row, {progress.bad_since_step} to {progress.step}, had a spike or a non-finite loss or gradient norm"
    )
    remedy = "lower optimizer.lr, or look at the samples named in log.txt"
    if progress.rollbacks >= training.max_rollbacks:
        after = f" after {progress.rollbacks} of training.max_rollbacks = {training.max_rollbacks}"
        raise UserError(f"{cause}{after if progress.rollbacks else ''}; {remedy}")
    step = parts.checkpoints.newest(before=progress.bad_since_step) if parts.run.checkpoint.enable else None
    if step is None:
        raise UserError(f"{cause}, and no checkpoint of an earlier step is there to go back to; {remedy}")
    meta = _load(parts, step)
    return progress.roll_back(Progress(**meta["progress"])), meta


def _left_out(parts: Parts, folder: Path) -> frozenset[str]:
    """Names of tensors that this run does not take from the step folder of another; the same on all ranks."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(checkpoint_tensors(parts)))  # stages of a pipeline hold different ones
    metadata, faults = read_metadata(folder)
    if metadata is None:
        raise UserError(*faults)
    ours = {name for names in held for name in names if not name.startswith("rng.")}
    theirs = {name for name in metadata.state_dict_metadata if not name.startswith("rng.")}
    return names_left_out(ours, theirs, parts.run.checkpoint)


def _load(parts: Parts, source: int | Path, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Fill the parts, without the names to ignore, from a step of this run, or from the step folder of another."""
    tensors = {name: tensor for name, tensor in checkpoint_tensors(parts).items() if name not in ignored}
    load = parts.checkpoints.load if isinstance(source, int) else parts.checkpoints.load_from
    # Another number of ranks has other generators; nothing that decides a result draws from them.
    meta = load(source, tensors, optional=("rng.",), ignored=(*ignored, "rng."))
    rank = parts.process.rank
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"])
    if f"rng.{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng.{rank}.cuda"], parts.process.device)
    return meta
