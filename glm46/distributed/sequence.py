"""Which tokens of a row each rank of a context-parallel group holds."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of every row: one chunk of its head and the mirrored one of its tail.

    Under causal attention a token costs as much as there are tokens before it; a head and a tail chunk together cost
    every rank the same.
    """

    group: dist.ProcessGroup
    ranks: int
    rank: int

    def places(self, length: int) -> list[Tensor]:
        """For each rank of the group, where in a row of `length` its tokens stand, in its own order; int64."""
        chunks = torch.arange(length).chunk(2 * self.ranks)
        return [torch.cat([chunks[r], chunks[2 * self.ranks - 1 - r]]) for r in range(self.ranks)]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor whose last dimension is the row."""
        return whole.index_select(-1, self.places(whole.shape[-1])[self.rank].to(whole.device))

    def restore(self, part: Tensor) -> Tensor:
        """The whole rows, from every rank's part in the last dimension; no gradient. Collective."""
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        gathered = torch.cat(parts, dim=-1)
        order = torch.cat(self.places(gathered.shape[-1])).to(part.device)
        return torch.empty_like(gathered).index_copy_(-1, order, gathered)
