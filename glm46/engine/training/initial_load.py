"""Names of the tensors that a new run does not load from a checkpoint of an earlier phase."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch.distributed as dist

from glm46.config.checkpoint import CheckpointConfig
from glm46.config.errors import UserError, raise_if
from glm46.engine.training.task import Task
from glm46.storage.checkpoint.metadata import read_metadata


def names_not_loaded(task: Task, names: Collection[str], folder: Path) -> frozenset[str]:
    """Return the names of tensors that this run does not load from the step folder of another run. Collective.

    Args:
        names: names of the tensors of a checkpoint on this rank.
    """
    names_here = list(names)
    names_by_rank = [names_here]
    if (pipeline := task.cluster.meshes.pipeline) is not None:  # stages hold different tensors
        names_by_rank *= dist.get_world_size(pipeline)
        dist.all_gather_object(names_by_rank, names_here, group=pipeline)
    metadata, faults = read_metadata(folder)
    if metadata is None:
        raise UserError(*faults)
    ours = {name for rank_names in names_by_rank for name in rank_names if not name.startswith("rng.")}
    theirs = {name for name in metadata.state_dict_metadata if not name.startswith("rng.")}
    _, *others = task.networks  # only the main network continues an earlier phase
    excluded = {name for name in ours | theirs if name.startswith(tuple(f"{other}." for other in others))}
    if task.keeps_prediction_layers:
        excluded |= {name for name in theirs if name.startswith("model.mtp.")}
    if task.plan.config.head == "value":
        excluded |= {"model.lm_head.weight"}
        excluded |= {"model.value_head.weight"} - theirs  # new, unless the earlier phase trained a reward model too
    return _excluded_names(ours - excluded, theirs - excluded, task.plan.config.checkpoint) | excluded


def _excluded_names(ours: Iterable[str], theirs: Iterable[str], config: CheckpointConfig) -> frozenset[str]:
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
    excluded_weights = [name.removeprefix("model.") for name in excluded if name.startswith("model.")]
    their_states = tuple(f"optimizer.{name}." for name in excluded_weights)
    excluded |= {name for name in names if name.startswith(their_states)}
    if excluded == names:
        raise UserError(
            f"checkpoint.initial_load_exclude: nothing of {config.initial_load_path} is loaded; "
            "loosen it, or remove initial_load_path"
        )
    return frozenset(excluded)


def _matching(names: set[str], patterns: Iterable[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}
