"""Ranks that hold the parts of one model for inference, and their communication.

The model is split as in training, without FSDP: tensor parallelism with its split of tokens, experts on the ranks of a
group, layers on the stages of a pipeline. Ranks that compute the same tokens share rows; replicas have different rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from glm46.compute.distributed.collectives import gather_sequence
from glm46.compute.distributed.mesh import build_meshes
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize import expert, tensor
from glm46.config.model import ModelShape
from glm46.run.layout import Layout
from glm46.run.stages import split_layers


@dataclass(frozen=True)
class ModelMesh:
    """Groups of this rank. The default is one process with the complete model; then every method is local."""

    layout: Layout = Layout(1, 1, 1, 1, 1, 1)
    """Layout in which ``dp_shard`` is the number of replicas with different rows; only experts are sharded over
    them."""
    rank: int = 0
    tensor: DeviceMesh | None = None
    expert: DeviceMesh | None = None
    pipeline: dist.ProcessGroup | None = None
    sharing: dist.ProcessGroup | None = None
    """Ranks with the same rows; None if this is the only one."""
    in_step: dist.ProcessGroup | None = None
    """Ranks that must run the model equally often: ranks with the same rows, and ranks that hold their experts."""

    @property
    def is_split(self) -> bool:
        """True if ranks hold parts of the model."""
        return self.layout.non_dp_degree * self.layout.ep > 1

    @property
    def row_group(self) -> int:
        """Index of the group of ranks that share rows with this one, among ``layout.dp_degree`` groups."""
        return self.layout.dp_rank(self.rank)

    @property
    def stage(self) -> int:
        """Index of this rank's pipeline stage."""
        return self.rank // (self.layout.world_size // self.layout.pp)

    @property
    def is_last(self) -> bool:
        """True if this rank has the head."""
        return self.stage == self.layout.pp - 1

    @property
    def is_first_of_rows(self) -> bool:
        """True if this is the first of the ranks with the same rows."""
        return self.stage == 0 and self.rank % self.layout.tp == 0

    @property
    def is_source(self) -> bool:
        """True for the one rank with the head, among ranks with the same rows, whose results are used."""
        return self.is_last and self.rank % self.layout.tp == 0

    def part_of_model(self, shape: ModelShape, dtype: torch.dtype) -> Transformer:
        """Build this rank's part of a model on the meta device, in evaluation mode and without gradients. The last
        stage also has the embedding if there are prediction layers."""
        with torch.device("meta"):
            model = Transformer(shape).requires_grad_(False).eval().cast(dtype)
        if self.pipeline is not None:
            embedding = model.embed_tokens
            model.keep_layers(split_layers(shape, self.layout.pp, shape.max_position_embeddings)[self.stage])
            if model.mtp:
                model.embed_tokens = embedding
        if self.expert is not None:
            expert.apply(model, self.expert)
        if self.tensor is not None:
            tensor.apply(model, self.tensor)
        return model

    def padded(self, tokens: int) -> int:
        """Return the number of tokens of a call with padding, at least one for each tensor-parallel rank."""
        tp = self.layout.tp
        return max(-(-tokens // tp), 1) * tp

    def own_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's part of the tokens of [1, T, D], padded: [1, t, D]."""
        tp = self.layout.tp
        if (missing := self.padded(x.shape[1]) - x.shape[1]) > 0:
            x = F.pad(x, (0, 0, 0, missing))
        return x if tp == 1 else x.chunk(tp, dim=1)[self.rank % tp]

    def all_tokens(self, x: Tensor, tokens: int) -> Tensor:
        """Invert `own_tokens` and remove the padding. Collective."""
        return (x if self.tensor is None else gather_sequence(x, self.tensor.get_group()))[:, :tokens]

    def receive(self, *like: Tensor) -> None:
        """Fill tensors with data from the previous stage. Collective with `send`."""
        for x in like:
            dist.recv(x, group=self.pipeline, group_src=self.stage - 1)

    def send(self, *values: Tensor) -> None:
        """Send tensors to the next stage. Collective with `receive`."""
        for x in values:
            dist.send(x.contiguous(), group=self.pipeline, group_dst=self.stage + 1)

    def sum_over_stages(self, x: Tensor) -> Tensor:
        """Sum an integer tensor on the CPU over the stages of the pipeline. Collective."""
        if self.pipeline is None:
            return x
        wide = x.to(torch.int32)  # gloo does not send int16
        dist.all_reduce(wide, group=self.pipeline)
        return wide.to(x.dtype)

    def most(self, *counts: int) -> list[int]:
        """Return the maximum of each number over the ranks that run in step. Collective."""
        if self.in_step is None:
            return list(counts)
        maxima = torch.tensor(counts)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.in_step)
        return maxima.tolist()

    def share(self, values: Tensor | None, size: Sequence[int]) -> Tensor:
        """Broadcast numbers of the first rank with the head to all ranks with the same rows: FP64 on the CPU.
        Collective.

        Without it, ranks whose sums differ in the last bit would sample different tokens, and then wait for each other
        forever.

        Args:
            values: [*size]; None on other stages.
        """
        # sync: the host needs them.
        shared = torch.empty(*size, dtype=torch.float64) if values is None else values.double().cpu()
        if self.sharing is not None:
            dist.broadcast(shared, group=self.sharing, group_src=(self.layout.pp - 1) * self.layout.tp)
        return shared

    def gather_rows(self, rows: list[list[int]]) -> list[list[int]]:
        """Gather the token ids of all rows, in the order of their groups; ``rows`` are the rows of this rank.
        Collective over all ranks."""
        if self.layout.world_size == 1:
            return rows
        rows_by_rank: list[list[list[int]]] = [[] for _ in range(self.layout.world_size)]
        dist.all_gather_object(rows_by_rank, rows if self.is_first_of_rows else [])
        return [row for rank_rows in rows_by_rank for row in rank_rows]


def build_model_mesh(layout: Layout, rank: int, device_type: str) -> ModelMesh:
    """Build the groups of this rank. Collective.

    Args:
        layout: without replicas (``dp_replicate``) and context parallelism; see `ModelMesh.layout`.
    """
    assert layout.dp_replicate == layout.cp == 1
    mesh = ModelMesh(layout, rank)
    if not mesh.is_split:
        return mesh
    meshes = build_meshes(layout, device_type)
    sharing = _group(layout, 1) if layout.non_dp_degree > 1 else None
    coupled = max(layout.ep // layout.tp, 1)  # replicas that share experts
    in_step = _group(layout, coupled) if coupled > 1 else sharing
    return ModelMesh(layout, rank, meshes.tensor, meshes.expert, meshes.pipeline, sharing, in_step)


def _group(layout: Layout, replicas: int) -> dist.ProcessGroup:
    """Build groups of this many neighbouring replicas each, over all stages, and return the group of this rank.
    Collective."""
    ranks: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        ranks.setdefault(layout.dp_rank(rank) // replicas, []).append(rank)
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(list(ranks.values()))[0])  # each rank is in one
