"""How the ranks are arranged: which of them hold copies, which hold parts."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from glm46.planner.layout import Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh over which dense parameters are sharded: [dp_shard], or [dp_replicate, dp_shard] with copies.

    Shards are innermost: ranks that gather weights from each other for every layer are neighbours, copies talk once
    per step.
    """
    if layout.dp_replicate == 1:
        return init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(
        device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
