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
from glm46.compute.model.index_loss import index_loss_operator
from glm46.compute.model.indexer import choose_keys
from glm46.compute.model.masked_attention import masked_attention
from glm46.compute.model.mtp import MTPLayer
from glm46.compute.model.sparse_attention import chosen_attention
from glm46.compute.model.transformer import Transformer
from glm46.compute.parallelize.host_copies import Copied, HostCopies

_aten = torch.ops.aten
_OPERATORS = {
    # Its cost is quadratic in the sequence, its result is linear.
    "core_attn": {
        block_attention._opoverload,
        choose_keys._opoverload,
        chosen_attention._opoverload,
        index_loss_operator._opoverload,
        masked_attention._opoverload,
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
"""Moves a tensor, and returns a function that returns it."""
_CHECKPOINT_OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""Options of `checkpoint`. The model generates no random numbers."""


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
        every_n_layers: only the first of this many consecutive layers is checkpointed.
        cpu_checkpointing: keep the saved tensors in host memory until backward needs them.
    """
    copies = HostCopies() if cpu_checkpointing else None
    for number, layer in enumerate((*model.layers.values(), *model.mtp.values())[::every_n_layers]):
        # Recomputation stops at the last tensor that backward needs: in a decoder layer before the exchange back. In a
        # prediction layer a norm follows the exchange, so "selective" recomputes only the decoder layer inside it.
        module = layer.block if mode == "selective" and isinstance(layer, MTPLayer) else layer
        # DoRA's magnitudes scale what the experts' second product returns, and backward reads it.
        reads_down = any(name.endswith("down_magnitude") for name, _ in module.named_parameters())
        contexts = functools.partial(recomputation_contexts, mode, recompute, isinstance(module, MTPLayer), reads_down)
        # Without a function of ours around it: a compiled prediction layer would trace it, and end in a graph break.
        forward = functools.partial(checkpoint, module.forward, context_fn=contexts, **_CHECKPOINT_OPTIONS)
        if copies is not None:
            stay: set[int] = set()
            if model.embed_tokens is None:
                # Buffers that a pipeline stage receives in: embeddings (argument 1), and the first hidden states (0).
                stay = {0, 1} if number == 0 else {1}
            forward = functools.partial(_in_host_memory, copies, number == 0, stay, module.forward, contexts)
        module.forward = forward


def _in_host_memory(
    copies: HostCopies,
    is_first: bool,
    stay: set[int],
    forward: Callable[..., object],
    contexts: Callable[..., Any],
    *arguments: object,
) -> object:
    """Return the result of a checkpointed ``forward`` whose kept tensors are in host memory, except the arguments at
    the positions in ``stay``."""
    if not torch.is_grad_enabled():
        return forward(*arguments)
    layer = copies.begin(is_first)

    kept = [
        layer.copy(argument)
        if isinstance(argument, Tensor) and argument.is_floating_point() and place not in stay
        else argument
        for place, argument in enumerate(arguments)
    ]
    originals = [arguments]  # the tensors themselves, with their place in the graph, for the forward alone

    def run(*arguments: object) -> object:
        if originals:
            return forward(*originals.pop())
        return forward(*(argument.take() if isinstance(argument, Copied) else argument for argument in arguments))

    in_host = functools.partial(contexts, put=lambda x: layer.copy(x).take)
    return checkpoint(run, *kept, context_fn=in_host, **_CHECKPOINT_OPTIONS)


def recomputation_contexts(
    mode: str,
    recompute: tuple[str, ...] = (),
    reads_result: bool = False,
    reads_down: bool = False,
    put: Put | None = None,
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts of a forward and of its recomputation.

    Args:
        reads_result: True if backward needs the results of the experts of other ranks. If False, a chunk's rows are not
            sent back while the rows of the next chunk are computed again.
        reads_down: True if backward needs the result of the experts' second product.
        put: moves the kept tensors; None leaves them where they are.
    """
    skipped: tuple[Part, ...] = () if reads_result else ("back",)
    reads_down = reads_down or reads_result
    if mode == "full":
        return recomputation(skipped, (nullcontext(), _Recalling(_Results(set(), reads_down, put))))
    saved = set[object]().union(*(_OPERATORS[name] for name in _OPERATORS.keys() - set(recompute)))
    # The choice of experts, which is small, and must match the rows that were exchanged.
    saved.add(_aten.topk.default)
    results = _Results(saved, reads_down, put)
    if "exchange" not in recompute:  # the results of the last hop are kept
        skipped = ("first hop", *skipped)
    return recomputation(skipped, (_Keeping(results), _Recalling(results)))


def _changed(change: Callable[[Any], object], results: object, kind: Any) -> object:
    """Return the result of an operator, or each of several results, changed if it is of this kind."""
    if isinstance(results, tuple):
        return tuple(_changed(change, result, kind) for result in results)
    return change(results) if isinstance(results, kind) else results


class _Results:
    """Holds functions that return the kept results of one forward of a layer, by operator, in their order."""

    def __init__(self, saved: set[object], reads_down: bool, put: Put | None):
        self.saved = saved
        self.reads_down = reads_down
        self.put = put
        self.kept: deque[Any] = deque()


class _Keeping(compat.DispatchMode):
    """Keeps the results of a forward."""

    def __init__(self, results: _Results):
        super().__init__()
        self._results = results
        self._num_products = 0
        self._saved_results: list[Any] = []

    def __torch_dispatch__(
        self, operator: Any, types: object, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        out = operator(*arguments, **keywords or {})
        if operator in self._results.saved:
            saved = _changed(Tensor.detach, out, Tensor)
            self._num_products += operator in _OPERATORS["experts"]
            if operator in _OPERATORS["experts"] and self._num_products % 2 == 0 and not self._results.reads_down:
                # Nobody reads the result of the experts' second product, so its shape is enough. Adapters have another
                # result, which their backward reads.
                y, *others = saved if isinstance(saved, tuple) else (saved,)
                empty = functools.partial(torch.empty_strided, y.shape, y.stride(), dtype=y.dtype, device=y.device)
                saved = (empty, *others) if others else empty
            self._saved_results.append(saved)
        return out

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # Not earlier: rows of an exchange have arrived only after they were awaited.
        put = self._results.put or (lambda x: lambda: x)  # by default a tensor stays where it is
        self._results.kept.extend(_changed(put, saved, Tensor) for saved in self._saved_results)
        self._saved_results = []


class _Recalling(compat.DispatchMode):
    """Gives the kept results to a recomputation, once, and skips the products that backward does not read."""

    def __init__(self, results: _Results):
        super().__init__()
        self._results = results
        self._num_products = 0

    def __torch_dispatch__(
        self, operator: Any, types: object, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if operator in self._results.saved:
            return _changed(lambda kept: kept(), self._results.kept.popleft(), Callable)
        self._num_products += operator in _OPERATORS["experts"]
        if operator is grouped_mm._opoverload and self._num_products % 2 == 0 and not self._results.reads_down:
            x, weight, _ = arguments  # the second product, which saves its arguments alone
            return x.new_empty(len(x), weight.shape[2])
        return operator(*arguments, **keywords or {})
