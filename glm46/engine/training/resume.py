"""Contents of a checkpoint, and the start of a run: new, from an earlier phase, resumed, or continued from another
run."""

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
from glm46.compute.distributed.ranks import Ranks
from glm46.config.checkpoint import CheckpointConfig
from glm46.config.errors import UserError, raise_if
from glm46.config.faults import counted
from glm46.config.loader import dump_config
from glm46.engine.reliability.stop import Diverged
from glm46.engine.training.network import Network, TrainedNetwork
from glm46.engine.training.origin import CONTINUE_REMEDY, INITIAL_REMEDY, TENSOR_KEYS, differences
from glm46.engine.training.state import Progress
from glm46.engine.training.step_weights import StepWeights
from glm46.engine.training.task import Task
from glm46.engine.training.weight_source import WeightFolder, WeightSource
from glm46.files.local_disk import real_path
from glm46.run.function import function_of_meta
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import hash_files, step_folder, step_of
from glm46.storage.checkpoint.manager import CheckpointManager
from glm46.storage.checkpoint.metadata import read_metadata

_FAULTS_SHOWN = 3
BASES_KEY = "bases"
"""Key of a checkpoint's metadata for `Network.frozen_files` of each network that has frozen files."""


def checkpoint_tensors(task: Task) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by name: tensors of every trained network, and states of random generators.
    Tensors of networks other than the main one have the network's name as prefix. Loading writes into these tensors."""
    named: dict[str, Tensor] = {}
    main = next(iter(task.networks))
    for name in task.objectives:
        named |= task.networks[name].state_tensors("" if name == main else f"{name}.")
    return named | _rng_states(task.cluster.process)


def _rng_states(process: Process) -> dict[str, Tensor]:
    """Return the states of this rank's random generators. Names contain the rank, because ranks may differ."""
    states = {f"rng.{process.rank}.cpu": torch.get_rng_state()}
    if process.device.type == "cuda":
        states[f"rng.{process.rank}.cuda"] = torch.cuda.get_rng_state(process.device)
    return states


def checkpoint_meta(task: Task, progress: Progress, validation: dict[str, float]) -> dict[str, Any]:
    """Return the JSON content of a checkpoint, which is stored next to the tensors."""
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


def start(task: Task, checkpoints: CheckpointManager, weights: WeightSource) -> tuple[Progress, dict[str, Any] | None]:
    """Load the state that the run starts from: for each network the folders of weights, then the checkpoint.
    Collective.

    Returns:
        The progress, and the metadata of the checkpoint or of the weights; None if the run starts from initial weights.

    Raises:
        UserError: the checkpoint or the weights do not match the model or the data.
    """
    config = task.plan.config.checkpoint
    # torch's default seed may be random, and checkpoints hold the states
    torch.manual_seed(task.plan.config.debug.seed)
    resumed = _resumed_checkpoint(task, checkpoints)
    main = next(iter(task.networks))
    read_metas: dict[str, dict[str, Any]] = {}
    for name, network in task.networks.items():
        names_read: set[str] = set()
        for folder in _weight_folders(network, is_main=name == main, is_new=resumed is None):
            is_step = kind_of(folder) is Kind.STEP
            opened = StepWeights(network, folder, checkpoints) if is_step else weights.open(network, folder)
            assert names_read.isdisjoint(opened.names), "each weight is read from one folder"
            names_read.update(opened.names)
            meta = read_weights(network, opened)
            if meta is not None:
                read_metas[name] = meta
    if resumed is not None:
        meta = _resume(task, checkpoints, resumed)
        _refuse_other_origin(task, weights, meta, _folder_of(resumed, checkpoints))
        return Progress(**meta["progress"]), meta
    progress = Progress(curriculum_tokens=task.plan.config.lr_scheduler.start_tokens)
    if main in read_metas or config.initial_load_path is None:
        return progress, read_metas.get(main)
    meta = _load_phase(task, checkpoints, real_path(config.initial_load_path))
    if not config.initial_load_model_only:
        # Do not read again what the earlier phase has read.
        progress.read_before = meta.get("read", [])
    return progress, meta


def _resumed_checkpoint(task: Task, checkpoints: CheckpointManager) -> int | Path | None:
    """Return the step of this run that it resumes from, or the step folder that it continues; None in a new run.
    Collective."""
    config = task.plan.config.checkpoint
    if not config.enable:
        return None
    step = checkpoints.newest() if config.load_step == -1 else config.load_step
    if step is None and config.load_path is not None:
        return real_path(config.load_path)
    return step


def _weight_folders(network: Network, *, is_main: bool, is_new: bool) -> list[Path]:
    """Return the folders of weights that a start reads into a network, in this order.

    Checkpoints hold no frozen weights (the base of adapters, and complete frozen networks), so every start reads them.
    Of the trained networks without adapters, only the main one begins with the initial weights of the run, and a step
    folder for it is a checkpoint.
    """
    config = network.plan.config
    folders = []
    if config.checkpoint.initial_load_path is not None:
        folder = real_path(config.checkpoint.initial_load_path)
        is_foreign = config.checkpoint.initial_load_in_hf or kind_of(folder) is Kind.DCP
        if _has_frozen_weights(network) or (is_main and is_new and is_foreign):
            folders.append(folder)
    if network.is_adapted and is_new and config.adapter is not None and config.adapter.initial_load_path is not None:
        folders.append(real_path(config.adapter.initial_load_path))
    return folders


def _has_frozen_weights(network: Network) -> bool:
    return network.is_adapted or not isinstance(network, TrainedNetwork)


def read_weights(network: Network, opened: WeightFolder) -> dict[str, Any] | None:
    """Fill the weights that a folder provides, and return its metadata. Collective."""
    weights = network.weights()
    tensors = {name: weights[name] for name in opened.names}
    meta = run_on_all_ranks(lambda: opened.read(tensors))
    if meta is not None:
        network.take_gates(meta, opened.names)
    files = opened.files() if _has_frozen_weights(network) else []
    if files:
        network.frozen_files.update(hash_files(files, Ranks.of_this_run()))
    network.loaded(new_adapters=meta is not None)
    return meta


def _refuse_other_origin(task: Task, weights: WeightSource, meta: dict[str, Any], folder: Path) -> None:
    """Raise UserError on all ranks if a loaded checkpoint belongs to other frozen weights or other data."""
    with_frozen = {name: network for name, network in task.networks.items() if network.frozen_files}
    faults = weights.check(with_frozen, folder, meta[BASES_KEY]) if with_frozen else []
    if faults:
        raise UserError(*on_first_rank(*faults))
    if meta["stream"] != task.fingerprint():
        raise UserError(*on_first_rank(_other_text(task, folder)))


def _load_phase(task: Task, checkpoints: CheckpointManager, folder: Path) -> dict[str, Any]:
    """Load what the [checkpoint] initial_load keys ask for from the step folder of an earlier phase, and return its
    metadata. Collective."""
    ignored = _names_not_loaded(task, folder)
    meta = _load(task, checkpoints, folder, ignored=ignored)
    main = next(iter(task.networks.values()))
    main.take_gates(meta, {name for name in main.weights() if f"model.{name}" not in ignored})
    return meta


def roll_back(task: Task, checkpoints: CheckpointManager, progress: Progress) -> tuple[Progress, dict[str, Any]]:
    """Load the last good checkpoint before a series of skipped steps, or before weights or states became non-finite.

    The run then never trains on the samples between the first skipped step (or the checkpoint) and the step that rolls
    back. Collective.

    Raises:
        Diverged: rollbacks are disabled, their limit is reached, or there is no earlier checkpoint.
    """
    training = task.plan.config.training
    checkpoints.drain_saves()
    non_finite = checkpoints.describe_not_finite(checkpoint_tensors(task))
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
    first_bad_step = progress.bad_since_step if progress.skipped_in_a_row else progress.step
    config = task.plan.config.checkpoint
    source: int | Path | None = checkpoints.newest(before=first_bad_step) if config.enable else None
    if source is None and config.load_path is not None:
        folder = real_path(config.load_path)
        step = step_of(folder)
        source = folder if step is not None and step < first_bad_step else None
    if source is None:
        raise Diverged(
            *on_first_rank(f"{cause}, and there is no checkpoint of an earlier step to go back to; {Diverged.remedy}")
        )
    meta = _resume(task, checkpoints, source)
    earlier = Progress(**meta["progress"])
    first_bad_sample = earlier.samples if non_finite else progress.bad_since_sample
    return progress.rolled_back_to(earlier, first_bad_sample), meta


def _explained(faults: Sequence[str], task: Task, folder: Path) -> list[str]:
    """Return changed keys that explain the faults of a load, with a remedy, then the first few faults."""
    text = "\n".join(faults)
    config = task.plan.config
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
    """Return the names of tensors that this run does not load from the step folder of another run. Collective."""
    names_by_rank = [list(checkpoint_tensors(task))]
    if (pipeline := task.cluster.meshes.pipeline) is not None:  # stages hold different tensors
        dist.all_gather_object(
            names_by_rank := names_by_rank * dist.get_world_size(pipeline), names_by_rank[0], group=pipeline
        )
    metadata, faults = read_metadata(folder)
    if metadata is None:
        raise UserError(*faults)
    ours = {name for names in names_by_rank for name in names if not name.startswith("rng.")}
    theirs = {name for name in metadata.state_dict_metadata if not name.startswith("rng.")}
    _, *others = task.networks
    excluded = {name for name in ours | theirs if name.startswith(tuple(f"{other}." for other in others))}
    if task.keeps_prediction_layers:
        excluded |= {name for name in theirs if name.startswith("model.mtp.")}
    if task.plan.config.head == "value":  # a new value head, or both runs train a reward model
        excluded |= {"model.lm_head.weight"} | {"model.value_head.weight"} - theirs
    return names_not_loaded(ours - excluded, theirs - excluded, task.plan.config.checkpoint) | excluded


def _resume(task: Task, checkpoints: CheckpointManager, source: int | Path) -> dict[str, Any]:
    """Load all tensors, and set the router temperature of the last step. Collective."""
    meta = _load(task, checkpoints, source)
    for name in task.objectives:
        task.networks[name].route_at(function_of_meta(meta).router_temperature)
    return meta


def _load(
    task: Task, checkpoints: CheckpointManager, source: int | Path, ignored: Collection[str] = ()
) -> dict[str, Any]:
    """Load all tensors except `ignored` from a step of this run, or from the step folder of another run. Collective.

    Returns:
        The metadata of the checkpoint.
    """
    tensors = {name: tensor for name, tensor in checkpoint_tensors(task).items() if name not in ignored}
    # Optional: with another number of ranks there are other generators. No result depends on them.
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
    """Return names of tensors of this run or of the checkpoint that the [checkpoint] initial_load keys exclude.

    The optimizer state of an excluded weight is also excluded, because it belongs to other values of that weight.

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
