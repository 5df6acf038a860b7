"""A cache of keys and values, as the attention core of each layer. The tokens of a call are one row for the layers.

A token's key is in the slot of its position, so rows may have different lengths. Padding and rejected drafts leave
wrong keys in slots after the end of a row. No token reads them: a token reads only slots up to its own position, and
each slot is overwritten by its own token first.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.distributed.local_tensor import local_tensor
from glm46.model.attention import Attention, attend
from glm46.model.attention_layout import AttentionLayout, attention_layout


class Slots:
    """Slots of the tokens of one call, which are of the first rows, and the mask over all slots; one for all layers.

    Args:
        starts: position of each row's first token.
        length: tokens of each row in this call.
        sliding_window: as in the model's shape.
    """

    layout: AttentionLayout | None = None

    def __init__(self, starts: Sequence[int], length: int, device: torch.device, sliding_window: int | None):
        self.rows, self.length = len(starts), length
        self.first, self.last = min(starts), max(starts) + length  # all positions of the call: [first, last)
        self.is_even = self.first == max(starts)
        self.positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(length, device=device)
        """[rows, length]."""
        self.mask: Tensor | None = None
        self.is_causal = False
        sees_all = length == 1 and self.is_even
        if sliding_window is None and self.is_even and (sees_all or self.first == 0):
            self.is_causal = not sees_all
            return
        slots = torch.arange(self.last, device=device)
        distance = self.positions.unsqueeze(-1) - slots
        mask = distance >= 0
        if sliding_window is not None:
            mask = mask & (distance < sliding_window)
        self.mask = mask.unsqueeze(1)


class Packed:
    """Places of the tokens of several prompts, one after another in one row: each is the start of a row of the cache.

    Args:
        lengths: tokens of each prompt.
        rows: row of the cache of each prompt.
        sliding_window: as in the model's shape.
    """

    def __init__(self, lengths: Sequence[int], rows: Sequence[int], device: torch.device, sliding_window: int | None):
        self.last = max(lengths)
        ends = list(accumulate(lengths))
        self.parts = [(row, end - length, end) for row, length, end in zip(rows, lengths, ends, strict=True)]
        counts = torch.tensor(lengths)
        document = torch.arange(len(lengths)).repeat_interleave(counts).unsqueeze(0)
        self.positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)
        layout = attention_layout(document if len(lengths) > 1 else None, tuple(document.shape), sliding_window)
        self.layout = None if layout is None else layout.to(device)


class Nothing:
    """The place of a call without tokens."""

    layout: AttentionLayout | None = None
    last = 0

    def __init__(self, device: torch.device):
        self.positions = torch.zeros(1, 0, dtype=torch.int64, device=device)


Place = Slots | Packed | Nothing


class CachedCore:
    """An `AttentionCore` with a cache of the keys and values of this rank's heads. It takes the tokens of a call as one
    row, perhaps with padding behind them.

    Args:
        batch: rows.
        max_length: slots of each row.
    """

    def __init__(self, attention: Attention, batch: int, max_length: int):
        weight = local_tensor(attention.k_proj.weight)
        heads = max(weight.shape[0] // attention.head_dim, 1)  # ranks that share a head gather it
        shape = (batch, heads, max_length, attention.head_dim)  # the order of the attention kernel
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.place: Place | None = None

    def __call__(self, q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, layout: AttentionLayout | None) -> Tensor:
        tokens = self.place.positions.numel()
        if isinstance(self.place, Nothing):
            return torch.zeros_like(q_BSHC)
        out_BSHC = self._attend(*(x[:, :tokens] for x in (q_BSHC, k_BSKC, v_BSKC)), layout)
        padding = q_BSHC.shape[1] - tokens
        return F.pad(out_BSHC, (0, 0, 0, 0, 0, padding)) if padding else out_BSHC

    def _attend(self, q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, layout: AttentionLayout | None) -> Tensor:
        """The tokens without padding; [1, tokens, H, C]."""
        place = self.place
        if isinstance(place, Packed):  # the prompts see only themselves: as in training, without the cache
            for cache, new in ((self.keys, k_BSKC), (self.values, v_BSKC)):
                for row, start, end in place.parts:
                    cache[row, :, : end - start] = new[0, start:end].transpose(0, 1)
            return attend(q_BSHC, k_BSKC, v_BSKC, layout)
        assert isinstance(place, Slots) and layout is None
        size = q_BSHC.shape
        q_BSHC, k_BSKC, v_BSKC = (x.view(place.rows, place.length, *x.shape[2:]) for x in (q_BSHC, k_BSKC, v_BSKC))
        self._write(self.keys, k_BSKC, place)
        self._write(self.values, v_BSKC, place)
        keys, values = self.keys[: place.rows, :, : place.last], self.values[: place.rows, :, : place.last]
        if q_BSHC.shape[1] == 1:
            # One token: the query heads that share a key become queries of one head, so each key is read once.
            grouped = q_BSHC.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=place.mask).reshape(size)
        out_BHSC = F.scaled_dot_product_attention(
            q_BSHC.transpose(1, 2),
            keys,
            values,
            attn_mask=place.mask,
            is_causal=place.is_causal,
            enable_gqa=True,
        )
        return out_BHSC.transpose(1, 2).reshape(size)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first slots of rows to other rows, all at once: targets may be sources."""
        from_rows, to_rows = torch.tensor([sources, targets], device=self.keys.device)
        for cache in (self.keys[:, :, :length], self.values[:, :, :length]):
            cache.index_copy_(0, to_rows, cache.index_select(0, from_rows))

    @staticmethod
    def _write(cache_BTKC: Tensor, new_BSKC: Tensor, slots: Slots) -> None:
        cache_BTKC = cache_BTKC[: slots.rows]
        if slots.is_even:
            cache_BTKC[:, :, slots.first : slots.last] = new_BSKC.transpose(1, 2)
            return
        index = slots.positions.view(*slots.positions.shape, 1, 1).expand_as(new_BSKC).transpose(1, 2)
        cache_BTKC.scatter_(2, index, new_BSKC.transpose(1, 2))
