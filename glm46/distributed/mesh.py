"""How the ranks are arranged: which of them hold copies, which hold parts, which hold experts."""

from dataclasses import dataclass

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
    """Over which the experts of one rank are sharded again: [efsdp], or [dp_replicate, efsdp] with copies."""
    expert: DeviceMesh | None
    """Over which experts are spread whole: [ep]; None if every rank has all of them."""
    sequence: SequenceShard | None
    """This rank's part of every sequence; None if it has whole ones."""


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Arrange the ranks.

    Copies are outermost: they talk once per step, ranks that share a layer talk in every layer. Experts are innermost:
    tokens travel to them twice per layer, so they should live in one node.
    """
    copies, names = ((layout.dp_replicate,), ("dp_replicate",)) if layout.dp_replicate > 1 else ((), ())
    dense = init_device_mesh(device_type, (*copies, layout.dense_shards), mesh_dim_names=(*names, "shard"))
    sequence = None
    if layout.cp > 1:
        context = init_device_mesh(device_type, (layout.batch_ranks, layout.cp), mesh_dim_names=("batch", "cp"))["cp"]
        sequence = SequenceShard(context.get_group(), layout.cp, context.get_local_rank())
    if layout.ep == 1:
        return Meshes(dense, dense, None, sequence)
    sparse = init_device_mesh(
        device_type, (*copies, layout.expert_shards, layout.ep), mesh_dim_names=(*names, "efsdp", "ep")
    )
    shards = sparse["dp_replicate", "efsdp"] if copies else sparse["efsdp"]
    return Meshes(dense, shards, sparse["ep"], sequence)
