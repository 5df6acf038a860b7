"""A cache of keys and values, as the attention core of each layer.

A token's key is in the slot of its position, so rows of a batch may have different lengths. Padding and rejected drafts
leave wrong keys in slots after the end of a row. No token reads them: a token reads only slots up to its own position,
and each slot is overwritten by its own token first.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.model.attention import Attention


class Slots:
    """Slots of the tokens of one call, and the mask over all slots; shared by all layers of the call.

    Args:
        starts: position of each row's first token.
        length: tokens of each row in this call.
        sliding_window: as in the model's shape.
    """

    def __init__(self, starts: Sequence[int], length: int, device: torch.device, sliding_window: int | None):
        self.first, self.last = min(starts), max(starts) + length  # all positions of the call: [first, last)
        self.is_even = self.first == max(starts)
        self.positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(length, device=device)
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


class CachedCore:
    """An `AttentionCore` with a cache of keys and values.

    Args:
        batch: rows.
        max_length: slots of each row.
    """

    def __init__(self, attention: Attention, batch: int, max_length: int):
        weight = attention.k_proj.weight
        heads = weight.shape[0] // attention.head_dim
        shape = (batch, heads, max_length, attention.head_dim)  # the order of the attention kernel
        self._keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self._values = torch.zeros_like(self._keys)
        self.slots: Slots | None = None

    def __call__(self, q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Tensor | None) -> Tensor:
        slots = self.slots
        assert slots is not None and mask is None
        self._write(self._keys, k_BSKC, slots)
        self._write(self._values, v_BSKC, slots)
        keys, values = self._keys[:, :, : slots.last], self._values[:, :, : slots.last]
        if q_BSHC.shape[1] == 1:
            # One token: the query heads that share a key become queries of one head, so each key is read once.
            grouped = q_BSHC.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3])
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=slots.mask).reshape(q_BSHC.shape)
        out_BHSC = F.scaled_dot_product_attention(
            q_BSHC.transpose(1, 2),
            keys,
            values,
            attn_mask=slots.mask,
            is_causal=slots.is_causal,
            enable_gqa=True,
        )
        return out_BHSC.transpose(1, 2)

    @staticmethod
    def _write(cache_BKTC: Tensor, new_BSKC: Tensor, slots: Slots) -> None:
        if slots.is_even:
            cache_BKTC[:, :, slots.first : slots.last] = new_BSKC.transpose(1, 2)
            return
        index = slots.positions.view(*slots.positions.shape, 1, 1).expand_as(new_BSKC).transpose(1, 2)
        cache_BKTC.scatter_(2, index, new_BSKC.transpose(1, 2))
