"""The table of Hugging Face's tensor names and ours, for reading and writing.

Every tensor of a Hugging Face checkpoint is a box inside exactly one of our tensors. Most boxes are the whole tensor
under another name. An expert's three matrices are boxes inside the two stacked tensors of its layer. A box is plain
numbers, so the same table serves whole tensors and shards: a shard needs the boxes that it overlaps.

    ours                                       Hugging Face (N = num_hidden_layers, X = n_routed_experts)
    embed_tokens.weight                        model.embed_tokens.weight
    layers.{i}.<layer table>                   model.layers.{i}.<layer table>
    mtp.{k}.block.<layer table>                model.layers.{N + k}.<layer table>
    mtp.{k}.<MTP table>                        model.layers.{N + k}.<MTP table>
    norm.weight, lm_head.weight                model.norm.weight, lm_head.weight
    embed_tokens.weight, lm_head.weight again  model.layers.{N + k}.{embed_tokens,shared_head.head}.weight, "repeats"

GLM-4.5 and GLM-4.5-Air are published with the repeats, GLM-4.6 without.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.planner.parameters import (
    PARAMETERS,
    TensorKind,
    dense_layer,
    hf_kinds,
    layer_counts,
    moe_layer,
    mtp_layer,
)

_NAMES_SHOWN = 10
"""Names listed per fault; the others are counted. A wrong model shape gives tens of thousands."""

_WEIGHT_TYPES = (torch.bfloat16, torch.float32, torch.float16)
_FP32_ONLY = (torch.float32,)


@dataclass(frozen=True)
class _Rename:
    """The whole tensor under another name."""

    ours: str


@dataclass(frozen=True)
class _Stack:
    """Expert e's matrix of R rows is `ours[e, block * R : (block + 1) * R]`."""

    ours: str
    block: int


_LAYER_TABLE: dict[str, _Rename | _Stack] = {
    "input_layernorm.weight": _Rename("input_layernorm.weight"),
    "self_attn.q_proj.weight": _Rename("self_attn.q_proj.weight"),
    "self_attn.q_proj.bias": _Rename("self_attn.q_proj.bias"),
    "self_attn.k_proj.weight": _Rename("self_attn.k_proj.weight"),
    "self_attn.k_proj.bias": _Rename("self_attn.k_proj.bias"),
    "self_attn.v_proj.weight": _Rename("self_attn.v_proj.weight"),
    "self_attn.v_proj.bias": _Rename("self_attn.v_proj.bias"),
    "self_attn.o_proj.weight": _Rename("self_attn.o_proj.weight"),
    "self_attn.q_norm.weight": _Rename("self_attn.q_norm.weight"),
    "self_attn.k_norm.weight": _Rename("self_attn.k_norm.weight"),
    "post_attention_layernorm.weight": _Rename("post_attention_layernorm.weight"),
    "mlp.gate_proj.weight": _Rename("mlp.gate_proj.weight"),
    "mlp.up_proj.weight": _Rename("mlp.up_proj.weight"),
    "mlp.down_proj.weight": _Rename("mlp.down_proj.weight"),
    "mlp.gate.weight": _Rename("mlp.router.weight"),
    "mlp.gate.e_score_correction_bias": _Rename("mlp.router.e_score_correction_bias"),
    "mlp.experts.E.gate_proj.weight": _Stack("mlp.experts.gate_up", 0),
    "mlp.experts.E.up_proj.weight": _Stack("mlp.experts.gate_up", 1),
    "mlp.experts.E.down_proj.weight": _Stack("mlp.experts.down", 0),
    "mlp.shared_experts.gate_proj.weight": _Rename("mlp.shared_experts.gate_proj.weight"),
    "mlp.shared_experts.up_proj.weight": _Rename("mlp.shared_experts.up_proj.weight"),
    "mlp.shared_experts.down_proj.weight": _Rename("mlp.shared_experts.down_proj.weight"),
}
"""Hugging Face name inside a layer (`E` is the expert's index) -> our tensor."""

_MTP_TABLE = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
}
"""Hugging Face name inside a prediction layer -> our name inside `mtp.{k}`. Other names belong to its block."""


@dataclass(frozen=True)
class HFPart:
    """One Hugging Face tensor as a box inside one of our tensors."""

    hf_name: str
    hf_shape: tuple[int, ...]
    start: tuple[int, ...]
    """First index of the box in each dimension of *our* tensor. The box has size 1 in a leading dimension that the
    Hugging Face tensor lacks."""
    is_repeat: bool = False
    """True for the second name of a tensor, in a multi-token prediction layer."""

    def index(self) -> tuple[int | slice, ...]:
        """Index of the Hugging Face tensor in our tensor; it gives a view."""
        stacked = len(self.start) - len(self.hf_shape)
        boxes = zip(self.start[stacked:], self.hf_shape, strict=True)
        return self.start[:stacked] + tuple(slice(start, start + size) for start, size in boxes)


@dataclass(frozen=True)
class HFEntry:
    """One of our tensors and the Hugging Face tensors that it consists of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFPart, ...]

    @property
    def is_fp32(self) -> bool:
        """True for the router's selection bias. BF16 would lose its small updates, so no file may round it."""
        return self.name.endswith("e_score_correction_bias")


class HFNames:
    """The table of one shape.

    Attributes:
        entries: our name -> `HFEntry`, in the order of the model.
        places: Hugging Face name -> its entry, and its part of that entry.
        empty: Hugging Face name -> shape of the tensors without elements that only transformers has. No reader needs
            them, but transformers reports them as missing.

    Args:
        repeat_shared: include the repeats of embedding and head in the multi-token prediction layers.
    """

    def __init__(self, shape: ModelShape, *, repeat_shared: bool):
        self.entries = {entry.name: entry for entry in _entries(shape, repeat_shared)}
        self.places = {part.hf_name: (entry, part) for entry in self.entries.values() for part in entry.parts}
        self.empty = {} if shape.n_shared_experts else {
            f"model.layers.{i}.{kind.name}": kind.shape
            for i in range(layer_counts(shape)[0], shape.num_hidden_layers + shape.num_nextn_predict_layers)
            for kind in hf_kinds([row for row in PARAMETERS if row.needs == "n_shared_experts"], shape)
        }  # fmt: skip

    def fault(self, hf_name: str, hf_shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """The fault in shape or type of a checkpoint tensor with a known name; None if it fits."""
        entry, part = self.places[hf_name]
        if hf_shape != part.hf_shape:
            return f"tensor {hf_name} is {list(hf_shape)} in the checkpoint, the model has {list(part.hf_shape)}"
        allowed = _FP32_ONLY if entry.is_fp32 else _WEIGHT_TYPES
        if dtype not in allowed:
            names = " or ".join(_type_name(one) for one in allowed)
            return f"tensor {hf_name} is {_type_name(dtype)} in the checkpoint, it must be {names}"
        return None

    def name_faults(self, hf_names: Iterable[str]) -> list[str]:
        """At most two messages: one lists the missing names, one the unknown names. Repeats may be missing."""
        found = set(hf_names)
        faults = []
        missing = [name for name, (_, part) in self.places.items() if name not in found and not part.is_repeat]
        unknown = sorted(name for name in found if name not in self.places)
        if missing:
            faults.append(f"{len(missing)} tensors are missing: {_listed(missing)}")
        if unknown:
            faults.append(f"{len(unknown)} tensors are not part of this model: {_listed(unknown)}")
        return faults


def has_repeats(hf_names: Iterable[str], shape: ModelShape) -> bool:
    """Whether a checkpoint with these names repeats embedding and head in its multi-token prediction layers."""
    repeats = {name for k in range(shape.num_nextn_predict_layers) for name in _repeat_names(shape, k).values()}
    return not repeats.isdisjoint(hf_names)


def raise_if(faults: list[str]) -> None:
    """Raise a `UserError` with all faults, unless the list is empty."""
    if faults:
        raise UserError(*faults)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _repeat_names(shape: ModelShape, k: int) -> dict[str, str]:
    layer = f"model.layers.{shape.num_hidden_layers + k}"
    return {"embed_tokens.weight": f"{layer}.embed_tokens.weight", "lm_head.weight": f"{layer}.shared_head.head.weight"}


def _entries(shape: ModelShape, repeat_shared: bool) -> list[HFEntry]:
    dense_layers, _, mtp_layers = layer_counts(shape)
    entries = [_vocabulary_entry("embed_tokens.weight", "model.embed_tokens.weight", shape, repeat_shared)]
    for i in range(shape.num_hidden_layers):
        kinds = hf_kinds(dense_layer(shape) if i < dense_layers else moe_layer(shape), shape)
        entries += _layer_entries(f"layers.{i}", f"model.layers.{i}", kinds)
    entries.append(_whole("norm.weight", "model.norm.weight", (shape.hidden_size,)))
    entries.append(_vocabulary_entry("lm_head.weight", "lm_head.weight", shape, repeat_shared))
    for k in range(mtp_layers):
        hf_prefix = f"model.layers.{shape.num_hidden_layers + k}"
        kinds = hf_kinds(mtp_layer(shape), shape)
        own = [kind for kind in kinds if kind.name in _MTP_TABLE]
        entries += [_whole(f"mtp.{k}.{_MTP_TABLE[kind.name]}", f"{hf_prefix}.{kind.name}", kind.shape) for kind in own]
        of_block = [kind for kind in kinds if kind.name not in _MTP_TABLE]
        entries += _layer_entries(f"mtp.{k}.block", hf_prefix, of_block)
    return entries


def _whole(name: str, hf_name: str, shape: tuple[int, ...], repeats: tuple[str, ...] = ()) -> HFEntry:
    origin = (0,) * len(shape)
    parts = [HFPart(hf_name, shape, origin)] + [HFPart(repeat, shape, origin, is_repeat=True) for repeat in repeats]
    return HFEntry(name, shape, tuple(parts))


def _vocabulary_entry(name: str, hf_name: str, shape: ModelShape, repeat_shared: bool) -> HFEntry:
    depths = range(shape.num_nextn_predict_layers) if repeat_shared else ()
    repeats = tuple(_repeat_names(shape, k)[name] for k in depths)
    return _whole(name, hf_name, (shape.vocab_size, shape.hidden_size), repeats)


def _layer_entries(prefix: str, hf_prefix: str, kinds: list[TensorKind]) -> list[HFEntry]:
    """Entries of one decoder layer.

    Raises:
        KeyError: `_LAYER_TABLE` lacks a tensor of the model.
    """
    entries: dict[str, HFEntry] = {}
    stacks: dict[str, list[tuple[int, TensorKind]]] = {}
    for kind in kinds:
        rule = _LAYER_TABLE[kind.name]
        if isinstance(rule, _Rename):
            entries[rule.ours] = _whole(f"{prefix}.{rule.ours}", f"{hf_prefix}.{kind.name}", kind.shape)
        else:
            stacks.setdefault(rule.ours, []).append((rule.block, kind))
    for ours, blocks in stacks.items():
        entries[ours] = _stacked(f"{prefix}.{ours}", hf_prefix, blocks)
    return list(entries.values())


def _stacked(name: str, hf_prefix: str, blocks: list[tuple[int, TensorKind]]) -> HFEntry:
    rows, columns = blocks[0][1].shape
    num_experts = blocks[0][1].count
    parts = [
        HFPart(f"{hf_prefix}.{kind.name.replace('.E.', f'.{expert}.')}", kind.shape, (expert, block * rows, 0))
        for expert in range(num_experts)
        for block, kind in blocks
    ]
    return HFEntry(name, (num_experts, rows * len(blocks), columns), tuple(parts))
