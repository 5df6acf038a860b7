"""Which tokens of a row each rank of a context-parallel group holds."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from glm46.distributed.sequence_balance import balanced_places


@dataclass(frozen=True)
class SequenceShard:
    """This rank's part of every row; see `balanced_places` for how rows are divided."""

    group: dist.ProcessGroup
    ranks: int
    rank: int

    def places(self, length: int, window: int | None) -> list[Tensor]:
        """For each rank of the group, where its tokens stand in a row of one document; int64."""
        return list(torch.from_numpy(balanced_places(np.zeros(length, np.int64), self.ranks, window)))

    def cut(self, rows: dict[str, Tensor], window: int | None) -> dict[str, Tensor]:
        """This rank's part of tensors [B, S] or [B, K, S].

        Args:
            rows: with `document_ids` [B, S] every row is divided by its documents, without it all rows alike.
            window: most keys that a token sees; None for no limit.
        """
        B, length = next(iter(rows.values())).shape[0], next(iter(rows.values())).shape[-1]
        places_BS = self._places(rows.get("document_ids"), B, length, window)[:, self.rank]
        return {name: _pick(tensor, places_BS.to(tensor.device)) for name, tensor in rows.items()}

    def restore(self, part: Tensor, document_ids: Tensor | None, window: int | None) -> Tensor:
        """The whole rows [N, B, S], from every rank's part [N, B, S / ranks]; no gradient. Collective.

        Args:
            document_ids: [B, S] of the whole rows, if `cut` had them.
        """
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        gathered = torch.cat(parts, dim=-1)
        places_BRS = self._places(document_ids, gathered.shape[1], gathered.shape[-1], window)
        order = places_BRS.flatten(1).to(part.device).expand_as(gathered)
        return torch.empty_like(gathered).scatter_(-1, order, gathered)

    def _places(self, document_ids: Tensor | None, rows: int, length: int, window: int | None) -> Tensor:
        """int64 [B, ranks, S / ranks]."""
        if document_ids is None:
            return torch.stack(self.places(length, window)).expand(rows, -1, -1)
        documents = document_ids.cpu().numpy()
        return torch.from_numpy(np.stack([balanced_places(row, self.ranks, window) for row in documents]))


def _pick(tensor: Tensor, places_BS: Tensor) -> Tensor:
    if tensor.ndim == 3:
        places_BS = places_BS.unsqueeze(1).expand(-1, tensor.shape[1], -1)
    return tensor.gather(-1, places_BS)
