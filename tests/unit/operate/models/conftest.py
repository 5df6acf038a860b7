"""A small model folder that the tests of the Python API share."""

from pathlib import Path

import pytest

from tests.builders import model_folder, random_model, tiny_shape

SHAPE = tiny_shape()


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of random weights."""
    return model_folder(tmp_path_factory.mktemp("model") / "hf", random_model(SHAPE, seed=1))
