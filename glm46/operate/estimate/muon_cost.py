"""Computes Muon's FLOPs and bytes in a step from the degrees of a layout: `muon_plan.py` for the first rank."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from glm46.compute.optim.muon_plan import Bounds, Bucket, PlannedParameter, TensorLayout, make_plan, mesh_layout
from glm46.config.model import ModelShape
from glm46.config.optimizer import OptimizerConfig
from glm46.config.run_config import RunConfig
from glm46.operate.estimate.rank_parts import StagePart, alike, mesh_of_stage, sharded_dim
from glm46.run.flops import newton_schulz_flops
from glm46.run.layout import Layout
from glm46.run.parameters import Parameter


class MuonCost(NamedTuple):
    """Muon's cost for the first rank of a pipeline rank in one step."""

    exchanges: dict[str, tuple[int, int]]
    """By axis as in `Traffic.axis`: the number of buckets, each of which is an all-to-all to the owners and one back,
    and the bytes of the larger side of each call, summed over calls."""
    flops: int
    """FLOPs of Newton-Schulz on the rank of the stage that has most of it."""


def muon_cost(stages: list[StagePart], shape: ModelShape, layout: Layout, config: RunConfig) -> MuonCost:
    """Compute the cost of the matrices of a pipeline rank."""
    mesh = replace(mesh_of_stage(layout), dp_replicate=layout.dp_replicate)
    width = 4 if config.training.mixed_precision_param == "float32" else 2
    return _cost(alike(stages), shape, mesh, config.optimizer, width)


@lru_cache(maxsize=4096)  # layouts of a search often agree in all that matters here
def _cost(
    stages: tuple[StagePart, ...], shape: ModelShape, mesh: Layout, optimizer: OptimizerConfig, width: int
) -> MuonCost:
    """``width``: bytes of an entry of a matrix that ranks send each other."""
    trained = (row for stage in stages for row in stage.rows(shape) if row.is_trained)
    rows = [row for row in trained if row.choose_optimizer(optimizer) == "muon"]
    steps = optimizer.ns_steps
    layouts = {row: _layout_of(row, shape, mesh) for row in dict.fromkeys(rows)}
    plan = make_plan([PlannedParameter(row.name, layouts[row], row.block_rows(shape)) for row in rows], steps, width)
    axes = {
        tuple(range(0, mesh.dp_replicate * mesh.expert_shards * mesh.ep, mesh.ep)): "stage_experts",
        tuple(range(mesh.dp_replicate * mesh.dense_shards * mesh.tp)): "stage",
    }
    local_flops = 0
    owned_flops = Counter[int]()  # by rank
    buckets = Counter[str]()
    sizes = Counter[str]()
    for task in plan.local:
        local_flops += task.matrix_count * newton_schulz_flops(task.row_count, task.columns, steps)
    for bucket in plan.buckets:
        axis = axes[bucket.ranks]
        buckets[axis] += 1
        sizes[axis] += width * sum(map(max, exchanged(bucket, 0)))
        for unit in bucket.units:
            owned_flops[bucket.owner_rank(unit)] += unit.flops
    max_flops = local_flops + max(owned_flops.values(), default=0)
    return MuonCost({axis: (buckets[axis], sizes[axis]) for axis in buckets}, max_flops)


def exchanged(bucket: Bucket, member: int) -> tuple[Bounds, Bounds]:
    """Return the entries that a rank of the group sends and receives: first for matrices on the way to their owners,
    then for updates."""
    leaving = coming = leaving_back = coming_back = 0
    for unit in bucket.units:
        held = unit.size(member)
        if unit.owner == member:
            coming += unit.shape[0] * unit.shape[1] - held
            leaving_back += sum(map(unit.size, range(len(unit.parts)))) - held
        else:
            leaving += held if unit.sends(member) else 0
            coming_back += held
    return (leaving, coming), (leaving_back, coming_back)


def _layout_of(row: Parameter, shape: ModelShape, layout: Layout) -> TensorLayout:
    """Return the part of a matrix on each rank of a pipeline stage, numbered from the stage's first rank."""
    *leading, rows, columns = row.shape(shape)
    fsdp = 1, sharded_dim(row, shape, layout) - len(leading) + 1
    if row.is_expert:
        mesh = (layout.dp_replicate, layout.expert_shards, layout.ep)
        cuts = [(2, 0), fsdp]
    else:
        mesh = layout.dp_replicate, layout.dense_shards, layout.tp
        cuts = [fsdp] if row.tensor_dim is None else [(2, row.tensor_dim + 1), fsdp]
    return mesh_layout((prod(leading), rows, columns), 1, mesh, range(prod(mesh)), cuts, 0)
