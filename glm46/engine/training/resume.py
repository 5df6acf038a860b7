"""Start of a run: new, from an earlier phase, resumed, or continued from another run; and its rollback."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.collective_errors import on_first_rank, run_on_all_ranks
from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import UserError
from glm46.config.faults import counted
from glm46.engine.reliability.stop import Diverged
from glm46.engine.training.checkpoint_content import BASES_KEY, checkpoint_tensors
from glm46.engine.training.initial_load import names_not_loaded
from glm46.engine.training.network import Network, TrainedNetwork
from glm46.engine.training.saved_config import differences, explain_load_faults
from glm46.engine.training.state import Progress
from glm46.engine.training.step_weights import StepWeights
from glm46.engine.training.task import Task
from glm46.engine.training.weight_source import WeightFolder, WeightSource
from glm46.run.function import function_of_meta
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.checkpoint.integrity import hash_files, step_folder, step_of
from glm46.storage.checkpoint.manager import CheckpointManager


def start(task: Task, checkpoints: CheckpointManager, weights: WeightSource) -> tuple[Progress, dict[str, Any] | None]:
    """Load the state that the run starts from. Collective.

    For each network: frozen weights, and in a new run weights of other programs. Then the checkpoint, or in a new run
    the step folder of an earlier phase.

    Returns:
        The progress, and the metadata of the checkpoint or of the weights; None if the run starts from initial weights.

    Raises:
        UserError: the checkpoint or the weights do not match the model or the data.
    """
    config = task.plan.config.checkpoint
    # Checkpoints hold the states of torch's generators: those of equal runs are equal. Torch's own seed may be random.
    torch.manual_seed(task.plan.config.debug.seed)
    resumed = _resumed_checkpoint(task, checkpoints)
    main_name = next(iter(task.networks))
    read_metas: dict[str, dict[str, Any]] = {}
    for name, network in task.networks.items():
        names_read: set[str] = set()
        folders = _weight_folders(network, is_main=name == main_name, is_new=resumed is None)
        for folder, kind in folders.items():
            is_step = kind is Kind.STEP
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
    if main_name in read_metas or config.initial_load_folder is None:  # read above, or initial weights
        return progress, read_metas.get(main_name)
    meta = _load_phase(task, checkpoints, config.initial_load_folder)
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
    tensors = _tensors_to_fetch(task)
    step = checkpoints.newest(tensors=tensors) if config.load_step == -1 else config.load_step
    return config.load_folder if step is None else step


def _tensors_to_fetch(task: Task) -> dict[str, Tensor] | None:
    """Return the tensors whose files are fetched from an object store; None for checkpoints on a disk, whose files are
    all verified."""
    return None if task.plan.config.checkpoint_url is None else checkpoint_tensors(task)


def _weight_folders(network: Network, *, is_main: bool, is_new: bool) -> dict[Path, Kind]:
    """Return the folders of weights that a start reads into a network, in this order, with their kinds.

    Checkpoints hold no frozen weights (the base of adapters, and complete frozen networks), so every start reads them.
    A network that is trained without adapters reads weights only if it is the main one, the run is new, and the folder
    is one of another program: a step folder is loaded as a checkpoint instead, by `_load_phase`, except where only
    prediction layers are trained: frozen weights are kept in the compute type, and a checkpoint may have them in
    another one. Adapters are in every checkpoint, so only a new run reads a folder of adapters, after their base.
    """
    config = network.plan.config  # of this network: others than the main one name their own folder in it
    folders: dict[Path, Kind] = {}
    folder = config.checkpoint.initial_load_folder
    is_frozen = _has_frozen_weights(network)
    if folder is not None and (is_frozen or (is_main and is_new)):
        kind = kind_of(folder)
        is_foreign = config.checkpoint.initial_load_in_hf or kind is Kind.DCP
        if is_frozen or is_foreign or config.trains_only_drafts:
            folders[folder] = kind
    adapters = None if config.adapter is None else config.adapter.initial_load_folder
    if network.is_adapted and is_new and adapters is not None:
        folders[adapters] = kind_of(adapters)
    return folders


def _has_frozen_weights(network: Network) -> bool:
    return network.is_adapted or not isinstance(network, TrainedNetwork)


def read_weights(network: Network, opened: WeightFolder) -> dict[str, Any] | None:
    """Fill the weights that a folder provides, and return its metadata. Collective."""
    weights = network.weights()
    tensors = {name: weights[name] for name in opened.names}
    meta = run_on_all_ranks(lambda: opened.read(tensors))
    if meta is not None:
        network.take_gates(meta, tensors)
    files = opened.files() if _has_frozen_weights(network) else []
    if files:
        network.frozen_files.update(hash_files(files, Ranks.of_this_run()))
    network.loaded(new_adapters=meta is not None)  # folders of adapters have no meta, see `WeightFolder.read`
    return meta


def _refuse_other_origin(task: Task, weights: WeightSource, meta: dict[str, Any], folder: Path) -> None:
    """Raise UserError on all ranks if a loaded checkpoint belongs to other frozen weights or other data."""
    with_frozen = {name: network for name, network in task.networks.items() if network.frozen_files}
    faults = weights.check(with_frozen, folder, meta[BASES_KEY]) if with_frozen else []
    if faults:
        raise UserError(*on_first_rank(*faults))
    if meta["stream"] != task.fingerprint():
        changed = "; ".join(differences(task.identity_keys, task.plan.config, folder))
        fault = (
            f"{changed or task.other_text}. The checkpoint of {folder} was trained on other data, or in another order; "
            "restore it, or start a new run from its weights: set another job.dump_folder and "
            f"checkpoint.initial_load_path = {str(folder)!r}"
        )
        raise UserError(*on_first_rank(fault))


def _load_phase(task: Task, checkpoints: CheckpointManager, folder: Path) -> dict[str, Any]:
    """Load what the [checkpoint] initial_load keys ask for from the step folder of an earlier phase, and return its
    metadata. Collective."""
    tensors = checkpoint_tensors(task)
    not_loaded = names_not_loaded(task, tensors, folder)
    meta = _load(task, checkpoints, folder, tensors, not_loaded)
    network = next(iter(task.networks.values()))  # the main one
    loaded = {name: weight for name, weight in network.weights().items() if f"model.{name}" not in not_loaded}
    network.take_gates(meta, loaded)
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
    not_finite_line = checkpoints.describe_not_finite(checkpoint_tensors(task))
    causes = []
    if progress.skipped_in_a_row:
        skipped = counted(progress.skipped_in_a_row, "step")
        causes.append(
            f"training.max_skipped_steps = {training.max_skipped_steps}: {skipped} in a row, {progress.bad_since_step} "
            f"to {progress.step}, had a spike or a non-finite loss or gradient norm"
        )
    if not_finite_line:
        causes.append(f"after step {progress.step} {not_finite_line}")
    if not causes:
        causes.append(f"a save before step {progress.step + 1} found values that are not finite; they are finite now")
    cause = "; ".join(causes)
    if progress.rollbacks >= training.max_rollbacks:
        after = f" after {progress.rollbacks} of training.max_rollbacks = {training.max_rollbacks}"
        raise Diverged(*on_first_rank(f"{cause}{after if progress.rollbacks else ''}; {Diverged.remedy}"))
    first_bad_step = progress.bad_since_step if progress.skipped_in_a_row else progress.step
    config = task.plan.config.checkpoint
    tensors = _tensors_to_fetch(task)
    source: int | Path | None = checkpoints.newest(before=first_bad_step, tensors=tensors) if config.enable else None
    if source is None and config.load_folder is not None:
        step = step_of(config.load_folder)
        source = config.load_folder if step is not None and step < first_bad_step else None
    if source is None:
        raise Diverged(
            *on_first_rank(f"{cause}, and there is no checkpoint of an earlier step to go back to; {Diverged.remedy}")
        )
    meta = _resume(task, checkpoints, source)
    earlier = Progress(**meta["progress"])
    # Skipped steps alone name their samples. Values that are not finite may be due to any sample since the checkpoint.
    are_samples_known = progress.skipped_in_a_row and not not_finite_line
    first_bad_sample = progress.bad_since_sample if are_samples_known else earlier.samples
    return progress.rolled_back_to(earlier, first_bad_sample), meta


def _folder_of(source: int | Path, checkpoints: CheckpointManager) -> Path:
    return source if isinstance(source, Path) else step_folder(checkpoints.folder, source)


def _resume(task: Task, checkpoints: CheckpointManager, source: int | Path) -> dict[str, Any]:
    """Load all tensors, and set the router temperature of the last step. Collective."""
    meta = _load(task, checkpoints, source, checkpoint_tensors(task))
    for name in task.objectives:
        task.networks[name].route_at(function_of_meta(meta).router_temperature)
    return meta


def _load(
    task: Task,
    checkpoints: CheckpointManager,
    source: int | Path,
    tensors: dict[str, Tensor],
    not_loaded: Collection[str] = (),
) -> dict[str, Any]:
    """Load tensors from a step of this run, or from the step folder of another run. Collective.

    Args:
        tensors: see `checkpoint_tensors`; the values are written into them.
        not_loaded: names of tensors of this run that keep their values, and of the checkpoint that stay unread.

    Returns:
        The metadata of the checkpoint.
    """
    loaded = {name: tensor for name, tensor in tensors.items() if name not in not_loaded}
    # Optional: with another number of ranks there are other generators. No result depends on them.
    try:
        meta = checkpoints.load(source, loaded, optional=("rng.",), ignored=tuple(not_loaded))
    except UserError as error:
        faults = explain_load_faults(error.faults, task.plan.config, _folder_of(source, checkpoints))
        raise UserError(*on_first_rank(*faults)) from None
    rank = task.cluster.process.rank
    torch.set_rng_state(tensors[f"rng.{rank}.cpu"])
    if f"rng.{rank}.cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"rng.{rank}.cuda"], task.cluster.device)
    for network in task.networks.values():
        network.loaded(new_adapters=False)
    return meta
