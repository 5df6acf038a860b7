"""The weights of a policy as inference servers get them: folders, adapters, or one tensor after another."""

import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from glm46.compute.distributed.collective_errors import run_on_all_ranks
from glm46.compute.distributed.ranks import ALONE, CheckpointError
from glm46.compute.model.router import folded
from glm46.config.errors import UserError
from glm46.engine.training.hf_weights import export_options, write_weights
from glm46.engine.training.network import Network
from glm46.run.parameters import named_rows
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.adapter_origin import AdapterOrigin
from glm46.storage.huggingface.export_weights import export_weights
from glm46.storage.huggingface.fp8 import Scheme as Fp8
from glm46.storage.huggingface.merge_adapter import merge_adapter
from glm46.storage.huggingface.names import HFNames
from glm46.storage.huggingface.peft_export import export_adapter
from glm46.storage.huggingface.schemes import quantised_names
from glm46.tasks.rl.rollout.weights import whole_weights


def served_tensors(policy: Network, scheme: Fp8 | None) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face name and value of each tensor of the policy, adapters merged, in the types of `whole_weights`, or
    with projections in FP8 as an export of this scheme stores them. Collective: all ranks iterate to the end."""
    names, temperature = HFNames(policy.shape, repeat_shared=False), policy.function.router_temperature
    quantised = quantised_names(names, scheme)
    for name, whole in whole_weights(policy, policy.shape):
        for part in names.entries[name].parts:
            value = folded(name, whole[part.index()], temperature).to(whole.dtype)
            stored = scheme.quantise(value.float()) if part.hf_name in quantised else {"": value}
            yield from ((part.hf_name + suffix, tensor) for suffix, tensor in stored.items())


def write_policy(
    policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype, scheme: Fp8 | None = None
) -> None:
    """Write the policy as a Hugging Face folder, adapters merged as `whole_weights` does, and projections in FP8 if
    there is a scheme. Collective.

    Servers take merged weights of any adapter, those of experts and DoRA too, which they refuse beside a base.
    """
    if scheme is not None:
        _write_quantised(policy, tokenizer, folder, dtype, scheme)
        return
    if policy.plan.config.adapter is None:
        write_weights(policy, tokenizer, folder, dtype)
        return
    adapter = folder.with_name(f"{folder.name}-adapter")
    if dist.get_rank() == 0 and adapter.exists():  # of a run that was killed; export begins with a collective
        shutil.rmtree(adapter)
    write_adapters(policy, tokenizer, adapter, dtype)
    merge_adapter(base_folder(policy, folder.parent), adapter, folder, target=dtype)


class _InOrder(Mapping[str, Tensor]):
    """Tensors of an iterator, each asked for once and in turn."""

    def __init__(self, names: Mapping[str, object], tensors: Iterator[tuple[str, Tensor]]):
        self._names, self._tensors = names, tensors

    def __getitem__(self, name: str) -> Tensor:
        found, tensor = next(self._tensors)
        assert found == name, (found, name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _write_quantised(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype, scheme: Fp8) -> None:
    """Write a folder in FP8, on rank 0 alone: a scale needs its whole block, which no rank may hold. Collective."""
    config, options = export_options(policy, tokenizer, dtype, scheme)
    tensors, shape = whole_weights(policy, policy.shape), policy.shape

    def write() -> None:
        try:
            if dist.get_rank() == 0:
                export_weights(
                    folder, shape, config, _InOrder(named_rows(shape), tensors), options=options, ranks=ALONE
                )
        except CheckpointError as error:
            raise UserError(*error.faults) from error
        finally:
            deque(tensors, maxlen=0)  # the other ranks gather them too

    run_on_all_ranks(write)


def write_adapters(policy: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the adapters of the policy as a PEFT folder. Collective.

    A base in another format than Hugging Face's is written beside the versions, once.
    """
    base = base_folder(policy, folder.parent)
    if not run_on_all_ranks(base.exists):
        write_weights(policy, tokenizer, base, dtype)
    adapter, own = policy.plan.config.adapter, policy.parameters
    origin = AdapterOrigin(base_dtype=adapter.base_dtype)
    export_adapter(folder, policy.plan.shape, own, scale=adapter.scale, base=str(base), origin=origin)


def base_folder(policy: Network, versions: Path) -> Path:
    """The Hugging Face folder of the base, in the folder of versions if the run began with another format."""
    start = policy.plan.config.checkpoint
    return Path(start.initial_load_path) if start.initial_load_in_hf else versions / "base"
