"""How the ranks are arranged: which of them hold copies, which hold parts, which hold experts, which hold layers."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glm46.distributed.sequence import SequenceShard
from glm46.planner.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """Arrangements of the same ranks."""

    dense: DeviceMesh
    """Over which everything but experts is sharded: [shard], or [dp_replicate, shard] with copies. Ranks that share
    a sequence are among the shards: they hold the same parameters and see other tokens, like any data-parallel rank."""
    expert_shard: DeviceMesh
    """Over which the experts of one rank are sharded again: [efsdp], or [dp_replicate, efsdp] with copies. The ranks
    that share matrices are among these shards: they hold no part of an expert together, and see other tokens."""
    expert: DeviceMesh | None
    """Over which experts are spread whole: [ep]; None if every rank has all of them."""
    sequence: SequenceShard | None
    """This rank's part of every sequence; None if it has whole ones."""
    tensor: DeviceMesh | None
    """Over which matrices are split: [tp]; None if this rank computes with whole ones."""
    pipeline: dist.ProcessGroup | None
    """The ranks that hold other layers of the same shard; None if this rank has all layers."""


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Arrange the ranks.

    Layers are outermost: stages pass on one tensor per micro-batch. Then copies, which talk once per step, then shards,
    which talk in every layer. Matrices are innermost, and so are the experts: tokens travel to them several times per
    layer, so they should live in one node.
    """

    def arrange(**axes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    stages = {"pp": layout.pp} if layout.pp > 1 else {}
    copies = {"dp_replicate": layout.dp_replicate} if layout.dp_replicate > 1 else {}
    split = {"tp": layout.tp} if layout.tp > 1 else {}
    ranks = arrange(**stages, **copies, shard=layout.dense_shards, **split)
    sequence = None
    if layout.cp > 1:
        outer = layout.world_size // (layout.cp * layout.tp)
        context = arrange(outer=outer, cp=layout.cp, inner=layout.tp)["cp"]
        sequence = SequenceShard(context.get_group(), layout.cp, context.get_local_rank())
    dense = _part(ranks, *copies, "shard")
    expert_shard, expert = dense, None
    if layout.ep > 1 or layout.tp > 1:
        spread = {"ep": layout.ep} if layout.ep > 1 else {}
        sparse = arrange(**stages, **copies, efsdp=layout.expert_shards, **spread)
        expert_shard = _part(sparse, *copies, "efsdp")
        expert = sparse["ep"] if spread else None
    return Meshes(
        dense,
        expert_shard,
        expert,
        sequence,
        tensor=ranks["tp"] if split else None,
        pipeline=ranks["pp"].get_group() if stages else None,
    )


def _part(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """The axes of a mesh with these names; the mesh itself when it has no other."""
    return mesh if mesh.mesh_dim_names == names else mesh[names]
