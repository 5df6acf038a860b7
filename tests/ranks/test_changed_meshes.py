"""A run continues on another mesh with equal bits and equal losses.

The engine's own network, step and names of checkpoints. Each mesh trains two steps and saves. Then a mesh loads what
another has saved: every weight, optimizer state, buffer and balance must be equal bit for bit, and the next losses
those of the mesh that saved and continued.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.process import Process, join, leave
from glm46.engine.training.checkpoint_content import checkpoint_tensors
from glm46.engine.training.services import build_checkpoints
from glm46.engine.training.step import train_step
from glm46.engine.training.totals import count_step
from tests.harness import Ranks
from tests.ranks.sharded_layouts import (
    LAYOUTS_AT_ONCE,
    SHAPE,
    Job,
    Layout,
    build_job,
    make_batch,
    make_config,
    micro_batches,
    schedule_here,
    whole,
)

MESHES = {
    "fsdp": Layout(), "hsdp2": Layout(replicate=2), "replicas": Layout(replicate=4), "ep2": Layout(experts_over=2),
    "ep4": Layout(experts_over=4), "cp2": Layout(context=2), "tp2": Layout(tensor=2),
    "tp4_ep2": Layout(tensor=4, experts_over=2), "pp2": Layout(pipeline=2, micro_batches=4),
    "pp2_tp2": Layout(pipeline=2, tensor=2, schedule=schedule_here("InterleavedZeroBubble"), micro_batches=4),
    "pp2_cp2": Layout(pipeline=2, context=2, schedule=schedule_here("ZBVZeroBubble"), micro_batches=4),
    "pp4": Layout(pipeline=4, micro_batches=4),
}  # fmt: skip
# Twelve experts, which every mesh can divide; two key heads, so that four tensor-parallel ranks have half a head each.
MESHES = {name: layout._replace(num_experts=12, key_heads=2) for name, layout in MESHES.items()}
STEPS_BEFORE, STEPS_AFTER = 2, 2
SHORT_PAIRS = [
    "fsdp-to-ep2", "fsdp-to-tp2", "fsdp-to-pp2_tp2",
    "tp4_ep2-to-fsdp", "tp4_ep2-to-hsdp2", "tp4_ep2-to-ep4", "tp4_ep2-to-pp2_cp2",
    "pp2_tp2-to-replicas", "pp2_tp2-to-cp2", "pp2_tp2-to-tp4_ep2", "pp2_tp2-to-pp2", "pp2_tp2-to-pp4",
]  # fmt: skip
"""Every mesh loads once; three save."""
_NAMES = list(MESHES)
LONG_PAIRS = [
    pytest.param(f"{_NAMES[place - offset]}-to-{_NAMES[place]}", marks=pytest.mark.long)
    for place, offset in product(range(len(MESHES)), (1, 5))
]
"""Each mesh loads what the meshes one and five places before it have saved."""


def settings(layout: Layout):
    """A run whose optimizer has every kind of state: Muon's momentum, and AdamW's for the rest."""
    config = make_config(layout, SHAPE["num_hidden_layers"])
    moe = config.moe.model_copy(update={"balance": "sign", "bias_update_rate": 0.01})
    return config.model_copy(update={"moe": moe})


def next_steps(job: Job, layout: Layout, first: int, count: int) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in range(first, first + count):
        totals = count_step(job, [make_batch(step)])
        outcome = train_step(job, micro_batches(job, step, layout.micro_batches), totals, 0, 1.0)
        losses.append(outcome.main.objective["loss"].item() / totals.main["targets"])
    return losses


def state(job: Job) -> dict[str, Tensor]:
    """All tensors that a checkpoint holds and that are the same on every mesh, whole; collective."""
    tensors = {n: t for n, t in checkpoint_tensors(job).items() if not n.startswith("rng.")}
    return {name: whole(tensor).clone() for name, tensor in tensors.items()}


def merged(here: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks: the stages of a pipeline hold different ones."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return {name: tensor for tensors in everyone for name, tensor in tensors.items()}


def save(process: Process, base: Path, name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Train on a mesh and save; the saved tensors, and the losses of the steps after it."""
    layout, config = MESHES[name], settings(MESHES[name])
    config = config.model_copy(update={"job": config.job.model_copy(update={"dump_folder": str(base / name)})})
    job = build_job(config, process)
    next_steps(job, layout, 0, STEPS_BEFORE)
    checkpoints = build_checkpoints(job.plan)
    checkpoints.save(STEPS_BEFORE, checkpoint_tensors(job), {"mesh": name})
    checkpoints.close()
    return merged(state(job)), next_steps(job, layout, STEPS_BEFORE, STEPS_AFTER)


def load(process: Process, base: Path, saved: str, name: str) -> tuple[dict[str, Tensor], list[float]]:
    """Load on a mesh what another one has saved, and go on."""
    layout, config = MESHES[name], settings(MESHES[name])
    config = config.model_copy(update={"job": config.job.model_copy(update={"dump_folder": str(base / saved)})})
    job = build_job(config, process)
    checkpoints = build_checkpoints(job.plan)
    meta = checkpoints.load(STEPS_BEFORE, checkpoint_tensors(job), optional=("rng.",), ignored=("rng.",))
    assert meta == {"mesh": saved}
    checkpoints.close()
    found = merged(state(job))
    return found, next_steps(job, layout, STEPS_BEFORE, STEPS_AFTER)


def save_all(base: Path, names: list[str]) -> None:
    """On each rank: `save` on each of these meshes, and what it gave, into a file."""
    process = join(300)
    for name in names:
        kept = save(process, base, name)
        if process.is_main:
            torch.save(kept, base / f"{name}.pt")
    leave()


def prepare(pairs: list[str], ranks: int, folder: Path) -> Path:
    """Save on each mesh that a pair begins with, with new ranks every few meshes; the folder."""
    saving = list(dict.fromkeys(pair.split("-to-")[0] for pair in pairs))
    for first in range(0, len(saving), LAYOUTS_AT_ONCE):
        Ranks(ranks, save_all, folder, saving[first : first + LAYOUTS_AT_ONCE]).results()
    return folder


def load_pairs(pairs: list[str], base: Path) -> Iterator[dict]:
    """On each rank: `load` each pair, and compare."""
    process = join(300)
    for pair in pairs:
        saved, name = pair.split("-to-")
        tensors, losses = load(process, base, saved, name)
        before, expected = torch.load(base / f"{saved}.pt", mmap=True)
        yield {
            "states": sum(key.startswith("optimizer.") for key in before),
            "different": [key for key in before.keys() | tensors.keys()
                          if key not in tensors or key not in before or not torch.equal(before[key], tensors[key])],
            "loss errors": [abs(found / wanted - 1.0) for found, wanted in zip(losses, expected, strict=True)],
        }  # fmt: skip
    leave()


def test_every_mesh_loads_what_another_one_saved():
    pairs = [pair.split("-to-") for pair in SHORT_PAIRS]
    assert sorted(name for _, name in pairs) == sorted(MESHES)
    assert len({saved for saved, _ in pairs}) == 3
    assert [pair for pair in pairs if pair[0] == pair[1]] == []


@pytest.mark.parametrize("case", [*SHORT_PAIRS, *LONG_PAIRS])
def test_a_run_continues_on_another_mesh(case_row, case):
    row = case_row(load_pairs, 4, case=case, prepare=prepare, at_once=LAYOUTS_AT_ONCE)
    assert row["different"] == []
    assert row["states"] > 200  # of the optimizer: those of an empty one would be equal too
    # FP32 sums in another order.
    assert len(row["loss errors"]) == 2 and max(row["loss errors"]) < 1e-6
