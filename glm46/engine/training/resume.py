"""Contents of a checkpoint, and the starts of a run: new, from an earlier phase, resumed, or another run continued."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import on_first_rank, run_on_all_ranks
from glm46.compute.distributed.process import Process
from glm46.config.checkpoint import CheckpointConfig
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.loader import dump_config
from glm46.engine.reliability.stop import Diverged
from glm46.engine.training.frozen_weights import base_fault, load_frozen
from glm46.engine.training.hf_weights import load_adapters
from glm46.engine.training.network import TrainedNetwork
from glm46.engine.training.origin import CONTINUE_REMEDY, INITIAL_REMEDY, TENSOR_KEYS, differences
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task
from glm46.files.local_disk import real_path
from glm46.run.function import function_of_meta
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import step_folder, step_of
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata

_FAULTS_SHOWN = 3
BASES_KEY = "bases"
"""Key of a checkpoint's meta: `Network.frozen_files` of each network that has them."""


def checkpoint_tensors(task: Task) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name: those of every network that trains, and the random generators. The names of
    all networks but the main one begin with the network's. Loading writes into these tensors."""
    named: dict[str, Tensor] = {}
    main = next(iter(task.networks))
    for name in task.objectives:
        named |= task.networks[name].state_tensors("" if name == main else f"{name}.")
    return named | _rng_states(task.cluster.process)


def _rng_states(process: Process) -> dict[str, Tensor]:
    """States of this rank's random generators. Names contain the rank, because states may differ between ranks."""
    states = {f"rng.{process.rank}.cpu": torch.get_rng_state()}
    if process.device.type == "cuda":
        states[f"rng.{process.rank}.cuda"] = torch.cuda.get_rng_state(process.device)
    return states


def checkpoint_meta(task: Task, progress: Progress, validation: dict[str, float]) -> dict[str, Any]:
    """JSON content of a checkpoint besides the tensors."""
    main = next(iter(task.networks.values()))
    return {
        "progress": asdict(progress),
        "config": dump_config(task.plan.config),
        **main.function._replace(shape=task.plan.stage_after(progress.samples).shape).meta(),
        "stream": task.fingerprint(),
        "validation": validation,
        BASES_KEY: {name: network.frozen_files for name, network in task.networks.items() if network.frozen_files},
        **task.state(progress),
    }


def start(task: Task, checkpoints: CheckpointManager) -> tuple[Progress, dict[str, Any] | None]:
    """Load the state that the run starts from. Frozen weights, those under adapters and those of whole networks, are
    read first, from checkpoint.initial_load_path, at every start; of the others only the main one. Collective.

    Returns:
        The progress, and the metadata of the checkpoint; None if the run starts from initial or imported weights.

    Raises:
        UserError: the checkpoint does not match the model or the data.
    """
    config = task.plan.config.checkpoint
    torch.manual_seed(task.plan.config.debug.seed)  # torch's own is by chance, and checkpoints hold the states
    fresh = Progress(curriculum_tokens=task.plan.config.lr_scheduler.start_tokens)
    adapted = {name: network for name, network in task.networks.items() if network.is_adapted}
    frozen = {name: network for name, network in task.networks.items() if not isinstance(network, TrainedNetwork)}
    based = adapted | {n: of for n, of in frozen.items() if of.plan.config.checkpoint.initial_load_path is not None}
    of_base = [load_frozen(network, checkpoints) for network in based.values()]
    for network in adapted.values():
        network.loaded(new_adapters=True)
    if config.enable:
        source: int | Path | None = checkpoints.newest() if config.load_step == -1 else config.load_step
        if source is None and config.load_path is not None:
            source = real_path(config.load_path)
        if source is not None:
            meta = _resume(task, checkpoints, source)
            folder = _folder_of(source, checkpoints)
            for name, network in based.items():
                known, read = meta[BASES_KEY].get(name, {}), task.plan.config.read_weights
                if (fault := base_fault(network, folder, known, read)) is not None:
                    raise UserError(*on_first_rank(fault))
            if meta["stream"] != task.fingerprint():
                raise UserError(*on_first_rank(_other_text(task, folder)))
            return Progress(**meta["progress"]), meta
    if adapted:
        for network in adapted.values():
            load_adapters(network)
        return fresh, of_base[0]
    if config.initial_load_path is None:
        return fresh, None
    path = Path(config.initial_load_path)
    if config.initial_load_in_hf or kind_of(path) is Kind.DCP:
        run_on_all_ranks(lambda: task.load_exported(path))
        return fresh, None
    ignored = _names_not_loaded(task, real_path(path))
    meta = _load(task, checkpoints, real_path(path), ignored=ignored)
    main = next(iter(task.networks.values()))
    main.take_gates(meta, {name for name in main.weights() if f"model.{name}" not in ignored})
    if not config.initial_load_model_only:
        # Text that the earlier phase has read is not read again.
        fresh.read_before = meta.get("read", [])
    return fresh, meta


def roll_back(task: Task, checkpoints: CheckpointManager, progress: Progress) -> tuple[Progress, dict[str, Any]]:
    """Load the last good checkpoint before a row of skipped steps, or before weights or states became non-finite. The
    samples of that row, or of all steps after the checkpoint, are excluded from then on. Collective.

    Raises:
        Diverged: rollbacks are disabled, their limit is reached, or there is no earlier checkpoint.
    """
    training = task.plan.config.training
    checkpoints.abandon_saves()
    non_finite = checkpoints.not_finite(checkpoint_tensors(task))
    causes = []
    if progress.skipped_in_a_row:
        skipped = counted(progress.skipped_in_a_row, "step")
        causes.append(
            f"training.max_skipped_steps = {training.max_skipped_steps}: {skipped} in a row, {progress.bad_since_step} "
            f"to {progress.step}, had a spike or a non-finite loss or gradient norm"
        )
    if non_finite:
        causes.append(f"after step {progress.step} {non_finite}")
    cause = "; ".join(causes)
    if progress.rollbacks >= training.max_rollbacks:
        after = f" after {progress.rollbacks} of training.max_rollbacks = {training.max_rollbacks}"
        raise Diverged(*on_first_rank(f"{cause}{after if progress.rollbacks else ''}; {Diverged.remedy}"))
    before = progress.bad_since_step if progress.skipped_in_a_row else progress.step
    config = task.plan.config.checkpoint
    source: int | Path | None = checkpoints.newest(before=before) if config.enable else None
    if source is None and config.load_path is not None:
        folder = real_path(config.load_path)
        step = step_of(folder)
        source = folder if step is not None and step < before else None
    if source is None:
        raise Diverged(
            *on_first_rank(f"{cause}, and there is no checkpoint of an earlier step to go back to; {Diverged.remedy}")
        )
    meta = _resume(task, checkpoints, source)
    earlier = Progress(**meta["progress"])
    first_bad_sample = earlier.samples if non_finite else progress.bad_since_sample
    return progress.rolled_back_to(earlier, first_bad_sample), meta


def _explained(faults: Sequence[str], task: Task, folder: Path) -> list[str]:
    """Changed keys that explain the faults of a load, with a remedy, then the first few of the faults."""
    text, config = "\n".join(faults), task.plan.config
    parts_of_keys = {"optimizer.": "optimizer.", "moe.": "balance."}
    keys = [key for key in TENSOR_KEYS if parts_of_keys.get(key.partition(".")[0] + ".", "") in text]
    if _is_at(config.checkpoint.load_path, folder):
        remedy = CONTINUE_REMEDY
    elif _is_at(config.checkpoint.initial_load_path, folder):
        remedy = INITIAL_REMEDY
    else:
        remedy = "restore it, or set another job.dump_folder, with checkpoint.initial_load_path to load what matches"
    more = [f"and {len(faults) - _FAULTS_SHOWN} more tensors"] if len(faults) > _FAULTS_SHOWN else []
    causes = [f"{line}; {remedy}" for line in differences(tuple(keys), config, folder)]
    if not causes and _is_at(config.checkpoint.load_path, folder):
        key = f"checkpoint.load_path = {config.checkpoint.load_path!r}"
        faults = [f"{key}: {fault}; restore the folder, or give another one" for fault in faults]
    return [*causes, *faults[:_FAULTS_SHOWN], *more]


def _is_at(path: str | None, folder: Path) -> bool:
    return path is not None and real_path(path) == folder


def _folder_of(source: int | Path, checkpoints: CheckpointManager) -> Path:
    return source if isinstance(source, Path) else step_folder(checkpoints.folder, source)


def _other_text(task: Task, folder: Path) -> str:
    changed = "; ".join(differences(task.identity_keys, task.plan.config, folder))
    return (
        f"{changed or task.other_text}. The checkpoint of {folder} was trained "
        "on other data, or in another order; restore it, or start a new run from its weights: set another "
        f"job.dump_folder and checkpoint.initial_load_path = {str(folder)!r}"
    )


def _names_not_loaded(task: Task, folder: Path) -> frozenset[str]:
    """Names of tensors that this run does not load from the step folder of another run. Collective."""
    held = [list(checkpoint_tensors(task))]
    if (pipeline := task.cluster.meshes.pipeline) is not None:  # its stages hold different ones
        dist.all_gather_object(held := held * dist.get_world_size(pipeline), held[0], group=pipeline)
    metadata, faults = read_metadata(folder)
    if metadata is None:
        raise UserError(*faults)
    ours = {name for names in held for name in names if not name.startswith("rng.")}
    theirs = {name for name in metadata.state_dict_metadata if not name.startswith("rng.")}
    _, *others = task.networks
    left = {name for name in ours | theirs if name.startswith(tuple(f"{other}." for other in others))}
    if task.keeps_prediction_layers:
        left |= {name for name in theirs if name.startswith("model.mtp.")}
    if task.plan.config.head == "value":  # the head of a reward model is new, or both are of one
        left |= {"model.lm_head.weight"} | {"model.value_head.weight"} - theirs
    return names_not_loaded(ours - left, theirs - left, task.plan.config.checkpoint) | left


def _resume(task: Task, checkpoints: CheckpointManager, source: int | Path) -> dict[str, Any]:
    """`_load` of all tensors, and the router temperature of the last step. Collective."""
    meta = _load(task, checkpoints, source)
    for name in task.objectives:
        task.networks[name].route_at(function_of_meta(meta).router_temperature)
    return meta


def _load(
    task: Task, checkpoints: CheckpointManager, source: int | Path, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Load all tensors except `ignored` from a step of this run, or from the step folder of another. Collective.

    Returns:
        The metadata of the checkpoint.
    """
    tensors = {name: tensor for name, tensor in checkpoint_tensors(task).items() if name not in ignored}
    # Optional: another number of ranks has other generators. No result depends on them.
    try:
        meta = checkpoints.load(source, tensors, optional=("rng.",), ignored=(*ignored, "rng."))
    except UserError as error:
        faults = _explained(error.faults, task, _folder_of(source, checkpoints))
        raise UserError(*on_first_rank(*faults)) from None
    rank = task.cluster.process.rank
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"])
    if f"rng.{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng.{rank}.cuda"], task.cluster.device)
    for network in task.networks.values():
        network.loaded(new_adapters=False)
    return meta


def names_not_loaded(ours: Iterable[str], theirs: Iterable[str], config: CheckpointConfig) -> frozenset[str]:
    """Names of this run's or the checkpoint's tensors that the [checkpoint] initial_load keys exclude.

    The optimizer state of an excluded weight is excluded too, because it belongs to other values of that weight.

    Args:
        ours: names of tensors of this run on all ranks, without random generators.
        theirs: names of tensors of the checkpoint, without random generators.

    Raises:
        UserError: a pattern matches no name, or nothing remains to load.
    """
    names = {*ours, *theirs}
    faults = [
        f"checkpoint.initial_load_exclude: {pattern!r} matches no tensor of this run or of {config.initial_load_path}; "
        "'python -m glm46 checkpoint show' lists the names"
        for pattern in config.initial_load_exclude
        if not _matching(names, [pattern])
    ]
    raise_if(faults)
    excluded = _matching(names, config.initial_load_exclude)
    if config.initial_load_model_only:
        excluded |= {name for name in names if not name.startswith("model.")}
    weights = tuple(f"optimizer.{name.removeprefix('model.')}." for name in excluded if name.startswith("model."))
    excluded |= {name for name in names if name.startswith(weights)}
    if excluded == names:
        raise UserError(
            f"checkpoint.initial_load_exclude: nothing of {config.initial_load_path} is loaded; "
            "loosen it, or remove initial_load_path"
        )
    return frozenset(excluded)


def _matching(names: set[str], patterns: Iterable[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}
