"""The model with a cache: hidden states of new tokens from the cached keys and values of earlier ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from glm46.inference import few_tokens
from glm46.inference.cache import CachedCore, Slots
from glm46.model.block import TransformerBlock
from glm46.model.rope import rotary_tables
from glm46.model.router import RoutingOptions
from glm46.model.transformer import Transformer


class Decoder:
    """Runs a whole model with a cache for one batch. Use it as a context manager, which restores the model at exit.

    Args:
        batch: rows.
        max_length: longest row, prompt and new tokens, in tokens.
        cpu_kernels: run layers with `few_tokens` if it supports them; False runs the layers' own forward.
    """

    def __init__(self, model: Transformer, *, batch: int, max_length: int, cpu_kernels: bool = True):
        self.model, self._cpu_kernels = model, cpu_kernels
        self.batch, self.max_length = batch, max_length
        self._main = [CachedCore(block.self_attn, batch, max_length) for block in model.layers.values()]
        self._mtp = [CachedCore(layer.block.self_attn, batch, max_length) for layer in model.mtp.values()]
        self._plain: list[tuple[nn.Module, object]] = []
        self._few: dict[CachedCore, few_tokens.Layer | None] = {}
        self._head: few_tokens.Product | None = None
        self._has_head = cpu_kernels and few_tokens.is_plain(model.lm_head)
        weight = model.embed_tokens.weight
        every_position = torch.arange(max_length, device=weight.device).unsqueeze(0)
        self._tables = [table[0] for table in rotary_tables(every_position, model.shape, weight.dtype)]

    @property
    def depth(self) -> int:
        """Number of tokens that the prediction layers draft."""
        return len(self._mtp)

    def __enter__(self) -> "Decoder":
        blocks = [*self.model.layers.values(), *(layer.block for layer in self.model.mtp.values())]
        for block, core in zip(blocks, [*self._main, *self._mtp], strict=True):
            self._plain.append((block.self_attn, block.self_attn.core))
            block.self_attn.core = core
        return self

    def __exit__(self, *_: object) -> None:
        for attention, core in self._plain:
            attention.core = core
        self._plain.clear()

    def hidden(self, tokens: Tensor, starts: Sequence[int]) -> Tensor:
        """Hidden states after the final norm, [B, S, D].

        Args:
            tokens: int64 [B, S].
            starts: position of each row's first token. The cache must hold all positions before it.
        """
        x = self.model.embed_tokens(tokens)
        slots, rope = self._place(x, starts)
        for block, core in zip(self.model.layers.values(), self._main, strict=True):
            x = self._run(block, core, x, slots, rope)
        return self.model.norm(x)

    def draft_hidden(self, k: int, hidden: Tensor, tokens: Tensor, starts: Sequence[int]) -> Tensor:
        """Hidden states of prediction layer k, [B, S, D]. Those of position i predict token i + k + 2.

        Args:
            hidden: [B, S, D], hidden states of the model (k = 0) or of layer k - 1 at the same positions.
            tokens: int64 [B, S], for position i token i + k + 1.
            starts: as in `hidden`.
        """
        layer = self.model.mtp[str(k)]
        embedding = self.model.embed_tokens(tokens)
        x = layer.eh_proj(torch.cat([layer.enorm(embedding), layer.hnorm(hidden)], dim=-1))
        slots, rope = self._place(x, starts)
        return layer.norm(self._run(layer.block, self._mtp[k], x, slots, rope))

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [..., V]."""
        if hidden.ndim == 3 and self._has_head and few_tokens.is_for(hidden):
            self._head = self._head or few_tokens.Product(self.model.lm_head.weight)
            return self._head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
        return self.model.lm_head(hidden).float()

    def _place(self, x: Tensor, starts: Sequence[int]) -> tuple[Slots, tuple[Tensor, Tensor]]:
        slots = Slots(starts, x.shape[1], x.device, self.model.shape.sliding_window)
        assert slots.last <= self.max_length
        cos, sin = self._tables
        return slots, (cos[slots.positions], sin[slots.positions])

    def _run(
        self, block: TransformerBlock, core: CachedCore, x: Tensor, slots: Slots, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        core.slots = slots
        if self._cpu_kernels and few_tokens.is_for(x):
            if core not in self._few:
                self._few[core] = few_tokens.Layer(block) if few_tokens.is_plain(block) else None
            if (layer := self._few[core]) is not None:
                return layer(x, rope, core)
        return block(x, rope, None, None, _OPTIONS)[0]


_OPTIONS = RoutingOptions(statistics=False)
