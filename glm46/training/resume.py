"""What a checkpoint of a run holds, and how a run starts: anew, from an earlier phase, or where it stopped."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.checkpoint.integrity import step_folder
from glm46.checkpoint.metadata import read_metadata
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.config.loader import dump_config
from glm46.config.run_config import RunConfig
from glm46.data.tokenizer import TOKENIZER_KEY
from glm46.distributed.collective_errors import on_first_rank, run_on_all_ranks
from glm46.reliability.stop import Diverged
from glm46.training.build import Parts
from glm46.training.data_stream import read
from glm46.training.hf_weights import load_weights
from glm46.training.origin import TENSOR_KEYS, TEXT_KEYS, differences
from glm46.training.selection import names_left_out
from glm46.training.state import Progress

_FAULTS_SHOWN = 3


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
        "config": dump_config(parts.config),
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
    config = parts.config.checkpoint
    fresh = Progress(curriculum_tokens=parts.config.lr_scheduler.start_tokens)
    if config.enable:
        step = parts.checkpoints.newest() if config.load_step == -1 else config.load_step
        if step is not None:
            meta = _load(parts, step)
            if meta["stream"] != parts.stream_fingerprint():
                raise UserError(*on_first_rank(_other_text(parts.config, step_folder(parts.checkpoints.folder, step))))
            return Progress(**meta["progress"]), meta
    if config.initial_load_path is None:
        return fresh, None
    path = Path(config.initial_load_path)
    if config.initial_load_in_hf:
        run_on_all_ranks(lambda: load_weights(parts, path))
        return fresh, None
    meta = _load(parts, path.resolve(), ignored=_left_out(parts, path.resolve()))
    if not config.initial_load_model_only:
        # Text that the phase before has read does not come again.
        fresh.read_before = meta.get("read", [])
    return fresh, meta


def roll_back(parts: Parts, progress: Progress) -> tuple[Progress, dict[str, Any]]:
    """Bring the parts back to the last good checkpoint before a row of skipped steps, or before weights or states went
    bad. The samples of the row are left out from then on, or those of all steps that may have spoilt the weights.
    Collective.

    Raises:
        Diverged: the run may not, or no more, or there is no such checkpoint.
    """
    training = parts.config.training
    parts.checkpoints.abandon_saves()
    spoilt = parts.checkpoints.not_finite(checkpoint_tensors(parts))
    causes = []
    if progress.skipped_in_a_row:
        skipped = counted(progress.skipped_in_a_row, "step")
        causes.append(
            f"training.max_skipped_steps = {training.max_skipped_steps}: {skipped} in a row, {progress.bad_since_step} "
            f"to {progress.step}, had a spike or a non-finite loss or gradient norm"
        )
    if spoilt:
        causes.append(f"after step {progress.step} {spoilt}")
    cause = "; ".join(causes)
    if progress.rollbacks >= training.max_rollbacks:
        after = f" after {progress.rollbacks} of training.max_rollbacks = {training.max_rollbacks}"
        raise Diverged(*on_first_rank(f"{cause}{after if progress.rollbacks else ''}; {Diverged.remedy}"))
    before = progress.bad_since_step if progress.skipped_in_a_row else progress.step
    step = parts.checkpoints.newest(before=before) if parts.config.checkpoint.enable else None
    if step is None:
        raise Diverged(
            *on_first_rank(f"{cause}, and no checkpoint of an earlier step is there to go back to; {Diverged.remedy}")
        )
    meta = _load(parts, step)
    earlier = Progress(**meta["progress"])
    return progress.roll_back(earlier, earlier.samples if spoilt else progress.bad_since_sample), meta


def _explained(faults: Sequence[str], config: RunConfig, folder: Path) -> list[str]:
    """The keys behind faults of a load, with a remedy, then the first of the faults: a changed key has hundreds."""
    text = "\n".join(faults)
    parts_of_keys = {"optimizer.": "optimizer.", "moe.": "balance."}
    keys = [key for key in TENSOR_KEYS if parts_of_keys.get(key.partition(".")[0] + ".", "") in text]
    if config.checkpoint.initial_load_path and Path(config.checkpoint.initial_load_path).resolve() == folder:
        remedy = "restore it, or leave out what does not fit with checkpoint.initial_load_exclude"
    else:
        remedy = "restore it, or set another job.dump_folder, with checkpoint.initial_load_path to take what fits"
    more = [f"and {len(faults) - _FAULTS_SHOWN} more tensors"] if len(faults) > _FAULTS_SHOWN else []
    causes = [f"{line}; {remedy}" for line in differences(tuple(keys), config, folder)]
    return [*causes, *faults[:_FAULTS_SHOWN], *more]


def _other_text(config: RunConfig, folder: Path) -> str:
    changed = "; ".join(differences(TEXT_KEYS, config, folder))
    return (
        f"{changed or 'data.sources: the shards hold other text than before'}. The checkpoint of {folder} was trained "
        "on other data, or in another order; restore it, or start anew from its weights: set another job.dump_folder "
        f"and checkpoint.initial_load_path = {str(folder)!r}"
    )


def _left_out(parts: Parts, folder: Path) -> frozenset[str]:
    """Names of tensors that this run does not take from the step folder of another; the same on all ranks."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, list(checkpoint_tensors(parts)))  # stages of a pipeline hold different ones
    metadata, faults = read_metadata(folder)
    if metadata is None:
        raise UserError(*faults)
    ours = {name for names in held for name in names if not name.startswith("rng.")}
    theirs = {name for name in metadata.state_dict_metadata if not name.startswith("rng.")}
    return names_left_out(ours, theirs, parts.config.checkpoint)


def _load(parts: Parts, source: int | Path, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Fill the parts, without the names to ignore, from a step of this run, or from the step folder of another."""
    tensors = {name: tensor for name, tensor in checkpoint_tensors(parts).items() if name not in ignored}
    load = parts.checkpoints.load if isinstance(source, int) else parts.checkpoints.load_from
    # Another number of ranks has other generators; nothing that decides a result draws from them.
    try:
        meta = load(source, tensors, optional=("rng.",), ignored=(*ignored, "rng."))
    except UserError as error:
        folder = source if isinstance(source, Path) else step_folder(parts.checkpoints.folder, source)
        raise UserError(*on_first_rank(*_explained(error.faults, parts.config, folder))) from None
    rank = parts.process.rank
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"])
    if f"rng.{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng.{rank}.cuda"], parts.process.device)
    return meta
