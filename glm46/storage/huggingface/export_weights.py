"""Exports a model as a Hugging Face folder, written by all ranks concurrently into the same files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from glm46.compute.distributed.ranks import Ranks
from glm46.config.model import ModelShape
from glm46.files.tensor_file import lay_out
from glm46.storage.huggingface.config_json import CONFIG
from glm46.storage.huggingface.folder_tensors import SINGLE_FILE
from glm46.storage.huggingface.import_weights import ReportBytes
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.schemes import Scheme, quantised_names
from glm46.storage.huggingface.write_folder import OutputFile, Source, drafted_folder, json_bytes, write_tensors


@dataclass(frozen=True)
class ExportOptions:
    """Format of an export."""

    dtype: torch.dtype = torch.bfloat16
    """Type of the weights. The routers' selection biases are always FP32."""
    scheme: Scheme | None = None
    """Quantisation of the projections, or None. One process only: a scale needs its complete block or group."""
    repeat_shared: bool = False
    """Repeat embedding and head in the prediction layers, as GLM-4.5 and GLM-4.5-Air do; GLM-4.6 does not."""
    router_temperature: float = 1.0
    """Router temperature of the exported `NetworkFunction`: gates are divided by it in FP32, and then rounded once."""
    max_file_bytes: int = 5_000_000_000
    """Maximum bytes of tensors in one file; a larger tensor has its own file."""
    other_files: Mapping[str, bytes] = field(default_factory=dict)
    """Content by file name: tokenizer, generation config and others."""


@torch.no_grad()
def export_weights(
    folder: Path,
    shape: ModelShape,
    config: dict[str, Any],
    tensors: Mapping[str, Source],
    *,
    options: ExportOptions = ExportOptions(),
    report: ReportBytes | None = None,
    ranks: Ranks | None = None,
) -> int:
    """Write a folder that `transformers`, vLLM and SGLang open. Collective over `ranks`. Returns the bytes of tensors
    that this rank wrote.

    Args:
        folder: must not exist; on a disk that all ranks share.
        config: content of config.json, from `config_of`.
        tensors: source of the values by our name; ranks may hold different names. The ranks' parts must cover every
            element of the model.
        ranks: the ranks that write it; None: all.

    Raises:
        UserError: the folder exists, or the disk has too little space.
        CheckpointError: on all ranks, if writing failed on any of them, or a weight is not finite. Nothing is left on
            the disk.
    """
    ranks = ranks or Ranks.of_this_run()
    assert options.scheme is None or ranks.size == 1
    names = HFNames(shape, repeat_shared=options.repeat_shared)
    files = _lay_out_files(names, options)
    contents = {CONFIG: json_bytes(config), **options.other_files}
    with drafted_folder(folder, sum(file.nbytes for file in files), ranks) as draft:
        return write_tensors(
            draft,
            names.entries,
            files,
            tensors,
            ranks,
            contents,
            scheme=options.scheme,
            router_temperature=options.router_temperature,
            report=report,
        )


def _lay_out_files(names: HFNames, options: ExportOptions) -> list[OutputFile]:
    """Assign tensors to files, in the order of the model; start a new file if the next tensor does not fit."""
    groups: list[list[tuple[str, torch.dtype, tuple[int, ...]]]] = [[]]
    filled = 0
    quantised = quantised_names(names, options.scheme)
    for entry in names.entries.values():
        dtype = torch.float32 if entry.is_fp32 else options.dtype
        for part in entry.parts:
            stored = [(part.hf_name, dtype, part.hf_shape)]
            if options.scheme is not None and part.hf_name in quantised:
                by_suffix = options.scheme.stored(part.hf_shape)
                stored = [(part.hf_name + suffix, *kind_and_size) for suffix, kind_and_size in by_suffix.items()]
            nbytes = sum(prod(size) * kind.itemsize for _, kind, size in stored)
            if groups[-1] and filled + nbytes > options.max_file_bytes:
                groups.append([])
                filled = 0
            groups[-1] += stored
            filled += nbytes
    groups[-1] += [(name, options.dtype, size) for name, size in names.empty.items()]
    if len(groups) == 1:
        return [OutputFile(SINGLE_FILE, *lay_out(groups[0]))]
    numbered = enumerate(groups, start=1)
    return [OutputFile(f"model-{i:05d}-of-{len(groups):05d}.safetensors", *lay_out(group)) for i, group in numbered]
