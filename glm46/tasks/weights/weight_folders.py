"""Weights of other programs: Hugging Face and PEFT folders, and folders of torch.distributed.checkpoint."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from glm46.compute.distributed.local_tensor import local_tensor
from glm46.engine.training.network import Network
from glm46.engine.training.saved_config import differences, saved_run
from glm46.engine.training.state import Progress
from glm46.engine.training.weight_source import WeightFolder
from glm46.files.progress import bytes_progress
from glm46.run.function import NetworkFunction
from glm46.run.plan import Plan
from glm46.storage.checkpoint.folder_kind import Kind, kind_of
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.adapter_origin import (
    changed_files,
    held_base_dtype,
    other_base_dtype,
    read_base_dtype,
    read_base_files,
    refuse_other_base,
)
from glm46.storage.huggingface.folder_check import files_of_weights, stored_shape
from glm46.storage.huggingface.import_weights import import_weights
from glm46.storage.huggingface.peft_import import import_adapter
from glm46.tasks.weights.exports import save_weights
from glm46.tasks.weights.start_folders import refuse_weights


class WeightFolders:
    """Weights in folders of other programs; see `WeightSource`."""

    def refuse(self, plan: Plan) -> None:
        """See `WeightSource.refuse`."""
        refuse_weights(plan.config)

    def open(self, network: Network, folder: Path) -> WeightFolder:
        """See `WeightSource.open`."""
        if kind_of(folder) is Kind.PEFT:
            return AdapterFiles(network, folder)
        return ModelFiles(network, folder)

    def check(
        self, networks: Mapping[str, Network], folder: Path, saved_files: Mapping[str, Mapping[str, str]]
    ) -> list[str]:
        """See `WeightSource.check`."""
        for name, network in networks.items():
            if changed := changed_files(saved_files.get(name, {}), network.frozen_files):
                return [_changed_base(network, folder, changed)]
        adapted = [network for network in networks.values() if network.is_adapted]
        if adapted:
            _warn_of_resumed_adapters(adapted[0], folder)
        return []

    def export(self, network: Network, tokenizer: Tokenizer, progress: Progress) -> str:
        """See `WeightSource.export`."""
        return save_weights(network, tokenizer, progress)


class ModelFiles:
    """The model of a Hugging Face folder, or of another program's folder in DCP's format; see `WeightFolder`. It has
    weights and expert biases, and no adapters."""

    def __init__(self, network: Network, folder: Path):
        self.names: Collection[str] = network.pretrained().keys()
        self._network = network
        self._folder = folder

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """See `WeightFolder.read`. Rank 0 shows its progress."""
        folder = self._folder
        shape = self._network.plan.shape
        if self._network.cluster.process.is_main:
            total = sum(local_tensor(tensor).nbytes for tensor in tensors.values())
            with bytes_progress(f"rank 0 reads {folder}", total, print) as report:
                import_weights(folder, shape, tensors, report=report)
        else:
            import_weights(folder, shape, tensors)
        # A folder in DCP's format does not say how its model attends: as this one does.
        trained_shape = self._network.shape if kind_of(folder) is Kind.DCP else stored_shape(folder)
        return NetworkFunction(trained_shape).meta()

    def files(self) -> list[Path]:
        """See `WeightFolder.files`."""
        return files_of_weights(self._folder, self._network.plan.shape)


class AdapterFiles:
    """The adapters of a PEFT folder, for a network whose base has been read; see `WeightFolder`."""

    def __init__(self, network: Network, folder: Path):
        self.names: Collection[str] = network.parameters.keys()
        self._network = network
        self._folder = folder

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """See `WeightFolder.read`. The main rank prints a line if the adapters were trained on a base of another
        dtype."""
        folder = self._folder
        network = self._network
        config = network.plan.config
        assert config.adapter is not None, "a network with adapters"
        saved_files = read_base_files(folder)
        if saved_files.keys() & network.frozen_files.keys():
            refuse_other_base(saved_files, network.frozen_files, config.checkpoint.initial_folder, folder)
        import_adapter(folder, network.plan.shape, tensors, scale=config.adapter.scale)
        if network.cluster.process.is_main:
            _warn_of_loaded_adapters(network, folder)

    def files(self) -> list[Path]:
        """See `WeightFolder.files`. Adapters are trained, so no file has to stay as it is."""
        return []


def _changed_base(network: Network, folder: Path, changed: str) -> str:
    """Return the fault of a step folder that was saved with other files of frozen weights."""
    config = network.plan.config
    path = config.checkpoint.initial_load_path
    keys = [key for key, (source, _) in config.read_weights.items() if str(source) == path]
    key = keys[-1] if keys else "checkpoint.initial_load"
    return (
        f"{key}_path = {path!r}: {changed} changed since {folder} was saved, which belongs to the "
        "frozen weights of then; restore them, or begin anew with another job.dump_folder"
    )


def _warn_of_loaded_adapters(network: Network, folder: Path) -> None:
    """Print a line if the adapters of a PEFT folder were trained on a base of another dtype. Raises UserError if the
    folder is damaged."""
    config = network.plan.config
    base_dtype = None if config.adapter is None else config.adapter.base_dtype
    difference = other_base_dtype(folder, config.checkpoint.initial_folder, base_dtype)
    if difference is not None:
        trained = read_base_dtype(folder)
        remedy = "remove adapter.base_dtype" if trained is None else f'set adapter.base_dtype = "{trained}"'
        print(f"adapter.initial_load_path = {str(folder)!r}: {difference}; to train on the same values, {remedy}")


def _warn_of_resumed_adapters(network: Network, folder: Path) -> None:
    """Print a line on the main rank if the adapters of a step folder were trained on a base of another dtype."""
    config = network.plan.config
    if config.adapter is None or not network.cluster.process.is_main:
        return
    saved = saved_run(folder)
    if saved is None or saved.adapter is None:
        return
    base = config.checkpoint.initial_folder
    if held_base_dtype(base, saved.adapter.base_dtype) == held_base_dtype(base, config.adapter.base_dtype):
        return
    for line in differences(("adapter.base_dtype",), config, folder):
        print(f"{line}; its adapters were trained on other values of the base than they now continue on")
