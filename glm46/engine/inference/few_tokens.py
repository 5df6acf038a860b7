"""CPU kernel of a decoder layer for the few tokens of a decoding step; equal to the layer's own forward.

It reads weights directly, so it supports only whole modules, whose products are the model's own (`is_plain`). Adapters
and float8 replace `Linear.product`, `Experts.product` or `Experts.project`; such a layer runs its own forward.

With few rows, the time of a product is that of reading the weight. A large weight is read fastest from oneDNN's packed
copy. Weights with the same input are concatenated, and so are the heads that one norm and one rotation serve. Routing
statistics and sorting by expert on the device, which only training needs, are skipped.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from glm46 import compat
from glm46.compute.model.attention import Attention, AttentionCore
from glm46.compute.model.block import TransformerBlock
from glm46.compute.model.experts import Experts
from glm46.compute.model.latent_attention import LatentAttention
from glm46.compute.model.layers import FeedForward, Linear, RMSNorm
from glm46.compute.model.moe import MoE
from glm46.compute.model.rope import rotate
from glm46.compute.model.router import RoutingOptions

MAX_TOKENS = 64
"""Maximum tokens of a call; up to this number the kernel was measured to be faster than the layer's own forward."""

_NARROW = 256
_MAX_TOKENS_NARROW = 256
"""Maximum tokens of a call up to hidden size `_NARROW`, where the overhead per operator exceeds its work: 96 to 256
tokens took 7 to 12 % less time; at hidden size 512 they took up to 25 % more."""

_PACKED_FROM = 2**17
"""Minimum elements of a packed weight. For smaller ones, the start-up of oneDNN takes longer than it saves."""

_PACKED_FROM_ROWS = 8
"""Minimum rows for which an expert is packed: few rows gain little, and packing costs as much as some products."""


def is_for(x: Tensor) -> bool:
    """True if hidden states [B, S, D] are on a CPU, in FP32, and have few enough tokens for their width."""
    max_tokens = _MAX_TOKENS_NARROW if x.shape[2] <= _NARROW else MAX_TOKENS
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[0] * x.shape[1] <= max_tokens


def is_plain(module: nn.Module) -> bool:
    """True if a module is unsharded on this process and without latent attention, and no `product` of it or its
    submodules has been replaced."""
    if any(isinstance(part, LatentAttention) for part in module.modules()):
        return False
    if any(isinstance(weight, DTensor) for weight in module.parameters()):
        return False
    products = (None, Linear.product, Experts.product)
    return all(getattr(p, "product", None) in products and "project" not in vars(p) for p in module.modules())


class Product:
    """Product of rows with the transpose of a weight, or of several concatenated weights, plus biases."""

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor | None] = (None,)):
        weight = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
        self._bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
        self._is_packed = weight.numel() >= _PACKED_FROM and compat.can_pack()
        self._weight = compat.pack_weight(weight) if self._is_packed else weight

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Map [T, D] to [T, O]; both contiguous."""
        if self._is_packed:
            return compat.packed_linear(x_TD, self._weight, self._bias)
        return F.linear(x_TD, self._weight, self._bias)


class Layer:
    """A decoder layer with weights copied and rearranged for this kernel."""

    def __init__(self, block: TransformerBlock):
        assert isinstance(block.self_attn, Attention), "the block is plain"
        self._input_norm = _Norm(block.input_layernorm)
        self._attention = _Attention(block.self_attn)
        self._middle_norm = _Norm(block.post_attention_layernorm)
        self._network = _FeedForward(block.mlp) if isinstance(block.mlp, FeedForward) else _Mixture(block.mlp)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], core: AttentionCore, options: RoutingOptions
    ) -> tuple[Tensor, Tensor | None]:
        """Map [B, S, D] to [B, S, D]; also return the experts that each token chose, int64 [B * S, A], or None. Of the
        options only the temperature is used."""
        x = x + self._attention(self._input_norm(x), rope, core)
        y, chosen = self._network(self._middle_norm(x).view(-1, x.shape[-1]), options.temperature)
        return x + y.view_as(x), chosen


class _Norm:
    """RMSNorm of the last dimension as x w sqrt(D) / hypot(|x|, sqrt(D eps)), the form with the fewest operations.

    Args:
        weight: [D], or [heads, D] for one weight per head; default: the weight of `norm`.
    """

    def __init__(self, norm: RMSNorm, weight: Tensor | None = None):
        weight = norm.weight.detach() if weight is None else weight
        width = weight.shape[-1]
        self._weight = weight * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, self._floor)).mul_(self._weight)


class _Attention:
    """Attention whose query and key heads are concatenated, so that one call norms and rotates both."""

    def __init__(self, attention: Attention):
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._head_dim = attention.head_dim
        self._heads = [part.weight.shape[0] // attention.head_dim for part in parts]
        self._qkv = Product(*(part.weight for part in parts), biases=[part.bias for part in parts])
        self._out = Product(attention.o_proj.weight)
        self._norm: _Norm | None = None
        if attention.q_norm is not None and attention.k_norm is not None:
            norms = zip((attention.q_norm, attention.k_norm), self._heads, strict=False)
            self._norm = _Norm(attention.q_norm, torch.cat([norm.weight.expand(heads, -1) for norm, heads in norms]))

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], core: AttentionCore) -> Tensor:
        B, S, D = x.shape
        query, key, value = self._heads
        qk, v = self._qkv(x.view(B * S, D)).view(B, S, -1, self._head_dim).split([query + key, value], 2)
        qk = rotate(qk if self._norm is None else self._norm(qk), rope)
        q, k = qk.split([query, key], 2)
        out = core(q, k, v, None)
        return self._out(out.reshape(B * S, -1)).view(B, S, D)


class _FeedForward:
    def __init__(self, network: FeedForward):
        self._gate_up = Product(network.gate_proj.weight, network.up_proj.weight)
        self._down = Product(network.down_proj.weight)

    def __call__(self, rows: Tensor, _: Tensor | None = None) -> tuple[Tensor, None]:
        gate, up = self._gate_up(rows).chunk(2, 1)
        return self._down(F.silu(gate).mul_(up)), None


class _Mixture:
    """Mixture of experts: one product per chosen expert, one activation for all of them."""

    def __init__(self, moe: MoE):
        self._router = moe.router
        self._shared = None if moe.shared_experts is None else _FeedForward(moe.shared_experts)
        self._gate_up = _Experts(moe.experts.gate_up)
        self._down = _Experts(moe.experts.down)

    def __call__(self, rows: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
        y = torch.zeros_like(rows) if self._shared is None else self._shared(rows)[0]
        weights, chosen, _ = self._router(rows.unsqueeze(0), None, RoutingOptions(temperature, statistics=False))
        uses_of: dict[int, list[int]] = {}
        for use, expert in enumerate(chosen.flatten().tolist()):
            uses_of.setdefault(expert, []).append(use)
        use_N = torch.tensor([use for uses in uses_of.values() for use in uses])
        row_N = use_N // chosen.shape[1]
        counts = [len(uses) for uses in uses_of.values()]
        gate_NF, up_NF = self._gate_up(uses_of, rows[row_N], counts).chunk(2, 1)
        active_NF = F.silu(gate_NF).mul_(up_NF).mul_(weights.view(-1)[use_N].unsqueeze(1))
        return y.index_add_(0, row_N, self._down(uses_of, active_NF, counts)), chosen


class _Experts:
    """One weight of all experts. Large weights are packed when an expert first has `_PACKED_FROM_ROWS` rows."""

    def __init__(self, weight_EOI: Tensor):
        self._weights = weight_EOI.detach().unbind(0)
        self._is_large = self._weights[0].numel() >= _PACKED_FROM and compat.can_pack()
        self._packed: dict[int, Tensor] = {}

    def __call__(self, experts: Iterable[int], rows_NI: Tensor, counts: list[int]) -> Tensor:
        """Multiply each expert's rows by its weight; returns [N, O].

        Args:
            rows_NI: rows sorted by expert, in the order of `experts`.
            counts: rows of each expert.
        """
        out_NO = rows_NI.new_empty(rows_NI.shape[0], self._weights[0].shape[0])
        for expert, rows, out in zip(experts, rows_NI.split(counts), out_NO.split(counts), strict=True):
            if not self._is_large:
                torch.mm(rows, self._weights[expert].t(), out=out)
            elif expert in self._packed or len(rows) >= _PACKED_FROM_ROWS:
                if expert not in self._packed:
                    self._packed[expert] = compat.pack_weight(self._weights[expert])
                out.copy_(compat.packed_linear(rows, self._packed[expert], None))
            else:  # this order reads a large weight fastest
                out.copy_(torch.mm(self._weights[expert], rows.t()).t())
        return out_NO
