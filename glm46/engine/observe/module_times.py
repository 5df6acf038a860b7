"""Named ranges in a trace for the modules of a model, and the time by kind of module from a trace in Chrome's format.

Hooks and wrappers are put on only while a profile is recorded: ranges cost time in every call. Forward: an operator
belongs to the innermost range around it (`module_ranges`). Backward: torch links each function of autograd to the
operator of forward that made it, and it belongs to the same range. A kernel of a GPU belongs to the operator that
launched it. So nothing runs in backward to find this out.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

from torch import nn
from torch.profiler import record_function

from glm46.config.adapter import AdapterConfig
from glm46.config.model import ModelShape
from glm46.run.flops import matrix_flops, pair_flops
from glm46.run.parameters import adapter_rows, find_parameter

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
_DISPATCH = {
    "start": "dispatch", "arrived": "dispatch", "halfway": "dispatch", "proceed": "combine", "combine": "combine",
}  # fmt: skip
"""Methods that a token dispatcher may have, and the names of their ranges."""


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
                    if hasattr(dispatcher, method):
                        names = f"{prefix}{name}.{part}", f"{prefix}{name}.experts"
                        setattr(dispatcher, method, _in_range(getattr(dispatcher, method), *names))
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


def _in_range(function: Callable, name: str, called: str = "") -> Callable:
    """The function in a range; functions that it is given, which it calls, in one of the name ``called``."""

    @wraps(function)
    def call(*arguments: object) -> object:
        with record_function(name):
            return function(*(_in_range(each, called) if callable(each) else each for each in arguments))

    return call


REST, IDLE = "rest of the step", "device idle"
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_STEP = "ProfilerStep#"
"""Beginning of the name of the range around a step."""
_ENGINE = "autograd::engine::evaluate_function"
"""Name of the operator around each function of autograd, which has the link."""


@dataclass
class _Span:
    """An event of a thread of the host."""

    end: float
    kind: str | None
    is_backward: bool
    self_us: float
    parent: "_Span | None"


@dataclass(frozen=True)
class KindTime:
    """One row: milliseconds per step."""

    kind: str
    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def time_by_kind(events: Iterable[dict[str, Any]]) -> tuple[float, list[KindTime]]:
    """Milliseconds of a step of this rank, and their parts by kind.

    With kernels of a GPU in the trace the parts are its time, which kernels side by side count twice, and a last row is
    the time without any kernel. Otherwise they are times of the main thread and add up to the step.

    Args:
        events: ``traceEvents``.
    """
    host, launched, kernels, steps = [], {}, [], []
    links: dict[str, dict[object, tuple]] = {"s": {}, "f": {}}
    for event in events:
        category = event.get("cat")
        if event["ph"] == "X" and category in _HOST:
            host.append(event)
            if event["name"].startswith(_STEP):
                steps.append(event)
        elif event["ph"] == "X" and category in _DEVICE:
            kernels.append(event)
        elif category == "fwdbwd":
            links[event["ph"]][event["id"]] = (event["tid"], event["ts"])
    makers = {links["f"][number]: links["s"][number] for number in links["f"].keys() & links["s"].keys()}

    spans: dict[tuple, _Span] = {}
    innermost: dict[object, _Span | None] = {}
    for event in sorted(host, key=lambda event: (event["ts"], -event["dur"])):
        thread, start, name = event["tid"], event["ts"], event["name"]
        parent = innermost.get(thread)
        while parent is not None and parent.end <= start:
            parent = parent.parent
        is_backward = name.startswith(_ENGINE) or (parent is not None and parent.is_backward)
        kind = kind_of(name) or (parent.kind if parent is not None else None)
        maker = spans.get(makers.get((thread, start), ()))
        if maker is not None and is_backward:
            kind = maker.kind
            if parent is not None:  # the engine's operator around it
                parent.kind = kind
        span = _Span(start + event["dur"], kind, is_backward, event["dur"], parent)
        if parent is not None:
            parent.self_us -= event["dur"]
        spans[thread, start] = innermost[thread] = span
        if "correlation" in event.get("args", {}):
            launched[event["args"]["correlation"]] = span

    count, length = max(len(steps), 1), sum(step["dur"] for step in steps)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    if kernels:
        for kernel in kernels:
            launcher = launched.get(kernel.get("args", {}).get("correlation"))
            sums[(launcher and launcher.kind) or REST][bool(launcher and launcher.is_backward)] += kernel["dur"]
        sums[IDLE][0] = max(length - _covered(kernels), 0.0)
    else:
        threads = {step["tid"] for step in steps}
        for (thread, _), span in spans.items():
            if thread in threads:
                sums[span.kind or REST][span.is_backward] += span.self_us
    order = [kind for kind in (*KINDS, REST, IDLE) if kind in sums]
    return length / count / 1e3, [KindTime(kind, *(us / count / 1e3 for us in sums[kind])) for kind in order]


def _covered(kernels: list[dict[str, Any]]) -> float:
    """Time in which at least one kernel ran."""
    covered, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel["ts"]):
        stop = kernel["ts"] + kernel["dur"]
        covered += max(stop - max(kernel["ts"], end), 0.0)
        end = max(end, stop)
    return covered


def flops_by_kind(
    names: Iterable[str], shape: ModelShape, tokens: float, half_pairs: float, adapter: AdapterConfig | None = None
) -> dict[str, float]:
    """FLOPs of the products of forward and backward, by kind, as MFU counts them: without recomputation.

    Args:
        names: of the parameters of this rank.
        tokens, half_pairs: of the step, see `batch_flops`; this rank's share of them.
        adapter: [adapter] of a network that trains no other weights.
    """
    flops: dict[str, float] = defaultdict(float)
    for name, per_token in _product_flops(names, shape, adapter).items():
        flops[str(kind_of(name.rpartition(".")[0]))] += per_token * tokens
        if name.endswith(".self_attn.o_proj.weight"):
            core = kind_of(name.replace("o_proj.weight", "core"))
            flops[str(core)] += pair_flops(shape) * half_pairs / 2
    return dict(flops)


def _product_flops(names: Iterable[str], shape: ModelShape, adapter: AdapterConfig | None = None) -> dict[str, float]:
    """FLOPs per token of the products with each of these parameters, forward and backward, by name. The MTP layers
    whose parameters are among them use the head too.

    Args:
        adapter: [adapter] of a network that trains no other weights.
    """
    names, flops = list(names), {}
    adapters = {} if adapter is None else adapter_rows(shape, adapter)
    for name in names:
        row = adapters.get(name) or find_parameter(name)
        if row.is_matrix and row.part != "embedding":
            flops[name] = matrix_flops([row], shape, None if name in adapters else adapter)
    uses = 1 + sum(name.endswith("eh_proj.weight") for name in names)
    return flops | {name: uses * flops[name] for name in names if name == "lm_head.weight"}


def table_rows(
    step_ms: float, times: list[KindTime], flops: dict[str, float], is_compiled: bool
) -> list[dict[str, Any]]:
    """Rows of the table: kind, ms per step, forward_ms, backward_ms, share of the step, gflop, gflop_per_second.

    Args:
        flops: of a step on this rank, by kind. Of compiled layers the sum is given: their parts have no times.
    """
    flops = dict(flops)
    if is_compiled:
        flops["rest of the layers"] = sum(flops.pop(kind, 0.0) for kind in LAYER_KINDS)
    rows = []
    for time in times:
        gflop = flops.get(time.kind, 0.0) / 1e9
        rows.append({
            "kind": time.kind,
            "ms": time.total,
            "forward_ms": time.forward,
            "backward_ms": time.backward,
            "share": time.total / step_ms,
            "gflop": gflop or None,
            "gflop_per_second": gflop / time.total * 1e3 if gflop and time.total else None,
        })  # fmt: skip
    return rows


def format_table(rows: list[dict[str, Any]], step_ms: float) -> str:
    """The table as aligned text, with a line for the whole step."""
    heads = f"  {'':<24} {'ms':>10} {'forward':>10} {'backward':>10} {'share':>7} {'GFLOP':>10} {'GFLOP/s':>9}"
    lines = [heads]
    for row in rows:
        products = "" if row["gflop"] is None else f" {row['gflop']:10,.2f} {row['gflop_per_second'] or 0.0:9,.0f}"
        lines.append(
            f"  {row['kind']:<24} {row['ms']:10,.1f} {row['forward_ms']:10,.1f} {row['backward_ms']:10,.1f} "
            f"{row['share']:7.1%}{products}"
        )
    total = sum(row["gflop"] or 0.0 for row in rows)
    lines.append(f"  {'step':<24} {step_ms:10,.1f} {'':>29} {total:10,.2f} {total / step_ms * 1e3:9,.0f}")
    return "\n".join(lines)
