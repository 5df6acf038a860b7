"""The conversions of ``python -m glm46 convert``."""

import argparse
import json
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm46.compute.distributed.local_tensor import global_indices
from glm46.compute.distributed.ranks import CheckpointError
from glm46.config.errors import UserError, raise_if
from glm46.config.loader import dump_config
from glm46.config.model import ModelConfig, ModelShape
from glm46.config.presets import PRESETS, REPEATING
from glm46.config.run_config import RunConfig
from glm46.engine.inference.stored_model import StoredModel, whole_model
from glm46.engine.training.checkpoint_content import BASES_KEY
from glm46.files.local_disk import real_path, space_fault
from glm46.files.progress import bytes_progress
from glm46.run.curriculum import describe_attention
from glm46.run.function import capacity_lines, config_of_meta
from glm46.run.parameters import named_rows
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.checkpoint.integrity import published_steps, step_folder
from glm46.storage.checkpoint.stored_values import DiskTensor, StepTensors
from glm46.storage.data.tokenizer import TOKENIZER_KEY
from glm46.storage.huggingface.adapter_origin import AdapterOrigin
from glm46.storage.huggingface.config_json import CONFIG, config_of, read_config, shape_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_check import stored_shape
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.import_weights import FolderReader
from glm46.storage.huggingface.merge_adapter import merge_adapter, merge_lines
from glm46.storage.huggingface.names import HFNames, has_repeats
from glm46.storage.huggingface.peft_export import DORA_NOTE, export_adapter
from glm46.storage.huggingface.schemes import CONFIG_KEY, ERRORS_FILE, FP8_SCHEMES, SCHEMES, config_of_scheme
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from glm46.tasks.weights.write_model import write_model

_HF_CONFIG = "hf_config"
"""Key in a checkpoint's meta: config.json of the imported weights, so that an export keeps unknown fields."""
_HF_REPEATS = "hf_repeats"
"""Key in a checkpoint's meta: whether the imported folder repeats embedding and head in its prediction layers; an
export then repeats them too."""


def convert(arguments: argparse.Namespace) -> int:
    """Run the conversion that the options name; return the exit code. Raises UserError if it is impossible."""
    kinds = (_to_hf, _from_hf, _from_dcp, _adapter_to_hf, _merge)
    run = {kind.__name__.removeprefix("_"): kind for kind in kinds}
    try:
        return run[arguments.kind](arguments)
    except CheckpointError as error:
        raise UserError(*error.faults) from error
    except OSError as error:
        raise UserError(f"{error.filename or arguments.output}: {error.strerror}") from error


def _to_hf(arguments: argparse.Namespace) -> int:
    if require_kind(arguments.checkpoint, Kind.STEP, Kind.HUGGING_FACE) is Kind.HUGGING_FACE:
        if arguments.dtype is None:
            raise UserError(
                f"--checkpoint {arguments.checkpoint}: this is a Hugging Face folder already; state the type of the "
                f"new one with --dtype, such as {', '.join(SCHEMES)}"
            )
        folder = arguments.checkpoint
        shape = stored_shape(folder)
        repeats = has_repeats(find_tensors(folder), shape)
        model = StoredModel(shape, str(folder), None, _flavor_of(shape, repeats))
        with FolderReader(folder, shape) as reader:
            return _export(arguments, reader.tensors(), model, read_config(folder), repeats=repeats)
    tensors = StepTensors(arguments.checkpoint)
    config = config_of_meta(tensors.meta, arguments.checkpoint)
    raw = tensors.meta.get(_HF_CONFIG)
    shape, temperature = tensors.function
    if config.adapter is not None:
        raise UserError(f"{arguments.checkpoint}: holds adapters without their base; use convert adapter-to-hf")
    table = whole_model(arguments.checkpoint, tensors.meta["config"])
    raise_if([f"{arguments.checkpoint}: holds no {name}" for name in named_rows(shape) if name not in tensors])
    model = StoredModel(shape, table.tokenizer_path, tensors.meta.get(TOKENIZER_KEY), table.flavor)
    repeats = tensors.meta.get(_HF_REPEATS, table.flavor in REPEATING)
    code = _export(arguments, tensors, model, raw, temperature, repeats=repeats)
    for line in capacity_lines(config.moe, "what reads this folder"):
        _report(line)
    return code


def _export(
    arguments: argparse.Namespace,
    tensors: Mapping[str, DiskTensor],
    model: StoredModel,
    raw: dict[str, Any] | None,
    router_temperature: float = 1.0,
    *,
    repeats: bool,
) -> int:
    """Write a Hugging Face folder; return the exit code. With ``repeats``, embedding and head are written in the
    prediction layers too, even without --mtp-copies."""
    shape = model.shape
    dtype = arguments.dtype or "bfloat16"
    repeat_shared = arguments.mtp_copies or repeats
    names = HFNames(shape, repeat_shared=repeat_shared)
    tokenizer = model.tokenizer(arguments.tokenizer)
    if arguments.config:
        raw = read_config(arguments.config)
        shape_of(raw, str(arguments.config / CONFIG))  # raises faults that name the file
    stored = {name: tensors[name] for name in names.entries}
    options = ExportOptions(
        dtype=torch.float32 if dtype == "float32" else torch.bfloat16,
        scheme=SCHEMES.get(dtype),
        repeat_shared=repeat_shared,
        router_temperature=router_temperature,
        max_file_bytes=int(arguments.max_file_gb * 1e9),
        other_files=files_beside_weights(tokenizer, max_length=shape.max_position_embeddings),
    )
    config = config_of(shape, raw, eos_ids=stop_ids(tokenizer), dtype=str(options.dtype).removeprefix("torch."))
    if options.scheme is not None:
        config[CONFIG_KEY] = config_of_scheme(options.scheme, names)
    total = sum(tensor.nbytes for tensor in stored.values())
    with bytes_progress("writing weights", total, _report) as report:
        size = export_weights(arguments.output, shape, config, stored, options=options, report=report)
    out = arguments.output
    print(f"{out}: {size:,} bytes of weights in {dtype}")
    print(
        f"to serve it: vllm serve {out} --host 127.0.0.1, or python -m sglang.launch_server --model-path {out}; "
        "docs/deployment.md"
    )
    if router_temperature != 1.0:
        print(f"router temperature of its last step: {router_temperature:g}; the gates are divided by it")
    if shape.rope_scaling is not None:
        print(f"RoPE scaling of its last step: {describe_attention(shape)[1]}; config.json has it")
    if options.scheme is not None:
        errors = json.loads((arguments.output / ERRORS_FILE).read_text(encoding="utf-8"))
        worst = max(errors, key=lambda name: errors[name]["relative"])
        print(f"largest relative error {errors[worst]['relative']:.4f}, of {worst}; all of them: {ERRORS_FILE}")
    return 0


def _from_hf(arguments: argparse.Namespace) -> int:
    raw = read_config(arguments.model)
    shape = stored_shape(arguments.model)
    return _import(arguments, arguments.model, shape, raw, arguments.model)


def _from_dcp(arguments: argparse.Namespace) -> int:
    require_kind(arguments.checkpoint, Kind.DCP)
    raw = read_config(arguments.config)
    shape = stored_shape(arguments.checkpoint, shape_of(raw, str(arguments.config / CONFIG)))
    return _import(arguments, arguments.checkpoint, shape, raw, arguments.config)


def _import(
    arguments: argparse.Namespace, source: Path, shape: ModelShape, raw: dict[str, Any], tokenizer: Path
) -> int:
    """Write the weights of a folder as step 0 of a checkpoint folder."""
    if steps := published_steps(arguments.output):
        raise UserError(f"{step_folder(arguments.output, steps[-1])}: exists already; name another folder")
    entries = HFNames(shape, repeat_shared=False).entries
    dtype = getattr(torch, arguments.dtype)
    kinds = {name: (entry.shape, torch.float32 if entry.is_fp32 else dtype) for name, entry in entries.items()}
    total = sum(prod(size) * dtype.itemsize for size, dtype in kinds.values())
    if fault := space_fault(arguments.output / "step-000000", total):
        raise UserError(fault)
    with FolderReader(source, shape) as reader, bytes_progress("reading weights", total, _report) as report:

        def fill(name: str, tensor: Tensor) -> None:
            raise_if([f"{source}: {fault}" for fault in reader.fill(name, tensor, global_indices(tensor))])
            report(tensor.nbytes)

        repeats = arguments.kind == "from_hf" and has_repeats(find_tensors(source), shape)
        config = RunConfig(model=_table_of(shape, tokenizer, repeats))
        meta: dict[str, Any] = {"config": dump_config(config), _HF_CONFIG: raw}
        if arguments.kind == "from_hf":
            meta[_HF_REPEATS] = repeats
        folder = write_model(arguments.output, kinds, fill, meta)
    print(f"{folder}: checkpoint.initial_load_path for a run with initial_load_model_only = true")
    return 0


def _adapter_to_hf(arguments: argparse.Namespace) -> int:
    tensors = StepTensors(arguments.checkpoint)
    config = config_of_meta(tensors.meta, arguments.checkpoint)
    if (adapter := config.adapter) is None:
        raise UserError(f"{arguments.checkpoint}: holds a whole model, not adapters; use convert to-hf")
    base = str(config.checkpoint.initial_load_path)
    total = sum(tensor.nbytes for tensor in tensors.values())
    base_files = next(iter(tensors.meta[BASES_KEY].values()))
    with bytes_progress("writing adapters", total, _report) as report:
        size = export_adapter(
            arguments.output,
            tensors.function.shape,
            tensors,
            scale=adapter.scale,
            base=base,
            origin=AdapterOrigin(base_files, adapter.base_dtype),
            for_transformers_4=arguments.peft_for == "transformers-4",
            report=report,
        )
    print(f"{arguments.output}: {size:,} bytes of adapters; its base is {base}")
    if adapter.name == "dora":
        print(DORA_NOTE)
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    target = None if arguments.dtype is None else FP8_SCHEMES.get(arguments.dtype) or getattr(torch, arguments.dtype)
    total = sum(record.nbytes for _, record in find_tensors(arguments.base).values())
    with bytes_progress("merging", total, _report) as report:
        errors = merge_adapter(arguments.base, arguments.adapter, arguments.output, target=target, report=report)
    for line in merge_lines(arguments.output, errors):
        (_report if line.startswith("warning") else print)(line)
    return 0


def _table_of(shape: ModelShape, folder: Path, repeats: bool) -> ModelConfig:
    """Return the [model] table of a shape: the nearest preset, the keys that differ from it, the folder's tokenizer."""
    flavor = _flavor_of(shape, repeats)
    return ModelConfig.model_validate(
        {"flavor": flavor, "shape": _differences(shape, flavor), "tokenizer_path": str(real_path(folder))}
    )


def _flavor_of(shape: ModelShape, repeats: bool) -> str:
    """Return the nearest preset. Among presets of equal shape, choose by whether they are published with repeats."""
    return min(PRESETS, key=lambda flavor: (len(_differences(shape, flavor)), (flavor in REPEATING) is not repeats))


def _differences(shape: ModelShape, flavor: str) -> dict[str, Any]:
    preset: Mapping[str, Any] = PRESETS[flavor].model_dump()
    return {key: value for key, value in shape.model_dump().items() if preset[key] != value}


def _report(line: str) -> None:
    print(line, file=sys.stderr)
