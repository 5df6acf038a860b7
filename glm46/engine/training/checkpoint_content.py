"""Contents of a checkpoint: names of all tensors, and the metadata next to them."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.process import Process
from glm46.config.loader import dump_config
from glm46.engine.training.state import Progress
from glm46.engine.training.task import Task

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
    # Not the shape that the network has now: without a trained step the stage has not been set.
    function = main.function._replace(shape=task.plan.stage_after(progress.samples).shape)
    return {
        "progress": asdict(progress),
        "config": dump_config(task.plan.config),
        **function.meta(),
        "stream": task.fingerprint(),
        "validation": validation,
        BASES_KEY: {name: network.frozen_files for name, network in task.networks.items() if network.frozen_files},
        **task.state(progress),
    }
