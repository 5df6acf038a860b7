"""Facts about a model in a folder, without torch and without reading its weights."""

import sys
from pathlib import Path
from typing import NamedTuple

from glm46.config.errors import UserError
from glm46.config.loader import stored_config
from glm46.config.model import ModelConfig, ModelShape
from glm46.config.rules_model import unaligned_experts
from glm46.run.function import function_of_meta
from glm46.storage.checkpoint.folder_kind import Kind, require_kind
from glm46.storage.checkpoint.integrity import META, read_meta
from glm46.storage.data.tokenizer import TOKENIZER_KEY, Tokenizer, load_tokenizer
from glm46.storage.huggingface.config_json import CONFIG, read_config, shape_of
from glm46.storage.huggingface.hub import local_tokenizer


class StoredModel(NamedTuple):
    """A model in a Hugging Face folder or a step folder."""

    shape: ModelShape
    """Shape in config.json, which may have prediction layers that the files lack."""
    tokenizer_path: str
    fingerprint: str | None
    """Fingerprint of the tokenizer that the run trained with."""
    flavor: str = ""
    """Preset of the run."""

    def tokenizer(self, requested: str | None) -> Tokenizer:
        """Load the tokenizer that the model was trained with, or the one that the user gives with ``--tokenizer``.

        Raises:
            UserError: the tokenizer does not exist, has another fingerprint, or has more ids than the model.
        """
        path = requested or local_tokenizer(self.tokenizer_path)
        try:
            loaded = load_tokenizer(path, self.flavor)
        except UserError as error:
            if requested:
                raise
            raise UserError(*(f"{fault}; or give --tokenizer" for fault in error.faults)) from error
        if not requested and self.fingerprint not in (None, loaded.fingerprint):
            raise UserError(
                f"tokenizer '{path}': fingerprint {loaded.fingerprint[:12]}…, but the checkpoint was trained with "
                f"{self.fingerprint[:12]}…; give that tokenizer as --tokenizer"
            )
        if loaded.vocab_size > self.shape.vocab_size:
            ids = f"{loaded.vocab_size} ids, the model has {self.shape.vocab_size}"
            raise UserError(f"tokenizer '{loaded.path}': {ids}; give another --tokenizer")
        return loaded


def warn_of_other_tokenizer(model: StoredModel, requested: str | None) -> None:
    """Print a warning if ``--tokenizer`` is another one than the model's own. No warning for a model whose own
    tokenizer cannot be read, which is what the option is for."""
    if requested is None:
        return
    path = local_tokenizer(model.tokenizer_path)
    fingerprint = model.fingerprint
    if fingerprint is None:
        try:
            fingerprint = load_tokenizer(path, model.flavor).fingerprint
        except UserError:
            return
    if load_tokenizer(requested, model.flavor).fingerprint != fingerprint:
        print(
            f"warning: --tokenizer {requested}: is not the tokenizer of the model, {path}; its text may be meaningless",
            file=sys.stderr,
        )


def stored_model(folder: Path) -> StoredModel:
    """Read the description of the model in a folder. Raises UserError if there is no model, or it is damaged."""
    if require_kind(folder, Kind.HUGGING_FACE, Kind.STEP) is Kind.HUGGING_FACE:
        return StoredModel(shape_of(read_config(folder), str(folder / CONFIG)), str(folder), None)
    try:
        meta = read_meta(folder)
        config = whole_model(folder, meta["config"])
        shape = function_of_meta(meta).shape
        return StoredModel(shape, config.tokenizer_path, meta.get(TOKENIZER_KEY), config.flavor)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / META}: cannot be read ({error}); take another checkpoint") from error


def whole_model(folder: Path, text: str) -> ModelConfig:
    """Parse [model] from the stored config of a step folder. Raises UserError if the folder holds adapters without base
    or a reward model."""
    config = stored_config(text)
    if config.head == "value":
        raise UserError(
            f"{folder}: holds a reward model, which gives a number and no text; [[rl.rewards]] with name = 'model' "
            "and options.load_path takes it"
        )
    if config.adapter is not None:
        raise UserError(
            f"{folder}: holds adapters without their base, {config.checkpoint.initial_load_path}; convert them "
            "with adapter-to-hf, then give the base, and the new folder with --adapter"
        )
    return config.model


def alignment_faults(folder: Path, shape: ModelShape, dtype: str) -> list[str]:
    """Return a fault for each width of experts that cannot run in this dtype (but can be converted)."""
    fits_float32 = not any(unaligned_experts(shape, "float32"))
    remedy = "use float32" if fits_float32 else "this folder can be converted, but not run"
    return [f"{folder}: {fault}; {remedy}" for _, _, fault in unaligned_experts(shape, dtype)]
