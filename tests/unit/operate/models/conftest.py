"""A small model folder that the tests of the Python API share."""

from pathlib import Path

import pytest
import torch

from glm46.compute.model.transformer import Transformer
from glm46.config.presets import PRESETS
from glm46.storage.data.tokenizer import load_tokenizer
from glm46.storage.huggingface.config_json import config_of
from glm46.storage.huggingface.export_weights import ExportOptions, export_weights
from glm46.storage.huggingface.tokenizer_files import files_beside_weights, stop_ids
from tests.small_run import TINY

SHAPE = PRESETS["debug"].model_copy(update={key: value for key, value in TINY.items() if key != "flavor"})


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of random weights."""
    folder = tmp_path_factory.mktemp("model") / "hf"
    tokenizer = load_tokenizer("builtin")
    torch.manual_seed(1)
    model = Transformer(SHAPE)
    tensors = {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for name, tensor in tensors.items():
        torch.nn.init.normal_(tensor, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    config = config_of(SHAPE, None, eos_ids=stop_ids(tokenizer), dtype="float32")
    files = files_beside_weights(tokenizer, max_length=SHAPE.max_position_embeddings)
    export_weights(folder, SHAPE, config, tensors, options=ExportOptions(torch.float32, other_files=files))
    return folder
