"""The model with a cache: hidden states of new tokens from the cached keys and values of earlier ones."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from glm46.inference import few_tokens
from glm46.inference.cache import CachedCore, Packed, Slots
from glm46.model.block import TransformerBlock
from glm46.model.rope import rotary_tables
from glm46.model.router import RoutingOptions
from glm46.model.routes import no_routes
from glm46.model.transformer import Transformer

PREFILL_TOKENS = 4096
"""Most tokens of several prompts that are computed in one call; a longer prompt has its own."""


class Decoder:
    """Runs a whole model with a cache. Use it as a context manager, which restores the model at exit.

    Args:
        batch: most rows.
        max_length: positions of each row: those of prompt, new tokens and drafts.
        drafts: run the prediction layers too, which `draft_hidden` needs.
        record: keep the experts that each token chose, beside its keys and values.
        cpu_kernels: run layers with `few_tokens` if it supports them; False runs the layers' own forward. These kernels
            copy most weights.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        max_length: int,
        drafts: bool = False,
        record: bool = False,
        cpu_kernels: bool = True,
    ):
        self.model, self._cpu_kernels = model, cpu_kernels
        self.batch, self.max_length = batch, max_length
        self._drafting = list(model.mtp.values()) if drafts else []
        self._main = [CachedCore(block.self_attn, batch, max_length) for block in model.layers.values()]
        self._mtp = [CachedCore(layer.block.self_attn, batch, max_length) for layer in self._drafting]
        self._plain: list[tuple[nn.Module, object]] = []
        size, device = (batch, max_length), model.embed_tokens.weight.device
        self._routes = no_routes(size, model.shape).to(device) if record else None
        self.take_weights()

    @property
    def depth(self) -> int:
        """Number of tokens that the prediction layers draft."""
        return len(self._mtp)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(2 * core.keys.nbytes for core in (*self._main, *self._mtp))

    def take_weights(self) -> None:
        """Drop what follows from the weights and the attention of the model; the next call takes them anew. To be
        called after they have changed."""
        self._few: dict[CachedCore, few_tokens.Layer | None] = {}
        self._head: few_tokens.Product | None = None
        self._has_head = self._cpu_kernels and few_tokens.is_plain(self.model.lm_head)
        self._tables: list[Tensor] | None = None

    def __enter__(self) -> "Decoder":
        blocks = [*self.model.layers.values(), *(layer.block for layer in self._drafting)]
        for block, core in zip(blocks, [*self._main, *self._mtp], strict=True):
            self._plain.append((block.self_attn, block.self_attn.core))
            block.self_attn.core = core
        return self

    def __exit__(self, *_: object) -> None:
        for attention, core in self._plain:
            attention.core = core
        self._plain.clear()

    def fill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Write the keys and values of the tokens before the last one of each prompt, which is fed to `hidden` next.

        Args:
            prompts: token ids, at least two of each.
            rows: row of the cache of each prompt.
        """
        device = self.model.embed_tokens.weight.device
        for some in _portions([len(prompt) - 1 for prompt in prompts]):
            place = Packed(
                [len(prompts[i]) - 1 for i in some], [rows[i] for i in some], device, self.model.shape.sliding_window
            )
            tokens = torch.tensor([[token for i in some for token in prompts[i][:-1]]], device=device)
            hidden = self._through_layers(tokens, place)
            for k in range(self.depth):
                # After the end of the prompt the tokens are not known: these keys make drafts slightly worse.
                ahead = [[*prompts[i], *[prompts[i][-1]] * k][k + 1 : k + len(prompts[i])] for i in some]
                tokens = torch.tensor([[token for row in ahead for token in row]], device=device)
                hidden = self._through_depth(k, hidden, tokens, place)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of the first tokens of a row to another row."""
        for core in (*self._main, *self._mtp):
            core.copy_row(source, target, length)
        if self._routes is not None:
            self._routes[target, :length] = self._routes[source, :length]

    def routes(self, row: int, length: int) -> Tensor | None:
        """The experts that the first tokens of a row chose, [length, MoE layers, A] of `route_type` on the CPU; None if
        they are not recorded."""
        return None if self._routes is None else self._routes[row, :length].to("cpu", copy=True)

    def hidden(self, tokens: Tensor, starts: Sequence[int]) -> Tensor:
        """Hidden states after the final norm of the first B rows, [B, S, D].

        Args:
            tokens: int64 [B, S].
            starts: position of each row's first token. The cache must hold all positions before it.
        """
        return self._through_layers(tokens, self._slots(tokens, starts))

    def draft_hidden(self, k: int, hidden: Tensor, tokens: Tensor, starts: Sequence[int]) -> Tensor:
        """Hidden states of prediction layer k, [B, S, D]. Those of position i predict token i + k + 2.

        Args:
            hidden: [B, S, D], hidden states of the model (k = 0) or of layer k - 1 at the same positions.
            tokens: int64 [B, S], for position i token i + k + 1.
            starts: as in `hidden`.
        """
        return self._through_depth(k, hidden, tokens, self._slots(tokens, starts))

    def logits(self, hidden: Tensor) -> Tensor:
        """FP32 logits [..., V]."""
        if hidden.ndim == 3 and self._has_head and few_tokens.is_for(hidden):
            self._head = self._head or few_tokens.Product(self.model.lm_head.weight)
            return self._head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)
        return self.model.lm_head(hidden).float()

    def _slots(self, tokens: Tensor, starts: Sequence[int]) -> Slots:
        return Slots(starts, tokens.shape[1], tokens.device, self.model.shape.sliding_window)

    def _through_layers(self, tokens: Tensor, place: Slots | Packed) -> Tensor:
        x, rope = self.model.embed_tokens(tokens), self._rope(place)
        of_layers = []
        for block, core in zip(self.model.layers.values(), self._main, strict=True):
            x, routes = self._run(block, core, x, place, rope)
            of_layers += [] if routes is None else [routes.view(*tokens.shape, -1)]
        if self._routes is not None and of_layers:
            self._record(torch.stack(of_layers, 2).to(self._routes.dtype), place)
        return self.model.norm(x)

    def _record(self, routes: Tensor, place: Slots | Packed) -> None:
        """Keep the routes of a call, [B, S, MoE layers, A]."""
        if isinstance(place, Packed):
            for row, start, end in place.parts:
                self._routes[row, : end - start] = routes[0, start:end]
        else:
            rows = torch.arange(place.rows, device=routes.device).unsqueeze(1)
            self._routes[rows, place.positions] = routes

    def _through_depth(self, k: int, hidden: Tensor, tokens: Tensor, place: Slots | Packed) -> Tensor:
        layer, embedding = self._drafting[k], self.model.embed_tokens(tokens)
        x = layer.eh_proj(torch.cat([layer.enorm(embedding), layer.hnorm(hidden)], dim=-1))
        return layer.norm(self._run(layer.block, self._mtp[k], x, place, self._rope(place))[0])

    def _rope(self, place: Slots | Packed) -> tuple[Tensor, Tensor]:
        assert place.last <= self.max_length
        if self._tables is None:
            weight = self.model.embed_tokens.weight
            every_position = torch.arange(self.max_length, device=weight.device).unsqueeze(0)
            self._tables = [table[0] for table in rotary_tables(every_position, self.model.shape, weight.dtype)]
        cos, sin = self._tables
        return cos[place.positions], sin[place.positions]

    def _run(
        self, block: TransformerBlock, core: CachedCore, x: Tensor, place: Slots | Packed, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states after a layer, and, if they are recorded, the experts that its tokens chose."""
        core.place = place
        if self._cpu_kernels and place.layout is None and few_tokens.is_for(x):
            if core not in self._few:
                self._few[core] = few_tokens.Layer(block) if few_tokens.is_plain(block) else None
            if (layer := self._few[core]) is not None:
                return layer(x, rope, core)
        x, statistics = block(x, rope, place.layout, None, _OPTIONS if self._routes is None else _RECORD)
        return x, statistics and statistics.routes


def _portions(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divide prompts, by their numbers, into consecutive ones of at most `PREFILL_TOKENS`, at least one each."""
    some, tokens = [], 0
    for number, length in enumerate(lengths):
        if some and tokens + length > PREFILL_TOKENS:
            yield some
            some, tokens = [], 0
        some.append(number)
        tokens += length
    if some:
        yield some


_OPTIONS = RoutingOptions(statistics=False)
_RECORD = RoutingOptions(record=True)
