"""Device meshes: replicas, shards, experts, parts of sequences and pipeline stages over the ranks."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from glm46.compute.distributed.groups import group_of_partition
from glm46.compute.distributed.process import Process
from glm46.compute.distributed.sequence import SequenceShard
from glm46.run.layout import ExpertLevels, Layout
from glm46.run.plan import Plan


@dataclass(frozen=True)
class Meshes:
    """Meshes over the same ranks, one for each purpose."""

    dense: DeviceMesh
    """Shards all parameters except experts: [shard], or [dp_replicate, shard] with replicas. Context-parallel ranks are
    among the shards: they process other tokens, like data-parallel ranks."""
    expert_shard: DeviceMesh
    """Shards the experts of one rank: [efsdp], or [dp_replicate, efsdp] with replicas. Tensor-parallel ranks are among
    these shards, because experts are not split by tensor parallelism."""
    expert: DeviceMesh | None
    """Distributes whole experts: [ep]; None if every rank has all experts."""
    expert_hosts: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None
    """Groups of a two-level exchange: the ranks of `expert` with the same local index on all hosts (None for one host),
    and the ranks of `expert` on this host. None if tokens are exchanged among all ranks of `expert` at once."""
    sequence: SequenceShard | None
    """This rank's part of every sequence; None without context parallelism."""
    tensor: DeviceMesh | None
    """Splits matrices: [tp]; None without tensor parallelism."""
    pipeline: dist.ProcessGroup | None
    """Ranks that hold the other layers of the same shard; None without pipeline parallelism."""

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return this rank's group of each axis by name; an axis of two meshes appears once."""
        meshes = [mesh for mesh in (self.dense, self.expert_shard, self.expert, self.tensor) if mesh is not None]
        # Reversed, so that the first mesh with an axis gives its group.
        mesh_groups = {axis: mesh.get_group(axis) for mesh in reversed(meshes) for axis in mesh.mesh_dim_names or ()}
        other_groups = {"cp": None if self.sequence is None else self.sequence.group, "pp": self.pipeline}
        return mesh_groups | {axis: group for axis, group in other_groups.items() if group is not None}


@dataclass(frozen=True)
class Cluster:
    """Ranks that compute one job: this process, the layout and its meshes."""

    process: Process
    layout: Layout
    meshes: Meshes

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.process.device

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: ranks with the same number read the same sequences."""
        return self.layout.dp_rank(self.process.rank)


def build_cluster(plan: Plan, process: Process) -> Cluster:
    """Build the cluster of this plan. Collective."""
    is_deepep = plan.config.parallelism.expert_exchange == "deepep"  # makes the levels itself, in one group
    levels = None if is_deepep else plan.expert_levels
    return Cluster(process, plan.layout, build_meshes(plan.layout, process.device.type, levels))


def build_meshes(layout: Layout, device_type: str, levels: ExpertLevels | None = None) -> Meshes:
    """Build the meshes. Collective.

    Axes are ordered by traffic. Pipeline stages are outermost: they send one tensor per micro-batch. Replicas
    communicate once per step, shards in every layer. Tensor and expert parallelism are innermost, so that they stay
    within a node: they communicate several times per layer.

    Each process group is created once, and only if it is used: on a GPU each has its own communicator.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def group(ranks: Tensor, axis: int) -> dist.ProcessGroup:
        parts = ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis])
        key = (ranks.shape[axis], *parts.flatten().tolist())  # size of the groups, then all their ranks
        if key not in groups:
            groups[key] = group_of_partition(parts)
        return groups[key]

    def make_mesh(**axes: int) -> DeviceMesh:
        ranks = torch.arange(layout.world_size).view(*axes.values())
        axis_groups = [group(ranks, axis) for axis in range(len(axes))]
        return DeviceMesh.from_group(axis_groups, device_type, ranks, mesh_dim_names=tuple(axes))

    stages = {"pp": layout.pp} if layout.pp > 1 else {}
    replicas = {"dp_replicate": layout.dp_replicate} if layout.dp_replicate > 1 else {}
    tensor_axis = {"tp": layout.tp} if layout.tp > 1 else {}
    whole = make_mesh(**stages, **replicas, shard=layout.dense_shards, **tensor_axis)
    sequence = None
    if layout.cp > 1:
        context_group = group(torch.arange(layout.world_size).view(-1, layout.cp, layout.tp), 1)
        sequence = SequenceShard(context_group, layout.cp, context_group.rank())
    dense = _submesh(whole, *replicas, "shard")
    expert_shard = dense
    expert = None
    expert_hosts = None
    if layout.ep > 1 or layout.tp > 1:
        expert_axis = {"ep": layout.ep} if layout.ep > 1 else {}
        whole_for_experts = make_mesh(**stages, **replicas, efsdp=layout.expert_shards, **expert_axis)
        expert_shard = _submesh(whole_for_experts, *replicas, "efsdp")
        expert = whole_for_experts["ep"] if expert_axis else None
        if levels is not None:
            by_host = torch.arange(layout.world_size).view(-1, *levels)
            across_hosts = group(by_host, 1) if levels.hosts > 1 else None
            expert_hosts = (across_hosts, group(by_host, 2))
    return Meshes(
        dense,
        expert_shard,
        expert,
        expert_hosts,
        sequence,
        tensor=whole["tp"] if tensor_axis else None,
        pipeline=whole["pp"].get_group() if stages else None,
    )


def _submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Return the submesh of these axes; the mesh itself if it has no other axes."""
    return mesh if mesh.mesh_dim_names == names else mesh[names]
