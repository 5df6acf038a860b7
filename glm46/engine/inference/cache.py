"""Cache of keys and values, as the attention core of each layer. The layers see the tokens of a call as one row.

A token's key is in the slot of its position, so rows may have different lengths. Padding and rejected drafts leave
wrong keys in slots after the end of a row. No token reads them: a token reads only slots up to its own position, and
each slot is overwritten by its own token first.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.attention import Attention, attend
from glm46.compute.model.attention_layout import AttentionLayout, attention_layout, cumulative, longest
from glm46.compute.model.attention_runs import attend_in_runs
from glm46.compute.model.indexer import IndexTensors, choose_keys
from glm46.compute.model.latent_attention import Expand, LatentAttention
from glm46.compute.model.sparse_attention import MakeIndex, SparseLatentAttention

_FEW_TOKENS = 16
"""Maximum tokens of a row that attend with a mask over the slots: the last token and its drafts. More tokens attend in
runs, because their mask would grow with queries times keys."""

_LEAST_SLOTS = 32
"""Minimum slots that a mask covers: small, because short answers of small models read all of them for each token."""


class Slots:
    """Places in the cache of the tokens of one call, the same number for each of the first rows, and their attention
    mask; shared by all layers.

    Args:
        starts: position of each row's first token.
        length: tokens of each row in this call.
        max_length: slots of a row.
        sliding_window: as in the model's shape.
    """

    layout: AttentionLayout | None = None

    def __init__(
        self, starts: Sequence[int], length: int, max_length: int, device: torch.device, sliding_window: int | None
    ):
        self.rows = len(starts)
        self.length = length
        # All positions of the call are in [first, last).
        self.first = min(starts)
        self.last = max(starts) + length
        self.is_even = self.first == max(starts)
        self.positions = torch.tensor(starts, device=device).unsqueeze(1) + torch.arange(length, device=device)
        """Positions of the tokens, [rows, length]."""
        self.is_first = self.is_even and self.first == 0 and sliding_window is None
        """True if the tokens attend only to each other, without keys of the cache."""
        self.runs: AttentionLayout | None = None
        self._mask: Tensor | None = None
        if self.is_first:
            return
        if length > _FEW_TOKENS:
            self.ends = [start + length for start in starts]
            self.runs = _layout_of_runs([length] * len(starts), self.ends, sliding_window).to(device)
            return
        self.slots = min(_rounded_length(self.last, _LEAST_SLOTS), max_length)
        """Number of slots to read, rounded so that kernels that are planned for each shape see few shapes."""
        distance = self.positions.unsqueeze(-1) - torch.arange(self.slots, device=device)
        is_seen = distance >= 0
        if sliding_window is not None:
            is_seen &= distance < sliding_window
        self._is_seen = is_seen.unsqueeze(1)

    def mask(self, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the mask to add to the scores, zero or -inf, [rows, 1, length * groups, slots]: each token has
        ``groups`` queries. All layers use the same mask."""
        if self._mask is None:
            mask = torch.zeros(self._is_seen.shape, dtype=dtype, device=self._is_seen.device)
            mask.masked_fill_(~self._is_seen, -math.inf)
            self._mask = mask.repeat_interleave(groups, 2) if self.length > 1 else mask.expand(-1, -1, groups, -1)
        return self._mask


class Packed:
    """Places of the tokens of several prompts, one after another in one row; each prompt starts a row of the cache.

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
    """Place of a call without tokens."""

    layout: AttentionLayout | None = None
    last = 0

    def __init__(self, device: torch.device):
        self.positions = torch.zeros(1, 0, dtype=torch.int64, device=device)


Place = Slots | Packed | Nothing


class CachedCore:
    """An `AttentionCore` with a cache of the keys and values of this rank's heads; for latent attention, a `LatentCore`
    with a cache of latents, which few tokens use without computing keys and values. The tokens of a call are one row,
    perhaps followed by padding.

    Args:
        batch: rows.
        max_length: slots of each row.
    """

    def __init__(self, attention: Attention | LatentAttention, batch: int, max_length: int):
        if isinstance(attention, LatentAttention):
            weight = attention.kv_b_proj.weight
            heads = 1
            widths = [attention.rank + attention.rotated]
        else:
            weight = attention.k_proj.weight
            widths = [attention.head_dim] * 2
            heads = max(local_tensor(weight).shape[0] // attention.head_dim, 1)  # ranks that share a head gather it
        like = local_tensor(weight)
        # The dimension order of the attention kernel.
        self.caches = [like.new_zeros(batch, heads, max_length, width) for width in widths]
        self.attention = attention
        self.place: Place | None = None
        self.take_weights()

    replaces = "core"
    """Attribute of the attention that a decoder replaces by this core."""

    def take_weights(self) -> None:
        """Drop everything that was derived from the weights."""
        self._kv_weight_by_head: Tensor | None = None

    def __call__(
        self, q_BSHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor | Expand, layout: AttentionLayout | None
    ) -> Tensor:
        assert self.place is not None, "it is set before each call"
        tokens = self.place.positions.numel()
        if isinstance(self.place, Nothing):
            return torch.zeros_like(q_BSHC)
        # Latent attention passes its rows as keys, and a function as values.
        new = (k_BSKC,) if callable(v_BSKC) else (k_BSKC, v_BSKC)
        out_BSHC = self._attend(q_BSHC[:, :tokens], [x[:, :tokens] for x in new], layout)
        padding = q_BSHC.shape[1] - tokens
        return F.pad(out_BSHC, (0, 0, 0, 0, 0, padding)) if padding else out_BSHC

    def _keys_and_values(self, cached: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values, [B, S, K, C] each, from cached tensors."""
        if isinstance(self.attention, LatentAttention):
            return self.attention.expand(cached[0])
        keys, values = cached
        return keys, values

    def _attend(self, q_BSHC: Tensor, new: list[Tensor], layout: AttentionLayout | None) -> Tensor:
        """Attend from the tokens without padding; returns [1, tokens, H, C]."""
        place = self.place
        if isinstance(place, Packed):  # prompts attend only to themselves: as in training, without the cache
            self._write_prompts(new, place)
            return attend(q_BSHC, *self._keys_and_values(new), layout)
        assert isinstance(place, Slots) and layout is None
        q_RSHC, *new = (x.view(place.rows, place.length, *x.shape[2:]) for x in (q_BSHC, *new))
        for cache, new_values in zip(self.caches, new, strict=True):
            self._write(cache, new_values, place)
        if place.is_first:
            return attend(q_RSHC, *self._keys_and_values(new), None).reshape(q_BSHC.shape)
        if place.runs is not None:
            cached = [
                torch.cat([cache[row, :, :end].transpose(0, 1) for row, end in enumerate(place.ends)]).unsqueeze(0)
                for cache in self.caches
            ]
            keys, values = (x[0] for x in self._keys_and_values(cached))
            return attend_in_runs(q_BSHC[0], keys, values, place.runs).unsqueeze(0)
        cached = [cache[: place.rows, :, : place.slots] for cache in self.caches]
        if not isinstance(self.attention, LatentAttention):
            keys, values = cached
            return _few(q_RSHC, keys, values, place).reshape(q_BSHC.shape)
        weight_HCL = self._weight_by_head(self.attention)
        # The weights of keys are multiplied with the queries, and the weights of values with the result, instead of
        # with all cached latents: attention of many queries to one key.
        part = self.attention.key_part
        rank = self.attention.rank
        latents = cached[0]
        q_BSHL = torch.einsum("bshn,hnl->bshl", q_RSHC[..., :part], weight_HCL[:, :part])
        q = torch.cat([q_BSHL, q_RSHC[..., part:]], dim=-1)
        out_BSHL = _few(q, latents, latents[..., :rank], place, scale=self.attention.head_dim**-0.5)
        return torch.einsum("bshl,hcl->bshc", out_BSHL, weight_HCL[:, part:]).reshape(q_BSHC.shape)

    def _weight_by_head(self, attention: LatentAttention) -> Tensor:
        if self._kv_weight_by_head is None:
            self._kv_weight_by_head = attention.weight_by_head().detach()
        return self._kv_weight_by_head

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first slots of rows to other rows. All sources are read first, so targets may be sources."""
        from_rows, to_rows = torch.tensor([sources, targets], device=self.caches[0].device)
        for cache in self.caches:
            cache[:, :, :length].index_copy_(0, to_rows, cache[:, :, :length].index_select(0, from_rows))

    def _write_prompts(self, new: list[Tensor], place: Packed) -> None:
        for cache, new_values in zip(self.caches, new, strict=True):
            for row, start, end in place.parts:
                cache[row, :, : end - start] = new_values[0, start:end].transpose(0, 1)

    @staticmethod
    def _write(cache_BTKC: Tensor, new_BSKC: Tensor, slots: Slots) -> None:
        cache_BTKC = cache_BTKC[: slots.rows]
        if slots.is_even:
            cache_BTKC[:, :, slots.first : slots.last] = new_BSKC.transpose(1, 2)
            return
        index = slots.positions.view(*slots.positions.shape, 1, 1).expand_as(new_BSKC).transpose(1, 2)
        cache_BTKC.scatter_(2, index, new_BSKC.transpose(1, 2))


class CachedSparseCore(CachedCore):
    """A `SparseCore` with a cache of latents and, in a layer with an indexer, of index keys."""

    replaces = "cached_core"
    attention: SparseLatentAttention

    def __init__(self, attention: SparseLatentAttention, batch: int, max_length: int):
        super().__init__(attention, batch, max_length)
        if attention.indexer is not None:
            width = attention.indexer.wk.out_features
            self.caches.append(self.caches[0].new_zeros(batch, 1, max_length, width))

    def __call__(  # type: ignore[override]  # the choice goes in and out
        self,
        q_BSHC: Tensor,
        rows: Tensor,
        index: MakeIndex | None,
        layout: AttentionLayout | None,
        chosen: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        place = self.place
        assert place is not None, "it is set before each call"
        if isinstance(place, Nothing):
            return torch.zeros_like(q_BSHC), None
        tokens = place.positions.numel()
        padding = q_BSHC.shape[1] - tokens
        q_BSHC = q_BSHC[:, :tokens]
        new = [rows[:, :tokens]]
        tensors = None
        if index is not None:
            tensors = IndexTensors(*(x[:tokens] for x in index()))
            new.append(tensors.k_TJ.view(1, tokens, 1, -1))
        if place.last <= self.attention.top_k:
            out = self._attend(q_BSHC, new, layout)
            chosen = None
        elif isinstance(place, Packed):
            self._write_prompts(new, place)
            out, chosen = self.attention.attend(q_BSHC, new[0], tensors and (lambda: tensors), layout, chosen)
        else:
            out, chosen = self._attend_to_chosen(q_BSHC, new, tensors, chosen, place)
        return (F.pad(out, (0, 0, 0, 0, 0, padding)) if padding else out), chosen

    def _attend_to_chosen(
        self, q_BSHC: Tensor, new: list[Tensor], tensors: IndexTensors | None, chosen: Tensor | None, place: Slots
    ) -> tuple[Tensor, Tensor]:
        """Attend to the chosen slots. Indices of keys count the slots of all rows that the call reads."""
        for cache, new_values in zip(self.caches, new, strict=True):
            self._write(cache, new_values.view(place.rows, place.length, *new_values.shape[2:]), place)
        cached = [cache[: place.rows, 0, : place.last] for cache in self.caches]
        if tensors is not None:
            first = torch.zeros(place.length, dtype=torch.int64, device=q_BSHC.device)
            choices = []
            for row, keys in enumerate(cached[1]):
                own = slice(row * place.length, (row + 1) * place.length)
                end = place.positions[row] + 1
                slots = choose_keys(
                    tensors.q_NGJ[own], keys, tensors.weights_NG[own], first, end, 0, self.attention.top_k
                )
                choices.append((slots + row * place.last).where(slots >= 0, -1))
            chosen = torch.cat(choices)
        assert chosen is not None, "the first layer has an indexer"
        weight_HCL = self._weight_by_head(self.attention)
        out = self.attention.attend_to_chosen(q_BSHC.flatten(0, 1), cached[0].flatten(0, 1), chosen, weight_HCL)
        return out.view(q_BSHC.shape), chosen


def cached_core(attention: Attention | LatentAttention, batch: int, max_length: int) -> CachedCore:
    """Build the core with a cache for this attention; arguments as in `CachedCore`."""
    kind = CachedSparseCore if isinstance(attention, SparseLatentAttention) else CachedCore
    return kind(attention, batch, max_length)  # type: ignore[arg-type]  # each kind with its own attention


def _few(q_BSHC: Tensor, keys: Tensor, values: Tensor, place: Slots, scale: float | None = None) -> Tensor:
    """Attend to slots of keys and values, [B, K, slots, C] each; returns [B, S, H, width of a value]."""
    # The query heads that share a key become queries of one head, so each key is read once, and kernels that take a
    # mask need not support grouped heads: on a GPU only the math kernel supports both, and it repeats the keys.
    B = keys.shape[0]
    K = keys.shape[1]
    C = keys.shape[3]
    q_BKGC = q_BSHC.view(B, place.length, K, -1, C).transpose(1, 2).reshape(B, K, -1, C)
    groups = q_BKGC.shape[2] // place.length
    mask = place.mask(groups, q_BKGC.dtype)
    out = F.scaled_dot_product_attention(q_BKGC, keys, values, attn_mask=mask, scale=scale)
    return out.view(B, K, place.length, groups, -1).transpose(1, 2).flatten(2, 3)


def _rounded_length(length: int, minimum: int) -> int:
    """Round ``length`` up, to at least ``minimum``: to a power of two up to 256, then to one of four steps per
    power."""
    bits = (max(length, minimum) - 1).bit_length()
    step = 1 << (bits if bits <= 8 else bits - 3)
    return -(-length // step) * step


def _layout_of_runs(queries: Sequence[int], keys: Sequence[int], window: int | None) -> AttentionLayout:
    """Build the layout of runs with these numbers of queries and keys; the last keys of a run belong to its queries."""
    query_lengths, key_lengths = (np.array(lengths, np.int64) for lengths in (queries, keys))
    sizes = longest(query_lengths), longest(key_lengths)
    return AttentionLayout(cumulative(query_lengths), cumulative(key_lengths), *sizes, window)
