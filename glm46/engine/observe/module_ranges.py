"""Named ranges in a trace for the modules of a model, and the kind of module that each name belongs to.

Hooks and wrappers are put on only while a profile is recorded: ranges cost time in every call.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps

from torch import nn
from torch.profiler import record_function

_KINDS = (
    ("embedding", r"embed_tokens$"),
    ("norms", r"norm$|layers\.\d+\.(\w+_layernorm|self_attn\.[qk]_norm)$"),
    ("attention projections", r"layers\.\d+\.self_attn\.[qkvo]_proj$"),
    ("attention core", r"layers\.\d+\.self_attn\.core$"),
    ("dense feed-forward", r"layers\.\d+\.mlp(\.(gate|up|down)_proj)?$"),
    ("router", r"layers\.\d+\.mlp\.router$"),
    ("dispatch and combine", r"layers\.\d+\.mlp\.(dispatch|combine)$"),
    ("routed experts", r"layers\.\d+\.mlp\.experts$"),
    ("shared expert", r"layers\.\d+\.mlp\.shared_experts\b"),
    ("rest of the layers", r"layers\.\d+$"),
    ("head", r"(lm|value)_head$"),
    ("MTP", r"mtp\.\d+\b"),
    ("optimizer", r"optimizer$"),
    ("FSDP and gradient sums", r"FSDP::|.*torch::autograd::AccumulateGrad$"),
)
"""Kinds in the order of the table, each with a pattern of the ranges that belong to it."""
KINDS = tuple(kind for kind, _ in _KINDS)
LAYER_KINDS = KINDS[KINDS.index("attention projections") : KINDS.index("rest of the layers")]
"""Kinds inside of decoder layers; a compiled layer has no ranges for them."""
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)
_DISPATCH = {"start": "dispatch", "arrived": "dispatch", "combine": "combine"}
"""Methods of a token dispatcher, and the names of their ranges."""


@cache
def kind_of(name: str) -> str | None:
    """The kind of module that a range belongs to; None for a range that says nothing about it. A module's range is
    named after the module; names of another network than the main one begin with its name and ``/``."""
    path = name.rpartition("/")[2]
    return next((kind for kind, pattern in _PATTERNS if pattern.match(path)), None)


@contextmanager
def module_ranges(model: nn.Module, prefix: str = "", *, is_compiled: bool = False) -> Iterator[None]:
    """Enter a range of its name at each call of a module of `model`, of an attention core and of a token dispatcher.

    Args:
        prefix: in front of every name.
        is_compiled: the layers are compiled. Their inner modules get no range: they are not called one by one, and
            another core or dispatcher would compile the layers again.
    """
    with ExitStack() as added:
        for name, module in model.named_modules():
            if is_compiled and re.match(r"(layers|mtp)\.\d+\.", name):
                continue
            dispatcher = getattr(module, "dispatcher", None)
            # The MLP of an MoE layer holds parts of several kinds, and none by itself.
            own = f"{prefix}{name or 'model'}" + (" (MoE)" if dispatcher is not None else "")
            opened: list[record_function] = []
            added.callback(module.register_forward_pre_hook(partial(_open, own, opened)).remove)
            # Before the hooks of FSDP2, whose own ranges are not part of the module; also after an error, because a
            # recomputation of checkpointed layers ends with one.
            closing = module.register_forward_hook(partial(_close, opened), prepend=True, always_call=True)
            added.callback(closing.remove)
            if dispatcher is not None:
                for method, part in _DISPATCH.items():
                    setattr(dispatcher, method, _in_range(getattr(dispatcher, method), f"{prefix}{name}.{part}"))
                    added.callback(delattr, dispatcher, method)
            if hasattr(module, "core"):
                added.callback(setattr, module, "core", module.core)
                module.core = _in_range(module.core, f"{own}.core")
        yield


def _open(name: str, opened: list[record_function], *_call: object) -> None:
    opened.append(record_function(name))
    opened[-1].__enter__()


def _close(opened: list[record_function], *_call: object) -> None:
    if opened:  # else the call failed before it was opened
        opened.pop().__exit__(None, None, None)


def _in_range(function: Callable, name: str) -> Callable:
    @wraps(function)
    def call(*arguments: object) -> object:
        with record_function(name):
            return function(*arguments)

    return call
