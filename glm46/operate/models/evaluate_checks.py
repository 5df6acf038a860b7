"""Checks of ``python -m glm46 evaluate`` before ranks start; without torch."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from glm46.config.errors import UserError
from glm46.config.model import ModelShape
from glm46.operate.models.model_fit import find_model, is_on_hub, require_fit
from glm46.storage.data.manifest import load_manifest

_LENGTHS = (1024, 2048, 4096)
"""Of a model whose training is unknown."""


def check_evaluation(arguments: argparse.Namespace, sources: Mapping[str, Path]) -> None:
    """Check what the ranks would refuse: folders, degrees, memory, and rows that the model cannot take. Of a model of
    the hub, what config.json tells.

    Raises:
        UserError: the model cannot be evaluated on this machine with these options.
    """
    folder = arguments.model or arguments.checkpoint
    if (model := find_model(folder)) is None:
        return
    shapes = [model.shape]
    if "drafts" in arguments.tasks:
        require_prediction(model.shape, folder)
    row_lengths(arguments.lengths, None, model.shape.max_position_embeddings)
    manifests = [load_manifest(source) for source in sources.values()]
    if not is_on_hub(folder) and not is_on_hub(arguments.tokenizer):
        fingerprint = model.tokenizer(arguments.tokenizer).fingerprint
        for manifest in manifests:
            manifest.require_tokenizer(fingerprint)
    if arguments.against is not None and (other := find_model(arguments.against)) is not None:
        shapes.append(other.shape)
    require_fit(arguments, shapes, drafts="drafts" in arguments.tasks)


def require_prediction(shape: ModelShape, folder: Path) -> None:
    """Raise UserError if a model has no prediction layers, which the task drafts measures."""
    if not shape.num_nextn_predict_layers:
        raise UserError(f"--tasks drafts: {folder} has no prediction layers; take another task, or another folder")


def row_lengths(stated: tuple[int, ...] | None, window: int | None, positions: int) -> tuple[int, ...]:
    """Lengths of rows, the stated or the usual ones.

    Args:
        window: longest sequence of the training, if it is known.
        positions: of the model.

    Raises:
        UserError: a stated one is longer than the model's positions.
    """
    too_long = [length for length in stated or () if length > positions]
    if too_long:
        raise UserError(
            f"--lengths {','.join(map(str, too_long))}: the model has {positions} positions (max_position_embeddings); "
            "take at most that"
        )
    usual = _LENGTHS if window is None else (window, 2 * window, 4 * window)
    return stated or tuple(length for length in usual if length <= positions) or (positions,)
