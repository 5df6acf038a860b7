"""Hugging Face's tensor names and ours, for reading and writing, derived from the table in `run/parameters.py`.

Every tensor of a Hugging Face checkpoint is a box inside exactly one of our tensors. Most boxes are the full tensor
under another name. An expert's three matrices are boxes inside the two stacked tensors of its layer. A box is plain
numbers, so the same table serves full tensors and shards: a shard needs the boxes that it overlaps.

    ours                                       Hugging Face (N = num_hidden_layers, X = n_routed_experts)
    embed_tokens.weight                        model.embed_tokens.weight
    layers.{i}.<name>                          model.layers.{i}.<Hugging Face name>
    mtp.{k}.block.<name>, mtp.{k}.<name>       model.layers.{N + k}.<Hugging Face name>
    norm.weight, lm_head.weight                model.norm.weight, lm_head.weight
    embed_tokens.weight, lm_head.weight again  model.layers.{N + k}.{embed_tokens,shared_head.head}.weight, "repeats"

GLM-4.5, 4.5-Air and 4.7 are published with the repeats, GLM-4.6 without. transformers 5 stores the experts of a layer
in two tensors, which equal ours: ``model.layers.{i}.mlp.experts.gate_up_proj`` and ``down_proj``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from glm46.config.model import ModelShape
from glm46.run.parameters import PARAMETERS, Parameter, layer_counts, named_rows

MOST_SHOWN = 10
"""Maximum number of names in a fault, and of faults of one kind; the rest is counted. A wrong model shape gives tens of
thousands."""

_WEIGHT_TYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class Form(Enum):
    """Naming schemes of a model's tensors."""

    PER_EXPERT = "Hugging Face names"
    STACKED = "Hugging Face names, with the experts of a layer in one tensor"
    OURS = "names of glm46"


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
    row: Parameter

    @property
    def is_fp32(self) -> bool:
        """True for the router's selection bias. BF16 would lose its small updates, so we never write it rounded."""
        return self.row.optimizer is None


class HFNames:
    """The name table of one model shape.

    Attributes:
        entries: `HFEntry` by our name, in the order of the model.
        places: entry, and part of that entry, by Hugging Face name.
        empty: shapes by Hugging Face name of tensors without elements that only transformers has. No reader needs them,
            but transformers reports them as missing.

    Args:
        repeat_shared: include the repeats of embedding and head in the multi-token prediction layers.
        form: naming scheme on the other side.
    """

    def __init__(self, shape: ModelShape, *, repeat_shared: bool, form: Form = Form.PER_EXPERT):
        self.form = form
        rows = named_rows(shape).items()
        self.entries = {name: _entry(name, row, shape, repeat_shared, form) for name, row in rows}
        self.places = {part.hf_name: (entry, part) for entry in self.entries.values() for part in entry.parts}
        self.empty = (
            {}
            if shape.n_shared_experts
            else {
                f"model.layers.{i}.{row.hf_names[0]}": row.hf_shape(shape)
                for i in range(layer_counts(shape)[0], shape.num_hidden_layers + shape.num_nextn_predict_layers)
                for row in PARAMETERS
                if row.needs == "n_shared_experts"
            }
        )

    def fault(self, hf_name: str, hf_shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Return the fault in shape or type of a checkpoint tensor with a known name; None if it fits."""
        _, part = self.places[hf_name]
        if hf_shape != part.hf_shape:
            return f"tensor {hf_name} is {list(hf_shape)} in the checkpoint, the model has {list(part.hf_shape)}"
        if dtype not in _WEIGHT_TYPES:
            actual, *names = (str(type_).removeprefix("torch.") for type_ in (dtype, *_WEIGHT_TYPES))
            remedy = "convert it" + ", or restore quantization_config in config.json" * (dtype.itemsize == 1)
            return f"tensor {hf_name} is {actual} in the checkpoint, it must be {' or '.join(names)}; {remedy}"
        return None

    def name_faults(self, hf_names: Iterable[str]) -> list[str]:
        """Return at most two messages: one lists the missing names, one the unknown names. Repeats may be missing."""
        present = set(hf_names)
        missing = [name for name, (_, part) in self.places.items() if name not in present and not part.is_repeat]
        unknown = sorted(present - set(self.places))
        kinds = (
            (missing, "missing", "copy or download the folder again, or take one of this shape"),
            (unknown, "not part of this model", "take a folder of this shape, or write one without them"),
        )
        return [
            f"{len(names)} tensors are {state}: {listed(names)}; {remedy}" for names, state, remedy in kinds if names
        ]


def stacked_name(row: Parameter) -> str:
    """Return the name, within a layer, of the tensor that stacks all its experts in transformers 5."""
    return f"mlp.experts.{row.name.rpartition('.')[2]}_proj"


def has_repeats(hf_names: Iterable[str], shape: ModelShape) -> bool:
    """Return True if a checkpoint with these names repeats embedding and head in its multi-token prediction layers."""
    return not {name for row in PARAMETERS for name in _repeat_names(row, shape)}.isdisjoint(hf_names)


def listed(names: list[str]) -> str:
    """Join the first names, and the number of the others."""
    more = len(names) - MOST_SHOWN
    return ", ".join(names[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _hf_prefix(name: str, shape: ModelShape) -> str:
    """Return the prefix of the Hugging Face names of one of our tensors."""
    part, number, *_ = name.split(".")
    layers_before = {"layers": 0, "mtp": shape.num_hidden_layers}
    return f"model.layers.{layers_before[part] + int(number)}." if part in layers_before else ""


def _repeat_names(row: Parameter, shape: ModelShape) -> list[str]:
    if row.hf_repeat is None:
        return []
    return [_hf_prefix(f"mtp.{k}", shape) + row.hf_repeat for k in range(shape.num_nextn_predict_layers)]


def _entry(name: str, row: Parameter, shape: ModelShape, repeat_shared: bool, form: Form) -> HFEntry:
    full = row.shape(shape)
    size = row.hf_shape(shape)
    prefix = _hf_prefix(name, shape)
    if form is Form.OURS:
        parts = [HFPart(name, full, (0,) * len(full))]
    elif row.is_expert and form is Form.STACKED:
        parts = [HFPart(prefix + stacked_name(row), full, (0,) * len(full))]
    elif row.is_expert:
        parts = [
            HFPart(prefix + hf_name.replace(".E.", f".{expert}."), size, (expert, block * size[0], 0))
            for expert in range(full[0])
            for block, hf_name in enumerate(row.hf_names)
        ]
    else:
        origin = (0,) * len(full)
        repeats = _repeat_names(row, shape) if repeat_shared else []
        parts = [HFPart(prefix + row.hf_names[0], size, origin)]
        parts += [HFPart(repeat, size, origin, is_repeat=True) for repeat in repeats]
    return HFEntry(name, full, tuple(parts), row)
