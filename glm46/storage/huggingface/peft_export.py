"""Exports adapters as a PEFT folder: one layout that PEFT, vLLM and SGLang read.

    ours (`lora_A`, `lora_B`, `magnitude`)       adapter_model.safetensors, each after "base_model.model."
    layers.{i}.<module>.lora_A                    model.layers.{i}.<module>.lora_A.weight
    layers.{i}.mlp.experts.gate_up_lora_A[e]      model.layers.{i}.mlp.experts.{e}.{gate,up}_proj.lora_A.weight, equal
    layers.{i}.mlp.experts.gate_up_lora_B[e]      the rows of gate, then the rows of up
    layers.{i}.mlp.experts.down_lora_A[e]         model.layers.{i}.mlp.experts.{e}.down_proj.lora_A.weight
    <...>magnitude                                <...>.lora_magnitude_vector

A file has one rank and one alpha for all modules. Modules of a lower rank are padded with zeros, which keeps their
product and their scale; SGLang does not read mixed ranks. Sources: peft 0.21.2
`utils/transformers_weight_conversion.py`;
vLLM 0.32.0 `lora/peft_helper.py`, `lora/lora_weights.py`; SGLang 0.5.23 `lora/`.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from glm46.compute.distributed.ranks import Ranks
from glm46.config.model import ModelShape
from glm46.files.tensor_file import lay_out
from glm46.run.parameters import PEFT_NAMES
from glm46.storage.huggingface.adapter_origin import AdapterOrigin
from glm46.storage.huggingface.hub import repository_of
from glm46.storage.huggingface.import_weights import ReportBytes
from glm46.storage.huggingface.names import HFEntry, HFNames, HFPart
from glm46.storage.huggingface.write_folder import OutputFile, Source, drafted_folder, json_bytes, write_tensors

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
SUFFIXES = {kind: f".{name}" for kind, name in PEFT_NAMES.items()}
"""By kind of an adapter's tensor, the end of its PEFT name after the module's name."""

DORA_NOTE = "DoRA: servers refuse it, and PEFT opens it only if attention alone is adapted; use convert merge"

_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", *_LATENT_PROJECTIONS, "o_proj", *_EXPERT_PROJECTIONS)


def split_name(name: str) -> tuple[str, str]:
    """Return the weight that one of our tensors adapts, and its kind, a key of `SUFFIXES`.

    ``layers.0.self_attn.q_proj.lora_A`` adapts ``layers.0.self_attn.q_proj.weight``;
    ``layers.3.mlp.experts.gate_up_lora_B`` adapts ``layers.3.mlp.experts.gate_up``.

    Raises:
        ValueError: it is not the name of an adapter's tensor.
    """
    match = re.fullmatch(r"(.+)([._])(lora_A|lora_B|magnitude)", name)
    if match is None:
        raise ValueError(f"{name} is not a tensor of an adapter")
    return match[1] + (".weight" if match[2] == "." else ""), match[3]


def module_of(part: HFPart) -> str:
    """Return the Hugging Face name of the module that a weight belongs to."""
    return part.hf_name.removesuffix(".weight")


def is_adaptable(entry: HFEntry) -> bool:
    """Return True if a weight may have an adapter: the projections of the main model."""
    return entry.row.fp8_family is not None and not entry.name.startswith("mtp.")


def adapter_entries(shape: ModelShape, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, HFEntry]:
    """Return our tensors with the PEFT tensors that they consist of, in the order of the model. Raises ValueError if a
    name is not an adapter of this model. ``sizes``: shape of the full tensor by our name."""
    names = HFNames(shape, repeat_shared=False).entries
    order = {name: place for place, name in enumerate(names)}
    weights = {name: split_name(name) for name in sizes}
    unknown = [name for name, (weight, _) in weights.items() if weight not in names or not is_adaptable(names[weight])]
    if unknown:
        raise ValueError(f"{unknown[0]} is not an adapter of this model")
    entries = {}
    for name in sorted(sizes, key=lambda name: (order[weights[name][0]], weights[name][1])):
        weight, kind = weights[name]
        parts = [_part(part, kind, sizes[name]) for part in names[weight].parts]
        entries[name] = HFEntry(name, sizes[name], tuple(parts), names[weight].row)
    return entries


def _part(part: HFPart, kind: str, size: tuple[int, ...]) -> HFPart:
    """Return the box of a PEFT tensor in our tensor of this size, for a part of the adapted weight."""
    rows, columns = part.hf_shape
    *expert, first, _ = part.start
    box, start = {
        "lora_A": (size[-2:], (0, 0)),
        "lora_B": ((rows, size[-1]), (first, 0)),
        "magnitude": ((rows,), (first,)),
    }[kind]
    assert kind != "lora_A" or size[-1] == columns, f"{part.hf_name}: lora_A takes {size[-1]} inputs, not {columns}"
    return HFPart(PREFIX + module_of(part) + SUFFIXES[kind], box, (*expert, *start), kind == "lora_A" and first > 0)


def is_of_expert(module: str) -> bool:
    """Return True if a Hugging Face module belongs to a routed expert."""
    return ".mlp.experts." in module


def is_for_experts(config: Mapping[str, Any]) -> bool:
    """Return True if the keys of an adapter_config.json that `export_adapter` writes name routed experts."""
    return not set(_EXPERT_PROJECTIONS).isdisjoint(config["target_modules"])


def _config(modules: Collection[str], num_layers: int) -> dict[str, Any]:
    """Return the keys of adapter_config.json that select the adapted modules, by their Hugging Face names.

    PEFT takes gate_proj, up_proj and down_proj for names of the routed experts, so dense layers and shared
    experts are listed as parameters. Without adapted experts these names are omitted, or PEFT would add new adapters to
    all experts.
    """
    with_experts = any(is_of_expert(module) for module in modules)
    adapted = {module.rsplit(".", 1)[1] for module in modules}
    listed = [name for name in _PROJECTIONS if name in adapted and (with_experts or name not in _EXPERT_PROJECTIONS)]
    parameters = [f"{module}.weight" for module in modules if ".mlp." in module and not is_of_expert(module)]
    layers = sorted({int(module.split(".")[2]) for module in modules if ".self_attn." in module})
    restricted = {"layers_to_transform": layers} if 0 < len(layers) < num_layers else {}
    return {"target_modules": listed, "target_parameters": parameters or None} | restricted


def _config_of_linears(modules: Collection[str]) -> dict[str, Any]:
    """Return the keys for a model that has only nn.Linear, like `transformers` 4: a regular expression of all names."""
    layers: dict[str, set[int]] = {}
    for module in modules:
        _, _, layer, rest = module.split(".", 3)
        layers.setdefault(re.sub(r"\.\d+\.", r".\\d+.", rest).replace(".", r"\."), set()).add(int(layer))
    rests_by_layers: dict[str, list[str]] = {}
    for rest, layer_numbers in layers.items():
        rests_by_layers.setdefault("|".join(map(str, sorted(layer_numbers))), []).append(rest)
    patterns = (rf"({layer_numbers})\.({'|'.join(rests)})" for layer_numbers, rests in rests_by_layers.items())
    return {"target_modules": rf"model\.layers\.({'|'.join(patterns)})"}


_UNKNOWN = AdapterOrigin()


@torch.no_grad()
def export_adapter(
    folder: Path,
    shape: ModelShape,
    tensors: Mapping[str, Source],
    *,
    scale: float,
    base: str,
    origin: AdapterOrigin = _UNKNOWN,
    for_transformers_4: bool = False,
    report: ReportBytes | None = None,
) -> int:
    """Write adapters as a folder that PEFT, vLLM and SGLang open. Collective.

    Adapters with magnitudes (DoRA) become a folder with `use_dora`. PEFT opens it if only attention is adapted, and
    refuses it otherwise; vLLM and SGLang refuse DoRA. `AdapterFolder` reads every such folder, so it can be merged.

    Args:
        folder: must not exist; on a disk that all ranks share.
        shape: shape of the base model.
        tensors: source of the values by our name, see `split_name`; Tensor, DTensor or `StoredTensor`, any type,
            written in FP32. Ranks may hold different names; together they hold A and B of every adapted weight.
        scale: factor of the product B A.
        base: folder or name of the base model, for the config; a folder of huggingface_hub's cache is written as the
            name and commit of its repository.
        origin: known facts about the base besides its name.
        for_transformers_4: name the modules for PEFT on `transformers` 4 (where experts are modules and the default
            names are refused) instead of for the other readers.

    Returns:
        Bytes of tensors that this rank wrote.

    Raises:
        UserError: the folder exists, or the disk has too little space.
        CheckpointError: on all ranks, if writing failed on any of them, or a value is not finite. Nothing is left on
            the disk.
    """
    ranks = Ranks.of_this_run()
    with ranks.stage("listing adapters") as stage:
        stage.value = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    entries = adapter_entries(shape, {name: size for sizes in stage.values for name, size in sizes.items()})
    assert entries, "no adapters to export"
    rank = max(entry.shape[-1] for name, entry in entries.items() if name.endswith("lora_B"))
    stored = []
    for name, entry in entries.items():
        kind = split_name(name)[1]
        for part in entry.parts:
            padded = {"lora_A": (rank, *part.hf_shape[1:]), "lora_B": (*part.hf_shape[:1], rank)}
            stored.append((part.hf_name, torch.float32, padded.get(kind, part.hf_shape)))
    suffix = SUFFIXES["lora_B"]
    modules = [name.removeprefix(PREFIX).removesuffix(suffix) for name, _, _ in stored if name.endswith(suffix)]
    base, revision = repository_of(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "lora_dropout": 0.0,
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "use_dora": any(name.endswith("magnitude") for name in entries),
    } | (_config_of_linears(modules) if for_transformers_4 else _config(modules, shape.num_hidden_layers))
    file = OutputFile(WEIGHTS, *lay_out(stored))
    contents = {CONFIG: json_bytes(config)} | origin.contents()
    with drafted_folder(folder, file.nbytes, ranks) as draft:
        return write_tensors(draft, entries, [file], tensors, ranks, contents, report=report)
