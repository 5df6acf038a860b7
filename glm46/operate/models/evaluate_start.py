"""Checks of ``python -m glm46 evaluate`` before its ranks start, and their start. Does not import torch."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from glm46.compute.distributed.environment import launched_world_size
from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.engine.inference.stored_model import warn_of_other_tokenizer
from glm46.operate.launch.ranks import start_ranks
from glm46.operate.models.model_fit import find_model, is_on_hub, require_fit
from glm46.storage.chats.chat_template import raise_for_source
from glm46.storage.data.manifest import load_manifest
from glm46.storage.huggingface.hub import fetch_options, with_folders

_LENGTHS = (1024, 2048, 4096)
"""Default row lengths for a model whose training is unknown."""


def start_evaluation(argv: Sequence[str], arguments: argparse.Namespace, sources: Mapping[str, Path]) -> int | None:
    """Check the options, fetch the ids of the hub, and start the processes that the options request.

    Returns:
        Exit code; None in a process that is to do the work itself.

    Raises:
        UserError: the model cannot be evaluated on this machine with these options.
    """
    if launched_world_size() is None:
        _check(arguments, sources)
    folders = fetch_options(arguments, "model", "checkpoint", "adapter", "tokenizer")
    return start_ranks("evaluate", with_folders(argv, folders), arguments)


def _check(arguments: argparse.Namespace, sources: Mapping[str, Path]) -> None:
    """Check what the ranks would refuse: folders, degrees, memory, and rows that the model cannot take. For a model on
    the Hub, only what config.json shows is checked.

    Raises:
        UserError: the model cannot be evaluated on this machine with these options.
    """
    folder = arguments.model or arguments.checkpoint
    if (model := find_model(folder)) is None:
        return
    if "drafts" in arguments.tasks:
        require_prediction(model.shape, folder)
    row_lengths(arguments.lengths, None, model.shape.max_position_embeddings)
    manifests = [load_manifest(source) for source in sources.values()]
    if not is_on_hub(folder) and not is_on_hub(arguments.tokenizer):
        tokenizer = model.tokenizer(arguments.tokenizer)
        warn_of_other_tokenizer(model, arguments.tokenizer)
        for manifest in manifests:
            manifest.require_tokenizer(tokenizer.fingerprint)
            raise_for_source(manifest, tokenizer)
    require_fit(arguments, model.shape, drafts="drafts" in arguments.tasks)


def require_prediction(shape: ModelShape, folder: Path) -> None:
    """Raise UserError if the model has no prediction layers, which the task drafts measures."""
    if not shape.num_nextn_predict_layers:
        raise UserError(f"--tasks drafts: {folder} has no prediction layers; take another task, or another folder")


def row_lengths(configured: tuple[int, ...] | None, window: int | None, positions: int) -> tuple[int, ...]:
    """Return the configured row lengths, or the default ones.

    Args:
        window: longest sequence of the training; None if unknown.
        positions: maximum positions of the model.

    Raises:
        UserError: a configured length exceeds the model's positions.
    """
    too_long = [length for length in configured or () if length > positions]
    if too_long:
        raise UserError(
            f"--lengths {','.join(map(str, too_long))}: the model has {positions} positions (max_position_embeddings); "
            "take at most that"
        )
    usual = _LENGTHS if window is None else (window, 2 * window, 4 * window)
    return configured or tuple(length for length in usual if length <= positions) or (positions,)
