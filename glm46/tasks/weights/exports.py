"""Save the model of a run as a Hugging Face folder, or its adapters as a PEFT folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from glm46.compute.distributed.ranks import Ranks
from glm46.config.presets import REPEATING
from glm46.engine.training.network import Network
from glm46.engine.training.state import Progress
from glm46.run.function import capacity_lines
from glm46.storage.data.tokenizer import Tokenizer
from glm46.storage.huggingface.adapter_origin import AdapterOrigin
from glm46.storage.huggingface.config_json import config_of, read_config
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.folder_tensors import find_tensors
from glm46.storage.huggingface.names import HFNames, has_repeats
from glm46.storage.huggingface.peft_export import DORA_NOTE, export_adapter
from glm46.storage.huggingface.schemes import CONFIG_KEY, Scheme, config_of_scheme
from glm46.storage.huggingface.stored_folder import publish_folder
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids


def save_weights(network: Network, tokenizer: Tokenizer, progress: Progress) -> str:
    """Save the model as a Hugging Face folder under job.dump_folder. A network with adapters saves only the adapters,
    as a PEFT folder. Replaces folders of an earlier start. Collective.

    A run that started from such a folder keeps the fields of its config.json, and repeats embedding and head if the
    folder does.

    Returns:
        Lines for the user: the folder; for DoRA also a note about loading it.
    """
    config = network.plan.config
    shape = network.shape
    folder = Path(config.job.dump_folder) / "huggingface" / f"step-{progress.step:06d}"
    if config.adapter is not None:
        base = config.checkpoint.initial_load_path
        adapters = network.parameters
        assert base is not None, "adapters have a base"
        origin = AdapterOrigin(network.frozen_files, config.adapter.base_dtype)
        with _replaced(folder) as new:
            export_adapter(new, shape, adapters, scale=config.adapter.scale, base=base, origin=origin)
        place = _published(folder, config.checkpoint_url)
        return f"{place}\n{DORA_NOTE}" if config.adapter.name == "dora" else place
    with _replaced(folder) as new:
        write_weights(network, tokenizer, new, torch.bfloat16)
    place = _published(folder, config.checkpoint_url)
    return "\n".join([place, *capacity_lines(config.moe, "what reads this folder")])


def _published(folder: Path, url: str | None) -> str:
    """Upload an export to the object store of the run, if it has one, next to its checkpoints. Collective. Returns the
    place of the export for the user."""
    if url is None:
        return str(folder)
    target = f"{url}/{folder.parent.name}/{folder.name}"
    ranks = Ranks.of_this_run()
    with ranks.stage(f"uploading {folder}"):
        if ranks.is_first:
            publish_folder(folder, target)
    return target


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """Yield a new folder to write, which replaces `folder` if the block succeeds. Collective."""
    new = folder.with_name(f"{folder.name}.new")
    ranks = Ranks.of_this_run()
    with ranks.stage(f"removing {new}"):  # left by a start that was killed
        if ranks.is_first:
            shutil.rmtree(new, ignore_errors=True)
    yield new
    with ranks.stage(f"replacing {folder}"):
        if ranks.is_first:
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)


def write_weights(network: Network, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype) -> None:
    """Write the model, without adapters, as a Hugging Face folder in the given dtype. Collective.

    Args:
        folder: must not exist.
    """
    config_json, options = export_options(network, tokenizer, dtype)
    export_weights(folder, network.shape, config_json, network.pretrained(), options=options)


def export_options(
    network: Network, tokenizer: Tokenizer, dtype: torch.dtype, scheme: Scheme | None = None
) -> tuple[dict[str, Any], ExportOptions]:
    """Return the config.json and the options to export a network as a Hugging Face folder.

    Raises:
        UserError: no projection of the model fits the scheme.
    """
    config = network.plan.config
    shape = network.shape
    raw = None
    repeat_shared = config.model.flavor in REPEATING
    if config.checkpoint.initial_load_in_hf:
        origin = config.checkpoint.initial_folder
        raw = read_config(origin)
        repeat_shared = has_repeats(find_tensors(origin), shape)
    config_json = config_of(shape, raw, eos_ids=stop_ids(tokenizer), dtype=str(dtype).removeprefix("torch."))
    files = files_beside_weights(tokenizer, max_length=shape.max_position_embeddings)
    if scheme is not None:
        config_json[CONFIG_KEY] = config_of_scheme(scheme, HFNames(shape, repeat_shared=repeat_shared))
    temperature = network.function.router_temperature
    return config_json, ExportOptions(dtype, scheme, repeat_shared, temperature, other_files=files)
