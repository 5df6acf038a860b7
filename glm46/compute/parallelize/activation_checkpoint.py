"""Activation checkpointing of each layer: save some results of forward, recompute the rest in backward."""

import functools
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from glm46 import compat
from glm46.compute.distributed.recomputation import Part, recomputation
from glm46.compute.model.adapters import adapted_grouped_mm
from glm46.compute.model.attention_runs import block_attention
from glm46.compute.model.experts import grouped_mm
from glm46.compute.model.mtp import MTPLayer
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.host_copies import Copied, HostCopies

_aten = torch.ops.aten
_OPERATORS = {
    # Its cost is quadratic in the sequence, its result is linear.
    "core_attn": {
        block_attention._opoverload,
        compat.VARLEN_OPERATOR,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    },
    # Most of the FLOPs of a layer.
    "experts": {grouped_mm._opoverload, adapted_grouped_mm._opoverload, _aten._scaled_grouped_mm.default},
    # Other ranks would have to send their rows again.
    "exchange": {compat.EXCHANGE_OPERATOR},
}
"""Operators whose results selective checkpointing keeps, by the names that `recompute` takes."""
Put = Callable[[Tensor], Callable[[], Tensor]]
_OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Of `checkpoint`. The model generates no random numbers."""


def apply(
    model: Transformer,
    mode: str,
    recompute: tuple[str, ...] = (),
    every_n_layers: int = 1,
    cpu_checkpointing: bool = False,
) -> None:
    """Checkpoint the activations of layers in place. A layer returns the routing statistics of its first run.

    Args:
        mode: "full" saves the input of a layer; "selective" also saves the results that cost most to recompute.
        recompute: names of results that "selective" does not save.
        every_n_layers: only the first of so many layers is checkpointed.
        cpu_checkpointing: what is saved waits in host memory.
    """
    copies = HostCopies() if cpu_checkpointing else None
    for number, layer in enumerate((*model.layers.values(), *model.mtp.values())[::every_n_layers]):
        # Recomputation stops at the last tensor that backward needs: in a decoder layer before the exchange back. In a
        # prediction layer a norm follows the exchange, so "selective" recomputes only the decoder layer inside it.
        module = layer.block if mode == "selective" and isinstance(layer, MTPLayer) else layer
        # DoRA's magnitudes scale what the experts' second product returns, and backward reads it.
        reads_down = any(name.endswith("down_magnitude") for name, _ in module.named_parameters())
        contexts = functools.partial(recomputation_contexts, mode, recompute, isinstance(module, MTPLayer), reads_down)
        # Nothing of ours is between: a compiled prediction layer would trace it, and end in a graph break.
        forward = functools.partial(checkpoint, module.forward, context_fn=contexts, **_OPTIONS)
        if copies is not None:
            # Buffers that a pipeline stage receives in stay: the first hidden states, and embeddings.
            stay = {0, 1} if number == 0 else {1}
            stay = set() if model.embed_tokens is not None else stay
            forward = functools.partial(_in_host_memory, copies, number == 0, stay, module.forward, contexts)
        module.forward = forward


def _in_host_memory(
    copies: HostCopies, is_first: bool, stay: set[int], forward: Callable, contexts: Callable, *arguments: Any
) -> Any:
    """The result of a checkpointed ``forward``, whose kept tensors are in host memory, but for the arguments at the
    places of ``stay``."""
    if not torch.is_grad_enabled():
        return forward(*arguments)
    layer = copies.begin(is_first)

    kept = [
        layer.copy(each) if isinstance(each, Tensor) and each.is_floating_point() and place not in stay else each
        for place, each in enumerate(arguments)
    ]
    first = [arguments]  # the tensors themselves, with their place in the graph, for the forward alone

    def run(*arguments: Any) -> Any:
        given = first.pop() if first else (a.take() if isinstance(a, Copied) else a for a in arguments)
        return forward(*given)

    in_host = functools.partial(contexts, put=lambda x: layer.copy(x).take)
    return checkpoint(run, *kept, context_fn=in_host, **_OPTIONS)


def recomputation_contexts(
    mode: str,
    recompute: tuple[str, ...] = (),
    reads_result: bool = False,
    reads_down: bool = False,
    put: Put | None = None,
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a forward and of its recomputation.

    Args:
        reads_result: backward needs what the experts of other ranks return. Without, a chunk's rows are not sent back
            while those of the next one are computed again.
        reads_down: backward needs what the experts' second product returns.
        put: moves what is kept of a tensor, and returns what gives it back; otherwise it stays where it is.
    """
    left_out: tuple[Part, ...] = () if reads_result else ("back",)
    reads_down = reads_down or reads_result
    if mode == "full":
        return recomputation(left_out, (nullcontext(), _Recalling(_Results(set(), reads_down, put))))
    saved = set[object]().union(*(_OPERATORS[name] for name in _OPERATORS.keys() - set(recompute)))
    # The choice of experts, which is small, and must match the rows that were exchanged.
    saved.add(_aten.topk.default)
    results = _Results(saved, reads_down, put)
    if "exchange" not in recompute:  # it keeps what the last hop brings
        left_out = ("first hop", *left_out)
    return recomputation(left_out, (_Keeping(results), _Recalling(results)))


def _changed(change: Callable, results: Any, kind: Any) -> Any:
    """The result of an operator, or each of several, changed if it is of a kind."""
    if isinstance(results, tuple):
        return tuple(_changed(change, each, kind) for each in results)
    return change(results) if isinstance(results, kind) else results


class _Results:
    """Holds functions that return the kept results of one forward of a layer, by operator, in their order."""

    def __init__(self, saved: set[object], reads_down: bool, put: Put | None):
        self.saved, self.reads_down, self.put = saved, reads_down, put
        self.kept: deque[Any] = deque()


class _Keeping(compat.DispatchMode):
    """Keeps the results of a forward."""

    def __init__(self, results: _Results):
        super().__init__()
        self._results, self._products = results, 0
        self._found: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        out = operator(*arguments, **keywords or {})
        if operator in self._results.saved:
            found = _changed(Tensor.detach, out, Tensor)
            self._products += operator in _OPERATORS["experts"]
            if operator in _OPERATORS["experts"] and self._products % 2 == 0 and not self._results.reads_down:
                # Of the second of the experts' two products only what adapters keep is read: its shape is enough.
                y, *others = found if isinstance(found, tuple) else (found,)
                empty = functools.partial(torch.empty_strided, y.shape, y.stride(), dtype=y.dtype, device=y.device)
                found = (empty, *others) if others else empty
            self._found.append(found)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # Not before: rows of an exchange have arrived only once they have been awaited.
        put = self._results.put or (lambda x: lambda: x)
        self._results.kept.extend(_changed(put, found, Tensor) for found in self._found)
        self._found = []


class _Recalling(compat.DispatchMode):
    """Gives the kept results to a recomputation, once, and leaves out what backward does not read."""

    def __init__(self, results: _Results):
        super().__init__()
        self._results, self._products = results, 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        if operator in self._results.saved:
            return _changed(lambda kept: kept(), self._results.kept.popleft(), Callable)
        self._products += operator in _OPERATORS["experts"]
        if operator is grouped_mm._opoverload and self._products % 2 == 0 and not self._results.reads_down:
            x, weight, _ = arguments  # the second product, which saves its arguments alone
            return x.new_empty(len(x), weight.shape[2])
        return operator(*arguments, **keywords or {})
