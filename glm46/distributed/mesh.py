"""How the ranks are arranged: which of them hold copies, which hold parts, which hold experts."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glm46.planner.layout import Layout


@dataclass(frozen=True)
class Meshes:
    """Two arrangements of the same ranks."""

    dense: DeviceMesh
    """Over which everything but experts is sharded: [dp_shard], or [dp_replicate, dp_shard] with copies."""
    expert_shard: DeviceMesh
    """Over which the experts of one rank are sharded again: [efsdp], or [dp_replicate, efsdp] with copies."""
    expert: DeviceMesh | None
    """Over which experts are spread whole: [ep]; None if every rank has all of them."""


def build_meshes(layout: Layout, device_type: str) -> Meshes:
    """Arrange the ranks.

    Copies are outermost: they talk once per step, ranks that share a layer talk in every layer. Experts are innermost:
    tokens travel to them twice per layer, so they should live in one node.
    """
    copies, names = ((layout.dp_replicate,), ("dp_replicate",)) if layout.dp_replicate > 1 else ((), ())
    dense = init_device_mesh(device_type, (*copies, layout.dp_shard), mesh_dim_names=(*names, "dp_shard"))
    if layout.ep == 1:
        return Meshes(dense, dense, None)
    sparse = init_device_mesh(
        device_type, (*copies, layout.expert_shards, layout.ep), mesh_dim_names=(*names, "efsdp", "ep")
    )
    shards = sparse["dp_replicate", "efsdp"] if copies else sparse["efsdp"]
    return Meshes(dense, shards, sparse["ep"])
