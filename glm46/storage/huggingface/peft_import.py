"""Fills adapters on any mesh from a PEFT folder, so that training continues from it."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from glm46.compute.distributed.collective_errors import catch_user_error
from glm46.compute.distributed.local_tensor import global_indices, local_tensor
from glm46.compute.distributed.ranks import Ranks
from glm46.config.errors import UserError, raise_if
from glm46.config.model import ModelShape
from glm46.storage.huggingface.names import MOST_SHOWN, listed
from glm46.storage.huggingface.peft_export import split_name
from glm46.storage.huggingface.peft_folder import AdapterFolder


@torch.no_grad()
def import_adapter(folder: Path, shape: ModelShape, tensors: Mapping[str, Tensor], *, scale: float) -> None:
    """Fill this rank's parts of adapters from a PEFT folder. Collective.

    The folder's scale may differ; B then changes so that the product stays the same.

    Args:
        tensors: Tensor or DTensor of any type and device by our name; ranks may hold different names. All adapters of
            the model together must equal the folder's.
        scale: factor of the product B A.

    Raises:
        UserError: on all ranks. Either all faults of the folder, before a tensor is changed; or ranks that do not fit,
            and values that are not finite.
        CheckpointError: on all ranks, if reading failed on any of them.
    """
    ranks = Ranks.of_this_run()
    with ranks.stage("listing adapters") as stage:
        stage.value = list(tensors)
    ours = {name for names in stage.values for name in names}
    with ranks.stage(f"checking {folder}") as stage:
        if ranks.is_first:
            _, error = catch_user_error(lambda: check_adapter(folder, shape, ours))
            stage.value = error and error.faults
    raise_if(stage.values[0] or [])
    with ranks.stage(f"reading {folder}") as stage, AdapterFolder(folder, shape) as adapter:
        faults = list[str]()
        for name, tensor in tensors.items():
            _, error = catch_user_error(lambda: _fill(adapter, name, tensor, scale))  # noqa: B023 - called at once
            faults += error.faults if error else ()
        stage.value = faults
    all_faults = {fault for faults in stage.values for fault in faults}
    raise_if(sorted(all_faults)[:MOST_SHOWN])


def _fill(adapter: AdapterFolder, name: str, tensor: Tensor, scale: float) -> None:
    """Fill this rank's part of one of our tensors. Raises UserError if the ranks differ, or a value is not finite."""
    weight, kind = split_name(name)
    indices = global_indices(tensor)
    local = local_tensor(tensor)
    is_stacked = adapter.is_stacked(weight)
    rank = tensor.shape[-2 if kind == "lora_A" else -1]
    for place, expert in enumerate(indices[0].tolist() if is_stacked else [0]):
        product = adapter.product(weight, expert, scale=scale)
        values = getattr(product, kind)
        saved = product.lora_A.shape[0]
        if kind != "magnitude":
            if saved < rank or product.lora_B[:, rank:].any():  # the file pads lower ranks with zeros
                part, key = (f" of experts.{weight.split('.')[-1]}", "expert_rank") if is_stacked else ("", "rank")
                # The message names no layer: all layers have the same fault, which is shown once.
                raise UserError(
                    f"{adapter.folder}: adapters{part} have rank {saved}, but adapter.{key} = {rank}; set it to {saved}"
                )
            values = values[:rank] if kind == "lora_A" else values[:, :rank]
        for dim, index in enumerate(indices[1:] if is_stacked else indices):
            values = values.index_select(dim, index)
        (local[place] if is_stacked else local).copy_(values)


def check_adapter(folder: Path, shape: ModelShape, ours: set[str]) -> None:
    """Check a folder without reading its values. Raises UserError if the folder is damaged, or does not adapt exactly
    these weights in the same way. ``ours``: names of all our adapters."""
    with AdapterFolder(folder, shape) as adapter:
        expected = {split_name(name)[0] for name in ours}
        present = set(adapter.weights)
        faults = []
        remedy = "change adapter.targets, layers or expert_rank"
        for state, weights in (("lacks", expected - present), ("has more", present - expected)):
            if weights:
                faults.append(f"{state} adapters, of {len(weights)} weights: {listed(sorted(weights))}; {remedy}")
        is_dora = any(split_name(name)[1] == "magnitude" for name in ours)
        if is_dora != adapter.is_dora:
            configured, other = ('"dora"', '"lora"') if is_dora else ('"lora"', '"dora"')
            faults.append(f"adapter.name = {configured}, but the folder is {other} by its use_dora; set it to {other}")
        raise_if([f"{folder}: {fault}" for fault in faults])
