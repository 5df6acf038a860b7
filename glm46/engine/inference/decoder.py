"""Model with a cache: computes hidden states of new tokens from the cached keys and values of earlier ones."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle, islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.compute.model.attention_runs import describe_core
from glm46.compute.model.block import TransformerBlock
from glm46.compute.model.mtp import MTPLayer
from glm46.compute.model.rope import rotary_tables
from glm46.compute.model.router import RoutingOptions
from glm46.compute.model.routes import no_routes
from glm46.compute.model.sparse_attention import SparseState
from glm46.compute.model.transformer import Transformer
from glm46.engine.inference import few_tokens
from glm46.engine.inference.cache import CachedCore, Nothing, Packed, Place, Slots, cached_core
from glm46.engine.inference.model_mesh import ModelMesh

PREFILL_TOKENS = 4096
"""Maximum tokens of several prompts that are computed in one call; a longer prompt has a call of its own."""

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention kernels of a decoder: the first one that supports a call is used. Flash attention takes no mask, so a
decoding step on a GPU uses memory-efficient attention. cuDNN is excluded: it builds a plan for each new prompt length,
which takes longer than a layer."""


def describe_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """Describe the attention kernels of a decoder, for the first message."""
    token_kernel = "torch's CPU kernel" if device.type == "cpu" else "memory-efficient attention"
    return f"prompts by {describe_core(device, dtype)}, new tokens by {token_kernel}"


def drafted_tokens(model: Transformer, drafts: bool | int) -> int:
    """Return the number of tokens that the prediction layers draft, see `Decoder`."""
    return model.shape.num_nextn_predict_layers if drafts is True else int(drafts)


class Decoder:
    """A model with a cache. Use it as a context manager, which restores the model at exit.

    On a mesh all methods except `copy_rows` are collective over the ranks with the same rows, and `fill`, `hidden` with
    `draft_hidden`, and `idle` over all ranks that run in step (`ModelMesh`).

    Args:
        model: the model; on a mesh, this rank's part.
        batch: maximum number of rows.
        max_length: positions of each row, for prompt, new tokens and drafts.
        drafts: also run the prediction layers, which `draft_hidden` needs: the number of tokens that they draft, or
            True for one per layer. Draft k is of layer k modulo their number.
        record: store the experts that each token chose, next to its keys and values.
        cpu_kernels: run layers with `few_tokens` if it supports them; False runs the layers' own forward. These kernels
            copy most weights.
        mesh: ranks that hold the model.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        batch: int,
        max_length: int,
        drafts: bool | int = False,
        record: bool = False,
        cpu_kernels: bool = True,
        mesh: ModelMesh = ModelMesh(),  # noqa: B008 - frozen
    ):
        self.model = model
        self.mesh = mesh
        self._cpu_kernels = cpu_kernels
        self.batch = batch
        self.max_length = max_length
        self.depth = drafted_tokens(model, drafts)
        """Number of tokens that the prediction layers draft."""
        self._blocks = cast(list[TransformerBlock], list(model.layers.values()))
        prediction_layers = cast(list[MTPLayer], list(model.mtp.values()))  # empty before the last stage
        self._drafting = list(islice(cycle(prediction_layers), self.depth))
        self._main = [cached_core(block.self_attn, batch, max_length) for block in self._blocks]
        self._mtp = [cached_core(layer.block.self_attn, batch, max_length) for layer in self._drafting]
        self._plain: list[tuple[nn.Module, str, Any]] = []
        self._kernels: AbstractContextManager[object] = nullcontext()
        weight = local_tensor(next(model.parameters()))
        self.device = weight.device
        self._dtype = weight.dtype
        size = (batch, max_length)
        self._routes = torch.zeros_like(no_routes(size, model.shape), device=self.device) if record else None
        self.take_weights()

    @property
    def cache_bytes(self) -> int:
        """Bytes of all cached keys and values, or latents."""
        return sum(cache.nbytes for core in (*self._main, *self._mtp) for cache in core.caches)

    def take_weights(self) -> None:
        """Drop everything that was derived from the weights and the attention of the model; the next call derives it
        again. Call it after they have changed."""
        for core in (*self._main, *self._mtp):
            core.take_weights()
        self._few: dict[TransformerBlock, few_tokens.Layer | None] = {}
        self._head: few_tokens.Product | None = None
        head = self.model.lm_head
        self._has_head = self._cpu_kernels and head is not None and few_tokens.is_plain(head)
        self._tables: list[Tensor] | None = None

    def __enter__(self) -> "Decoder":
        blocks = [*self._blocks, *(layer.block for layer in self._drafting)]
        for block, core in zip(blocks, [*self._main, *self._mtp], strict=True):
            self._plain.append((block.self_attn, core.replaces, getattr(block.self_attn, core.replaces)))
            setattr(block.self_attn, core.replaces, core)
        self._kernels = sdpa_kernel(KERNELS)
        self._kernels.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._kernels.__exit__(None, None, None)
        for attention, name, core in reversed(self._plain):  # the layer of several depths is there more than once
            setattr(attention, name, core)
        self._plain.clear()

    def fill(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Cache the keys and values of all tokens of each prompt except the last one, which is fed to `hidden` next.

        Args:
            prompts: token ids, at least two per prompt.
            rows: row of the cache of each prompt.
        """
        portions = list(_portions([len(prompt) - 1 for prompt in prompts]))
        (calls,) = self.mesh.most(len(portions))
        for portion in portions:
            place = Packed(
                [len(prompts[i]) - 1 for i in portion],
                [rows[i] for i in portion],
                self.device,
                self.model.shape.sliding_window,
            )
            tokens = torch.tensor([[token for i in portion for token in prompts[i][:-1]]], device=self.device)
            hidden = self._through_layers(tokens, place)
            for k in range(len(self._drafting)):
                # The tokens after the prompt are not known, and the last one is repeated: these keys make drafts
                # slightly worse.
                ahead = [[*prompts[i], *[prompts[i][-1]] * k][k + 1 : k + len(prompts[i])] for i in portion]
                tokens = torch.tensor([[token for row in ahead for token in row]], device=self.device)
                hidden = self._through_depth(k, hidden, tokens, place)
        for _ in range(calls - len(portions)):
            self.idle()

    def idle(self) -> None:
        """Run the model and the prediction layers without tokens, so that ranks with unfinished rows can use this
        rank's experts."""
        place = Nothing(self.device)
        tokens = torch.zeros(1, 0, dtype=torch.int64, device=self.device)
        hidden = self._through_layers(tokens, place)
        for k in range(len(self._drafting)):
            hidden = self._through_depth(k, hidden, tokens, place)

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the keys and values of the first ``length`` tokens of rows to other rows. All sources are read first, so
        targets may be sources."""
        for core in (*self._main, *self._mtp):
            core.copy_rows(sources, targets, length)
        if self._routes is not None:
            self._routes[list(targets), :length] = self._routes[list(sources), :length]

    def routes(self, row: int, length: int) -> Tensor | None:
        """Return the experts that the first tokens of a row chose, [length, MoE layers, A] of `route_type` on the CPU;
        None if they are not recorded."""
        if self._routes is None:
            return None
        return self.mesh.sum_over_stages(self._routes[row, :length].to("cpu", copy=True))

    def hidden(self, tokens: Tensor, starts: Sequence[int]) -> Tensor | None:
        """Compute hidden states after the final norm of the first B rows, [B, S, D]; None on stages without the head,
        where `draft_hidden` and `logits` must not be called.

        Args:
            tokens: int64 [B, S].
            starts: position of each row's first token. The cache must hold all positions before it.
        """
        return self._through_layers(tokens, self._slots(tokens, starts))

    def draft_hidden(self, k: int, hidden: Tensor, tokens: Tensor, starts: Sequence[int]) -> Tensor:
        """Compute hidden states of prediction depth k, [B, S, D]. The state of position i predicts token i + k + 2.

        Args:
            hidden: [B, S, D], hidden states of the model (k = 0) or of depth k - 1 at the same positions.
            tokens: int64 [B, S], token i + k + 1 for position i.
            starts: see `hidden`.
        """
        return self._through_depth(k, hidden, tokens, self._slots(tokens, starts))

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute FP32 logits [..., V]."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        head = self.model.lm_head
        assert head is not None, "the last stage has it"
        if self._has_head and few_tokens.is_for(rows):
            self._head = self._head or few_tokens.Product(head.weight)
            return self._head(rows[0]).view(*hidden.shape[:-1], -1)
        logits: Tensor = head(self.mesh.own_tokens(rows))[:, : rows.shape[1]]
        return logits.view(*hidden.shape[:-1], -1).float()

    def _slots(self, tokens: Tensor, starts: Sequence[int]) -> Slots:
        return Slots(starts, tokens.shape[1], self.max_length, tokens.device, self.model.shape.sliding_window)

    def _through_layers(self, tokens: Tensor, place: Place) -> Tensor | None:
        """Compute hidden states [B, S, D] of tokens [B, S] on the last stage of a pipeline; None on other stages."""
        mesh = self.mesh
        rope = self._rope(place)
        is_real = self._is_real(place)
        if mesh.stage == 0:
            x = self._embedded(tokens)
        else:
            size = (1, mesh.padded(tokens.numel()) // mesh.layout.tp, self.model.shape.hidden_size)
            x = torch.empty(size, dtype=self._dtype, device=self.device)
            mesh.receive(x)
        routes_by_layer: dict[int, Tensor] = {}
        sparse = SparseState()
        for name, block, core in zip(self.model.layers, self._blocks, self._main, strict=True):
            x, routes, added = self._run(block, core, x, place, rope, is_real, sparse)
            sparse = sparse if added is None else sparse.followed_by(added)
            if routes is not None:
                routes_by_layer[int(name) - self.model.shape.first_k_dense_replace] = routes.view(*x.shape[:2], -1)
        if self._routes is not None and routes_by_layer and not isinstance(place, Nothing):
            routes = mesh.all_tokens(torch.stack([*routes_by_layer.values()], 2).to(torch.int32), tokens.numel())
            layers = slice(min(routes_by_layer), max(routes_by_layer) + 1)
            _record(self._routes, routes.to(self._routes.dtype), layers, place)
        if not mesh.is_last:
            mesh.send(x)
            return None
        assert self.model.norm is not None, "the last stage has it"
        return self._whole(self.model.norm(x), tokens)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Embed this rank's part of tokens [B, S]: [1, t, D]."""
        ids = tokens.reshape(1, -1)
        assert self.model.embed_tokens is not None, "the first stage has it, and the last one with prediction layers"
        embedded: Tensor = self.model.embed_tokens(F.pad(ids, (0, self.mesh.padded(ids.shape[1]) - ids.shape[1])))
        return embedded

    def _whole(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Gather [B, S, D] from this rank's part [1, t, D] of tokens [B, S]."""
        return self.mesh.all_tokens(x, tokens.numel()).reshape(*tokens.shape, x.shape[-1])

    def _is_real(self, place: Place) -> Tensor | None:
        """Return a boolean mask [1, T], False for padding; None without padding."""
        tokens = place.positions.numel()
        padded = self.mesh.padded(tokens)
        return None if padded == tokens else torch.arange(padded, device=self.device).unsqueeze(0) < tokens

    def _through_depth(self, k: int, hidden: Tensor | None, tokens: Tensor, place: Place) -> Tensor:
        assert hidden is not None, "prediction layers are on the last stage"
        layer = self._drafting[k]
        embedding = self._embedded(tokens)
        local_hidden = self.mesh.own_tokens(hidden.reshape(1, -1, hidden.shape[-1]))
        x = layer.eh_proj(torch.cat([layer.enorm(embedding), layer.hnorm(local_hidden)], dim=-1))
        x, *_ = self._run(layer.block, self._mtp[k], x, place, self._rope(place), self._is_real(place))
        return self._whole(layer.norm(x), tokens)

    def _rope(self, place: Place) -> tuple[Tensor, Tensor]:
        """Return the rotary tables of the tokens of a call as one row, padding included."""
        assert place.last <= self.max_length
        if self._tables is None:
            every_position = torch.arange(self.max_length, device=self.device).unsqueeze(0)
            self._tables = [table[0] for table in rotary_tables(every_position, self.model.shape, self._dtype)]
        tokens, (cos, sin) = place.positions.numel(), self._tables
        positions = F.pad(place.positions.view(1, -1), (0, self.mesh.padded(tokens) - tokens))
        return cos[positions], sin[positions]

    def _run(
        self,
        block: TransformerBlock,
        core: CachedCore,
        x: Tensor,
        place: Place,
        rope: tuple[Tensor, Tensor],
        is_real: Tensor | None,
        sparse: SparseState = SparseState(),  # noqa: B008 - a tuple
    ) -> tuple[Tensor, Tensor | None, SparseState | None]:
        """Run a layer. Return hidden states; if they are recorded, the experts that the tokens chose; and what
        sparse attention adds, see `LayerOutput.sparse`."""
        setattr(block.self_attn, core.replaces, core)  # a layer of several depths has a cache for each
        core.place = place
        options = self.model.routing(_OPTIONS if self._routes is None else _RECORD)
        if self._cpu_kernels and place.layout is None and few_tokens.is_for(x):
            if block not in self._few:
                self._few[block] = few_tokens.Layer(block) if few_tokens.is_plain(block) else None
            if (layer := self._few[block]) is not None:
                return *layer(x, rope, core, options), None
        output = block(x, rope, place.layout, is_real, options, None, sparse)
        return output.hidden, output.statistics and output.statistics.routes, output.sparse


def _record(recorded: Tensor, routes: Tensor, layers: slice, place: Slots | Packed) -> None:
    """Record the routes of a call, [1, T, layers, A]."""
    if isinstance(place, Packed):
        for row, start, end in place.parts:
            recorded[row, : end - start, layers] = routes[0, start:end]
    else:
        rows = torch.arange(place.rows, device=routes.device).unsqueeze(1)
        recorded[rows, place.positions, layers] = routes.view(place.rows, place.length, *routes.shape[2:])


def _portions(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Divide prompt indices into consecutive groups of at most `PREFILL_TOKENS` tokens, with at least one prompt
    each."""
    portion = list[int]()
    tokens = 0
    for number, length in enumerate(lengths):
        if portion and tokens + length > PREFILL_TOKENS:
            yield portion
            portion = []
            tokens = 0
        portion.append(number)
        tokens += length
    if portion:
        yield portion


_OPTIONS = RoutingOptions(statistics=False)
_RECORD = RoutingOptions(record=True)
