"""FLOPs of a step by kind of module, as MFU counts them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from glm46.config.adapter import AdapterConfig
from glm46.config.model import ModelShape
from glm46.run.flops import FORWARD_SHARE, FROZEN_SHARE, matrix_flops, pair_flops
from glm46.run.parameters import adapter_rows, find_parameter

OPTIMIZER = "optimizer"
_PATTERNS = {
    "attention projections": re.compile(r"layers\.\d+\.self_attn\.\w*_proj\w*$"),
    "indexer": re.compile(r"layers\.\d+\.self_attn\.indexer\b"),
    "attention core": re.compile(r"layers\.\d+\.self_attn\.core$"),
    "dense feed-forward": re.compile(r"layers\.\d+\.mlp\.(gate|up|down)_proj$"),
    "router": re.compile(r"layers\.\d+\.mlp\.router$"),
    "routed experts": re.compile(r"layers\.\d+\.mlp\.experts$"),
    "shared expert": re.compile(r"layers\.\d+\.mlp\.shared_experts\b"),
    "head": re.compile(r"(lm|value)_head$"),
    "MTP": re.compile(r"mtp\.\d+\b"),
}
"""Kinds in the order of the table, with a pattern of the names of their modules."""
KINDS = (*_PATTERNS, OPTIMIZER)


def kind_of(module: str) -> str:
    """Return the kind of a module that multiplies matrices, from its name. Raises KeyError if it has no kind."""
    for kind, pattern in _PATTERNS.items():
        if pattern.match(module):
            return kind
    raise KeyError(module)


def flops_by_kind(
    names: Iterable[str],
    shape: ModelShape,
    tokens: float,
    half_pairs: float,
    adapter: AdapterConfig | None = None,
    *,
    only_drafts: bool = False,
) -> dict[str, float]:
    """Return the FLOPs of the products of forward and backward, by kind, as MFU counts them: without recomputation.

    Args:
        names: names of the parameters of this rank.
        tokens, half_pairs: this rank's share of the tokens and pairs of the step, see `batch_flops`.
        adapter: [adapter] of a network that trains no other weights.
        only_drafts: the network trains only its prediction layers; its other layers have no backward.
    """
    flops: dict[str, float] = defaultdict(float)
    for name, per_token in _product_flops(names, shape, adapter, only_drafts=only_drafts).items():
        flops[kind_of(name.rpartition(".")[0])] += per_token * tokens
        if name.endswith(".self_attn.o_proj.weight"):
            core = kind_of(name.replace("o_proj.weight", "core"))
            flops[core] += _share(name, only_drafts=only_drafts) * pair_flops(shape) * half_pairs / 2
    return dict(flops)


def _share(name: str, *, only_drafts: bool) -> float:
    """Return the share of forward and backward that runs for the layer of a parameter."""
    return FORWARD_SHARE if only_drafts and not name.startswith("mtp.") else 1.0


def names_of_depths(names: Iterable[str], layers: int, depths: int) -> list[str]:
    """Return names of parameters, those of prediction layers once for each depth that runs the layer: depth k as layer
    k, see `Plan.unrolled`."""
    unrolled = list(names)
    for depth in range(layers, depths):
        prefix = f"mtp.{depth % layers}."
        unrolled += [f"mtp.{depth}.{name.removeprefix(prefix)}" for name in unrolled if name.startswith(prefix)]
    return unrolled


def _product_flops(
    names: Iterable[str], shape: ModelShape, adapter: AdapterConfig | None = None, *, only_drafts: bool = False
) -> dict[str, float]:
    """Return the FLOPs per token of the products with each of these parameters, forward and backward. MTP layers
    whose parameters are among them also use the head.

    Args:
        adapter: [adapter] of a network that trains no other weights.
        only_drafts: see `flops_by_kind`.
    """
    names = list(names)
    flops: dict[str, float] = {}
    adapters = {} if adapter is None else adapter_rows(shape, adapter)
    for name in names:
        row = adapters.get(name) or find_parameter(name)
        if row.is_matrix and row.part != "embedding":
            flops[name] = matrix_flops([row], shape, None if name in adapters else adapter)
            if name != "lm_head.weight":
                flops[name] *= _share(name, only_drafts=only_drafts)
    depths = sum(name.endswith("eh_proj.weight") for name in names)
    uses = FORWARD_SHARE + depths * FROZEN_SHARE if only_drafts else 1 + depths
    return flops | {name: uses * flops[name] for name in names if name == "lm_head.weight"}


def flops_rows(flops: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return rows of the table, in the order of `KINDS`: kind, gflop, share of the total."""
    total = sum(flops.values())
    return [
        {"kind": kind, "gflop": flops[kind] / 1e9, "share": flops[kind] / total} for kind in KINDS if flops.get(kind)
    ]


def format_flops(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the table as aligned text."""
    lines = [f"  {'':<24} {'GFLOP':>12} {'share':>7}"]
    lines += [f"  {row['kind']:<24} {row['gflop']:12,.2f} {row['share']:7.1%}" for row in rows]
    return "\n".join(lines)
